"""Whatever is wrong with a checkpoint is one clear line that names the file, never a traceback."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a safetensors header and leaves the data alone."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"

SAFETENSORS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "config is not JSON": ("llama2", lambda d: truncate(d / "config.json", 40), r"config\.json is not valid JSON"),
    "config is a list": ("llama2", lambda d: (d / "config.json").write_text("[]"), r"config\.json holds a JSON list"),
    "config is binary": ("llama2", lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json is not"),
    "no weights": ("llama2", lambda d: (d / WEIGHTS).unlink(), "only safetensors and GGUF"),
    "empty weights": ("llama2", lambda d: truncate(d / WEIGHTS, 0), "is empty"),
    "a few bytes": ("llama2", lambda d: truncate(d / WEIGHTS, 5), "not a safetensors file"),
    "truncated header": ("llama2", lambda d: truncate(d / WEIGHTS, 100), "truncated"),
    "truncated data": ("llama2", lambda d: truncate(d / WEIGHTS, 9000), r"truncated: tensor .* ends at byte"),
    "a zip archive": ("llama2", lambda d: (d / WEIGHTS).write_bytes(b"PK\x03\x04" * 99), "not a safetensors file"),
    "a GGUF file": ("llama2", lambda d: (d / WEIGHTS).write_bytes(b"GGUF\3\0\0\0" * 99), "not a safetensors file"),
    "header is no JSON": (
        "llama2",
        lambda d: (d / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"notjson!"),
        "not a JSON object",
    ),
    "entry without dtype": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].pop("dtype")),
        f"{NORM} is incomplete",
    ),
    "dtype F64": ("llama2", lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(dtype="F64")), "F64"),
    "offsets do not fit": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(data_offsets=[0, 8])),
        f"{NORM} of shape .* spans 8 bytes",
    ),
    "tensor missing": ("llama2", lambda d: edit_header(d / WEIGHTS, lambda h: h.pop(Q)), f"lacks tensor {Q}"),
    "tensor misshapen": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[Q].update(shape=[32, 128])),
        rf"{Q} has shape \(32, 128\), its configuration says \(64, 64\)",
    ),
    "tensor not of the model": (
        "llama2",
        lambda d: edit_header(
            d / WEIGHTS, lambda h: h.update({"model.layers.0.self_attn.o_proj.bias": h[NORM], "x": h[NORM]})
        ),
        r"holds tensor model\.layers\.0\.self_attn\.o_proj\.bias and 1 more, which a llama model does not use",
    ),
    "vocab larger than the embedding": (
        "llama2",
        lambda d: edit_json(d / "config.json", lambda c: c.update(vocab_size=400)),
        "embed_tokens",
    ),
    "head missing though untied": (
        "smollm2",
        lambda d: edit_json(d / "config.json", lambda c: c.update(tie_word_embeddings=False)),
        r"lacks tensor lm_head\.weight",
    ),
    "shard missing": ("mistral", lambda d: (d / SHARD).unlink(), f"names {SHARD}, which is not in"),
    "shard truncated": ("mistral", lambda d: truncate(d / SHARD, 3000), f"{SHARD} is truncated"),
    "shard outside": (
        "mistral",
        lambda d: edit_json(d / INDEX, lambda i: i["weight_map"].update({NORM: "../other.safetensors"})),
        r"\.\./other\.safetensors",
    ),
    "index corrupt": ("mistral", lambda d: truncate(d / INDEX, 50), f"{INDEX} is not valid JSON"),
    "index without map": ("mistral", lambda d: (d / INDEX).write_text("{}"), "no weight_map"),
    "index names a tensor its shard lacks": (
        "mistral",
        lambda d: edit_json(d / INDEX, lambda i: i["weight_map"].update({"model.more": SHARD})),
        f"names tensor model.more, which {SHARD} does not hold",
    ),
}


@pytest.mark.parametrize("fault", SAFETENSORS)
def test_a_faulty_directory_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    name, damage, said = SAFETENSORS[fault]
    directory = tiny_checkpoints.make(name, tmp_path / name)
    open_checkpoint(directory)
    damage(directory)
    with pytest.raises(ShipwayError, match=said) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "corrupt": (lambda d: truncate(d / "tokenizer.json", 99), r"tokenizer\.json cannot be read"),
    "settings corrupt": (lambda d: truncate(d / "tokenizer_config.json", 9), r"tokenizer_config\.json is not valid"),
    "template is a number": (
        lambda d: edit_json(d / "tokenizer_config.json", lambda t: t.update(chat_template=3)),
        r"tokenizer_config\.json: chat_template must be a text",
    ),
    "EOS of the generation config is a word": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "two"}'),
        r"generation_config\.json: eos_token_id must be an id or a list of ids, not 'two'",
    ),
    "larger than the vocabulary": (
        lambda d: edit_json(
            d / "tokenizer.json",
            lambda t: (
                t["added_tokens"].append(t["added_tokens"][0] | {"id": 900, "content": "<new>"})
                or t["model"]["vocab"].update({"<new>": 900})
            ),
        ),
        "901 tokens but the embedding only 320 rows",
    ),
}


@pytest.mark.parametrize("fault", TOKENIZERS)
def test_a_faulty_tokenizer_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    damage, said = TOKENIZERS[fault]
    directory = tiny_checkpoints.make("llama2", tmp_path / "llama2")
    damage(directory)
    with pytest.raises(ShipwayError, match=said) as caught:
        _ = open_checkpoint(directory).tokenizer
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


BROKEN = "{% if %}"


def write_template(directory: Path, name: str) -> None:
    """Writes a broken chat template into the file ``name``, and none into those that come before it."""
    edit_json(directory / "tokenizer_config.json", lambda t: t.pop("chat_template"))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    if name.endswith(".jinja"):
        (directory / name).write_text(BROKEN)
    else:
        file = directory / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {"chat_template": BROKEN}))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_broken_chat_template_names_its_file(name: str, tmp_path: Path) -> None:
    directory = tiny_checkpoints.make("llama2", tmp_path)
    write_template(directory, name)
    with pytest.raises(ShipwayError, match=r": the chat template fails: Expected an expression") as caught:
        open_checkpoint(directory).tokenizer.chat([{"role": "user", "content": "hi"}])
    assert str(caught.value).startswith(f"{directory / name}: ")
    assert "\n" not in str(caught.value)


def test_a_broken_chat_template_of_a_gguf_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_checkpoints, "CHAT_TEMPLATE", BROKEN)
    path = gguf_file(tmp_path)
    with pytest.raises(ShipwayError) as caught:
        open_checkpoint(path).tokenizer.chat([{"role": "user", "content": "hi"}])
    assert str(caught.value).startswith(f"{path}: the chat template fails: Expected an expression")


def test_a_vocabulary_padded_beyond_the_tokenizer_is_fine(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints.make("llama2", tmp_path))
    assert checkpoint.tokenizer.vocab_size < checkpoint.config.vocab_size


def gguf_file(tmp_path: Path) -> Path:
    tiny_checkpoints.make("llama2", tmp_path / "hf")
    return tiny_checkpoints.write_gguf(tmp_path / "hf", tmp_path / "model.gguf")


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def patch_after(path: Path, mark: bytes, skip: int, data: bytes) -> None:
    patch(path, path.read_bytes().index(mark) + len(mark) + skip, data)


HUGE = struct.pack("<Q", 1 << 60)

GGUF: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (lambda p: p.write_bytes(b"PK\x03\x04" * 99), r"not a GGUF file: it starts with b'PK"),
    "empty": (lambda p: truncate(p, 0), "is empty"),
    "only the magic": (lambda p: truncate(p, 4), "runs past the end"),
    "header truncated": (lambda p: truncate(p, 300), "runs past the end"),
    "data truncated": (lambda p: truncate(p, p.stat().st_size - 64), r"ends at byte \d+, the file at \d+"),
    "version of the other byte order": (lambda p: patch(p, 4, b"\0\0\0\3"), "version"),
    "huge tensor count": (lambda p: patch(p, 8, HUGE), "damaged"),
    "huge metadata count": (lambda p: patch(p, 16, HUGE), "damaged"),
    "huge string": (lambda p: patch(p, 24, HUGE), "runs past the end"),
    "huge array": (lambda p: patch_after(p, b"tokenizer.ggml.tokens", 8, HUGE), "runs past the end"),
    "huge array of numbers": (lambda p: patch_after(p, b"tokenizer.ggml.token_type", 8, HUGE), "runs past the end"),
    "unknown value type": (lambda p: patch_after(p, b"llama.block_count", 0, b"\x63"), "unknown type 99"),
    "name not UTF-8": (lambda p: patch_after(p, b"token_embd.weigh", 0, b"\xff"), "utf-8"),
    "unknown tensor type": (lambda p: patch_after(p, b"output_norm.weight", 12, b"\x63"), "unknown type 99"),
    "tensor renamed": (lambda p: patch_after(p, b"output_nor", 0, b"x"), r"lacks tensor model\.norm\.weight"),
    "tensor misshapen": (lambda p: patch_after(p, b"output_norm.weight", 4, b"\x20"), "has shape"),
    "a billion layers": (lambda p: patch_after(p, b"llama.block_count", 4, b"\1\1\1\x7f"), "from 1 to 4096"),
    "more layers than tensors": (lambda p: patch_after(p, b"llama.block_count", 4, b"\x09"), "lacks tensor"),
}


@pytest.mark.parametrize("fault", GGUF)
def test_a_faulty_gguf_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    damage, said = GGUF[fault]
    path = gguf_file(tmp_path)
    open_checkpoint(path)
    damage(path)
    with pytest.raises(ShipwayError, match=said) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_paths_without_a_checkpoint_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShipwayError, match=r"neither config\.json nor a GGUF file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ShipwayError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    directory = tiny_checkpoints.make("llama2", tmp_path / "hf")
    for name in (WEIGHTS, "config.json"):
        with pytest.raises(ShipwayError, match=f"{name} is one file of a checkpoint: pass its directory"):
            open_checkpoint(directory / name)


def test_a_directory_with_one_gguf_is_that_file_and_with_two_asks_which(tmp_path: Path) -> None:
    path = gguf_file(tmp_path)
    assert open_checkpoint(tmp_path).path == path
    (tmp_path / "second.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ShipwayError, match="2 GGUF files"):
        open_checkpoint(tmp_path)
