"""Tokenizers come from the checkpoint's own files and behave as those who wrote them expect."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.gguf_file import GgufFile
from shipway.model.gguf_tokenizer import gguf_tokenizer
from shipway.model.tokenizer import Tokenizer

TEXT = "the quick  brown fox: naïve café, 漢字, 🙂👩‍👩‍👧 and\n\ttabs 12345"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_checkpoints.make("llama2", tmp_path)


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return open_checkpoint(directory).tokenizer


def settings(directory: Path, **changes: Any) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return open_checkpoint(directory).tokenizer


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == TEXT


def test_bos_is_added_only_where_the_checkpoint_and_the_caller_want_it(directory: Path) -> None:
    with_bos = settings(directory, add_bos_token=True)
    assert with_bos.encode("a") == [1, *with_bos.encode("a", add_bos=False)]
    assert settings(directory, add_bos_token=False).encode("a")[0] != 1
    assert settings(directory, add_bos_token=None).encode("a")[0] != 1  # tokenizer.json has no post-processor


def edit_backend(directory: Path, **changes: Any) -> Tokenizer:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return open_checkpoint(directory).tokenizer


PADDING = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "</s>"}
TRUNCATION = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


@pytest.mark.parametrize("batch", [{"padding": PADDING}, {"truncation": TRUNCATION}, {"truncation": None}])
def test_prompt_is_taken_whole_whatever_its_tokenizer_once_did_to_batches(
    directory: Path, batch: dict[str, Any]
) -> None:
    tokenizer = edit_backend(directory, **batch)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ids == [1, *theirs(TEXT, add_special_tokens=False).input_ids]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}, "Missing [UNK] token"),
        (
            {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
            | {"max_input_chars_per_word": 100},
            "Missing [UNK] token",
        ),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None, "byte_fallback": False}, "`unk_id` is missing"),
    ],
)
def test_text_a_tokenizer_has_no_token_for_is_one_clear_line(directory: Path, model: dict[str, Any], said: str) -> None:
    (directory / "tokenizer_config.json").write_text("{}")
    tokenizer = edit_backend(directory, model=model, added_tokens=[])
    with pytest.raises(
        ShipwayError, match=re.escape(f"{directory / 'tokenizer.json'}: the tokenizer fails: ")
    ) as caught:
        tokenizer.encode("hello")
    assert said in str(caught.value)


def test_panic_of_the_tokenizer_library_is_an_error_of_that_file(directory: Path) -> None:
    tokenizer = edit_backend(directory, decoder={"type": "Strip", "content": "a", "start": 100, "stop": 100})
    with pytest.raises(ShipwayError, match=r"tokenizer\.json: the tokenizer fails: index out of bounds"):
        tokenizer.decode(tokenizer.encode("a"))


def test_special_tokens_in_text_are_single_tokens_and_are_not_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a</s>", add_bos=False)[-1] == 2
    assert tokenizer.decode([2]) == ""


def test_ids_of_padding_rows_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("fox"), 319]) == "fox"


def test_eos_ids_of_all_files_are_merged(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert open_checkpoint(directory).tokenizer.eos_ids == (2, 7, 9)


def test_streaming_never_emits_half_a_character_and_loses_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_bos=False)
    assert len(ids) > len(TEXT)  # most characters are several tokens, or the test shows nothing
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == TEXT
    assert stream.flush() == ""


def test_streaming_shows_bytes_that_never_became_a_character_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂", add_bos=False)
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == "a"
    assert set(stream.flush()) == {"\ufffd"}


def test_streaming_work_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    for token in tokenizer.encode("fox " * 500):
        stream.push(token)
    assert len(stream._window) < 8


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "  hi there "}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)
def test_chat_renders_as_transformers_renders(directory: Path, messages: list[dict[str, str]]) -> None:
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = open_checkpoint(directory).tokenizer
    assert ours.chat(messages) == expected
    assert ours.encode(expected, add_bos=False) == theirs(expected, add_special_tokens=False).input_ids


def test_chat_offers_what_published_templates_use(directory: Path) -> None:
    template = (
        "{% for m in messages %}\n"
        "    {% if m['role'] == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }} {% generation %}{{ m['content'] }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') }}{{ eos_token }}"
    )
    tokenizer = settings(directory, chat_template=template)
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "<é>"}]
    assert tokenizer.chat(messages) == f'{{"role": "user", "content": "<é>"}} <é>{datetime.now().year}</s>'


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages.append(1) }}", "append"),  # the sandbox keeps templates from changing anything
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ '{x}'.format() }}", "KeyError: 'x'"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_fails_is_one_clear_line(directory: Path, template: str, said: str) -> None:
    tokenizer = settings(directory, chat_template=template)
    with pytest.raises(ShipwayError, match=said) as caught:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_without_an_end_is_given_up(directory: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shipway.model.tokenizer._TEMPLATE_S", 0.2)
    tracer = sys.gettrace()
    with pytest.raises(ShipwayError, match=r"does not come to an end within 0.2 s"):
        settings(directory, chat_template=template).chat([])
    assert sys.gettrace() is tracer


def test_a_template_file_comes_before_the_one_in_the_settings(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "right"}]
    assert settings(directory, chat_template=named).chat([]) == "right"
    (directory / "chat_template.jinja").write_text("from the file")
    assert open_checkpoint(directory).tokenizer.chat([]) == "from the file"


def test_chat_without_a_template_says_so(directory: Path) -> None:
    with pytest.raises(ShipwayError, match="no chat template"):
        settings(directory, chat_template=None).chat([{"role": "user", "content": "hi"}])


def gguf(tokens: list[str], **own: Any) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ({"tokens": tokens} | own).items()}
    return gguf_tokenizer(GgufFile(Path("model.gguf"), metadata, {}))


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  no!\n\n", ["it", "'s", " 1234", " ", " no", "!", "\n\n"]),
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("qwen2", "IT'S 1234\n\n x", ["IT", "'S", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("llama-bpe", "a 12345?\n", ["a", " ", "123", "45", "?\n"]),
        ("default", "a-1234 b", ["a", "-", "123", "4", " b"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_cut(pre: str, text: str, pieces: list[str]) -> None:
    backend = gguf(BYTES, model="gpt2", pre=pre, merges=[]).backend
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_llama3_takes_a_whole_word_that_is_a_token() -> None:
    tokens = [*BYTES, "foxes"]  # no merge leads there
    assert gguf(tokens, model="gpt2", pre="llama-bpe", merges=[]).encode("foxes", add_bos=False) == [256]
    assert len(gguf(tokens, model="gpt2", pre="gpt-2", merges=[]).encode("foxes")) == 5


def test_bos_of_a_gguf_follows_its_flag_and_otherwise_its_kind() -> None:
    options: dict[str, Any] = {"model": "gpt2", "merges": [], "bos_token_id": 5}
    assert gguf(BYTES, pre="llama-bpe", **options).encode("a")[0] == 5
    assert gguf(BYTES, pre="gpt-2", **options).encode("a")[0] != 5
    assert gguf(BYTES, pre="gpt-2", add_bos_token=True, **options).encode("a")[0] == 5
    assert gguf(BYTES, pre="llama-bpe", add_bos_token=False, **options).encode("a")[0] != 5


SPM_PIECES = ["▁t", "he", "▁the", "▁q", "ui", "qui", "ck", "uick", "▁quick", "in", "ing", "er", "in", "▁a", "aa", "aaa"]
SPM_TOKENS = list(
    dict.fromkeys(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SPM_PIECES, *"▁thequickingra"])
)
SPM = {
    "model": "llama",
    "scores": [0.0] * 259 + [-float(i) for i in range(len(SPM_TOKENS) - 259)],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(SPM_TOKENS) - 259)],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def sentencepiece_by_definition(text: str) -> list[int]:
    """Merges the neighbours whose union has the best score, leftmost first; bytes stand for unknown characters."""
    ids = {token: i for i, token in enumerate(SPM_TOKENS)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-SPM["scores"][ids[a + b]], at)  # type: ignore[index]
            for at, (a, b) in enumerate(pairwise(symbols))
            if a + b in ids
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        i for s in symbols for i in ([ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode("utf-8")])
    ]


@pytest.mark.parametrize("text", ["the quick", "thinking the", "aaaa aaaaa", "quuick  then", "né🙂 the", "", " "])
def test_sentencepiece_pieces_merge_by_score(text: str) -> None:
    tokenizer = gguf(SPM_TOKENS, **SPM)
    ids = tokenizer.encode(text)
    assert ids == [1, *(sentencepiece_by_definition(text) if text else [])]
    assert tokenizer.decode(ids) == text


def test_streaming_sentencepiece_keeps_spaces_between_words_and_after_the_prompt() -> None:
    tokenizer = gguf(SPM_TOKENS, **SPM)
    ids = tokenizer.encode("the quick né the")
    prompt, rest = ids[:3], ids[3:]
    fresh, after = tokenizer.stream(), tokenizer.stream(prompt)
    assert "".join(map(fresh.push, ids)) == "the quick né the"
    assert tokenizer.decode(prompt) + "".join(map(after.push, rest)) == "the quick né the"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"model": "t5"}, "t5"),
        ({"model": "gpt2", "pre": "tekken"}, "tekken"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["no such"]}, "vocabulary and merges"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, "vocabulary and merges"),
        ({"model": "llama", "scores": [1.0]}, "scores"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_rebuilt_is_one_clear_line(own: dict[str, Any], said: str) -> None:
    with pytest.raises(ShipwayError, match=said) as caught:
        gguf(BYTES, **own)
    assert "\n" not in str(caught.value)
    assert re.match(r"model\.gguf", str(caught.value))


def test_a_gguf_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ShipwayError, match="no tokenizer"):
        gguf([], model="gpt2")
