"""Whatever is wrong with a checkpoint is one clear line that names the file, never a traceback."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from command_line import Run
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def header_of(path: Path) -> bytes:
    """The header of a safetensors file, without the spaces that align what follows."""
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip()


def write_header(path: Path, header: bytes) -> None:
    """Replaces the header of a safetensors file and leaves the data alone."""
    data = path.read_bytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :])


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads(header_of(path))
    change(header)
    write_header(path, json.dumps(header).encode())


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def patch_after(path: Path, mark: bytes, skip: int, data: bytes) -> None:
    patch(path, path.read_bytes().index(mark) + len(mark) + skip, data)


def assert_one_line(problem: ShipwayError, path: Path, run: Run) -> None:
    """The message is one line that names the path, and the command line says it and nothing more, with exit code 2."""
    assert "\n" not in str(problem)
    assert str(path) in str(problem)
    code, _, said = run("inspect", path)
    assert code == 2
    assert said.splitlines()[-1] == " ".join(f"shipway: {problem}".split())
    assert "Traceback" not in said


SHARD = "model-00002-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HTML = b"<!DOCTYPE html><html><head><title>404</title></head><body>Not found</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 269060552\n"

SAFETENSORS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "config is not JSON": ("llama2", lambda d: truncate(d / "config.json", 40), r"config\.json is not valid JSON"),
    "config is a list": ("llama2", lambda d: (d / "config.json").write_text("[]"), r"config\.json holds a JSON list"),
    "config is an HTML page": (
        "llama2",
        lambda d: (d / "config.json").write_bytes(HTML),
        r"config\.json is not valid JSON: .* \(it looks like an HTML or XML page\)",
    ),
    "config nests too deeply": (
        "llama2",
        lambda d: (d / "config.json").write_text('{"a": ' + "[" * 99999),
        r"config\.json is not valid JSON: it nests too deeply",
    ),
    "config is empty": ("llama2", lambda d: truncate(d / "config.json", 0), r"config\.json is not valid JSON"),
    "config is a directory": (
        "llama2",
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        r"neither config\.json nor a GGUF file",
    ),
    "config is binary": ("llama2", lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json is not"),
    "no weights": ("llama2", lambda d: (d / WEIGHTS).unlink(), "only safetensors and GGUF"),
    "empty weights": ("llama2", lambda d: truncate(d / WEIGHTS, 0), "is empty"),
    "a few bytes": ("llama2", lambda d: truncate(d / WEIGHTS, 5), "not a safetensors file"),
    "truncated header": ("llama2", lambda d: truncate(d / WEIGHTS, 100), "truncated"),
    "truncated data": ("llama2", lambda d: truncate(d / WEIGHTS, 9000), r"truncated: tensor .* ends at byte"),
    "a zip archive": ("llama2", lambda d: (d / WEIGHTS).write_bytes(b"PK\x03\x04" * 99), "not a safetensors file"),
    "a GGUF file": ("llama2", lambda d: (d / WEIGHTS).write_bytes(b"GGUF\3\0\0\0" * 99), "not a safetensors file"),
    "an HTML page": ("llama2", lambda d: (d / WEIGHTS).write_bytes(HTML), "looks like an HTML or XML page"),
    "a Git LFS pointer": ("llama2", lambda d: (d / WEIGHTS).write_bytes(POINTER), "`git lfs pull` fetches"),
    "a directory": ("llama2", lambda d: ((d / WEIGHTS).unlink(), (d / WEIGHTS).mkdir()), "only safetensors and GGUF"),
    "header of 2^63 bytes": (
        "llama2",
        lambda d: patch(d / WEIGHTS, 0, struct.pack("<Q", 1 << 63)),
        "is damaged: it says that its header takes \\d+ bytes",
    ),
    "header nests too deeply": ("llama2", lambda d: write_header(d / WEIGHTS, b"[" * 99999), "not a JSON object"),
    "header is a list": ("llama2", lambda d: write_header(d / WEIGHTS, b"[]"), "not a JSON object"),
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
    "entry is a text": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h.update({NORM: "F32"})),
        f"{NORM} is incomplete",
    ),
    "dtype is a list": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(dtype=["F32"])),
        r"has dtype \['F32'\]",
    ),
    "shape is fractional": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(shape=[64.5])),
        r"damaged: tensor model\.norm\.weight of shape \[64\.5\]",
    ),
    "shape is infinite": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(shape=[float("inf")])),
        r"damaged: tensor model\.norm\.weight of shape \[inf\]",
    ),
    "shape no machine addresses": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(shape=[2**63, 0], data_offsets=[0, 0])),
        r"damaged: tensor model\.norm\.weight",
    ),
    "offsets outside the file": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 256])),
        rf"truncated: tensor {NORM} ends at byte 10000\d+ of \d+",
    ),
    "offsets before the data": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(data_offsets=[-256, 0])),
        f"damaged: tensor {NORM}",
    ),
    "tensors overlap": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(data_offsets=[4, 260])),
        "begins within another",
    ),
    "tensor listed twice": (
        "llama2",
        lambda d: write_header(d / WEIGHTS, header_of(d / WEIGHTS)[:-1] + b', "model.norm.weight": {}}'),
        f"damaged: its header lists {NORM} twice",
    ),
    "name of many lines": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h.update({"a\n\x1b[31m" * 10**5: {"dtype": "F64"}})),
        r"header entry of tensor a  \[31ma .* \.\.\.$",
    ),
    "dtype F64": ("llama2", lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(dtype="F64")), "F64"),
    "offsets do not fit": (
        "llama2",
        lambda d: edit_header(d / WEIGHTS, lambda h: h[NORM].update(data_offsets=[0, 8])),
        f"{NORM} of shape .* has the bytes \\[0, 8\\]",
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
            d / WEIGHTS, lambda h: h.update(dict.fromkeys(("model.layers.0.self_attn.o_proj.bias", "x"), EMPTY))
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
    "tensor in two shards": (
        "mistral",
        lambda d: (
            (d / "z.safetensors").write_bytes((d / SHARD).read_bytes()),
            edit_json(d / INDEX, lambda i: i["weight_map"].update({"model.more": "z.safetensors"})),
        ),
        r"z\.safetensors holds tensor model\..*, which another shard holds too",
    ),
    "index names a directory": (
        "mistral",
        lambda d: (
            (d / "z.safetensors").mkdir(),
            edit_json(d / INDEX, lambda i: i["weight_map"].update({NORM: "z.safetensors"})),
        ),
        r"names z\.safetensors, which is not in",
    ),
    "index of numbers": (
        "mistral",
        lambda d: edit_json(d / INDEX, lambda i: i.update(weight_map={NORM: 2})),
        "no weight_map of tensor names to files",
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
def test_a_faulty_directory_is_one_clear_line(fault: str, tmp_path: Path, run: Run) -> None:
    name, damage, said = SAFETENSORS[fault]
    directory = tiny_checkpoints.make(name, tmp_path / name)
    open_checkpoint(directory)
    damage(directory)
    with pytest.raises(ShipwayError, match=said) as caught:
        open_checkpoint(directory)
    assert_one_line(caught.value, directory, run)


TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "corrupt": (lambda d: truncate(d / "tokenizer.json", 99), r"tokenizer\.json: the tokenizer fails: EOF"),
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


HUGE = struct.pack("<Q", 1 << 60)

GGUF: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (lambda p: p.write_bytes(b"PK\x03\x04" * 99), "not a GGUF file: it looks like a zip archive"),
    "an HTML page": (lambda p: p.write_bytes(HTML), "not a GGUF file: it looks like an HTML or XML page"),
    "a Git LFS pointer": (lambda p: p.write_bytes(POINTER), "not a GGUF file: it looks like a Git LFS pointer"),
    "plain text": (lambda p: p.write_text("see the README"), "not a GGUF file: it starts with b'see '"),
    "a safetensors file": (
        lambda p: p.write_bytes((p.parent / "hf" / WEIGHTS).read_bytes()),
        "not a GGUF file: it looks like a safetensors file",
    ),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), "holds no checkpoint"),
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
    "arrays in arrays": (
        lambda p: patch_after(p, b"tokenizer.ggml.tokens", 4, struct.pack("<IQ", 9, 1) * 9999),
        "nests too deeply",
    ),
    "name not UTF-8": (lambda p: patch_after(p, b"token_embd.weigh", 0, b"\xff"), "utf-8"),
    "unknown tensor type": (lambda p: patch_after(p, b"output_norm.weight", 12, b"\x63"), "unknown type 99"),
    "tensor renamed": (lambda p: patch_after(p, b"output_nor", 0, b"x"), r"lacks tensor model\.norm\.weight"),
    "tensor misshapen": (lambda p: patch_after(p, b"output_norm.weight", 4, b"\x20"), "has shape"),
    "a billion layers": (lambda p: patch_after(p, b"llama.block_count", 4, b"\1\1\1\x7f"), "from 1 to 4096"),
    "more layers than tensors": (lambda p: patch_after(p, b"llama.block_count", 4, b"\x09"), "lacks tensor"),
}


@pytest.mark.parametrize("fault", GGUF)
def test_a_faulty_gguf_is_one_clear_line(fault: str, tmp_path: Path, run: Run) -> None:
    damage, said = GGUF[fault]
    path = gguf_file(tmp_path)
    open_checkpoint(path)
    damage(path)
    with pytest.raises(ShipwayError, match=said) as caught:
        open_checkpoint(path)
    assert_one_line(caught.value, path, run)


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
