"""What `shipway serve` refuses before it starts MAX's server, and what it hands to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

import tiny_checkpoints
from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.model.checkpoint import open_checkpoint
from shipway.serve import server
from shipway.serve.hf_directory import hf_directory
from shipway.serve.server import Server, ServeSettings, death_reason


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen3"])
def test_a_gguf_file_becomes_the_same_model_as_a_directory(name: str, tmp_path: Path) -> None:
    original = tiny_checkpoints.make(name, tmp_path / name)
    gguf = open_checkpoint(tiny_checkpoints.write_gguf(original, tmp_path / "model.gguf"))
    directory = hf_directory(gguf)
    again = open_checkpoint(directory)
    assert again.config == gguf.config
    for key, weight in gguf.weights.items():
        np.testing.assert_array_equal(again.weights[key].dequantise("f32"), weight.dequantise("f32"))
    text = "the quick brown fox"
    assert again.tokenizer.encode(text) == gguf.tokenizer.encode(text)
    assert again.tokenizer.eos_ids == gguf.tokenizer.eos_ids
    # MAX reads both with transformers.
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs.encode(text) == gguf.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == gguf.tokenizer.chat(
        messages
    )
    assert AutoConfig.from_pretrained(directory).architectures[0].endswith("ForCausalLM")


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    original = tiny_checkpoints.make("llama2", tmp_path / "llama2")
    path = tiny_checkpoints.write_gguf(original, tmp_path / "model.gguf")
    first = hf_directory(open_checkpoint(path))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert hf_directory(open_checkpoint(path)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written


def test_a_hugging_face_directory_is_served_as_it_is(tmp_path: Path) -> None:
    path = tiny_checkpoints.make("smollm2", tmp_path / "smollm2")
    assert hf_directory(open_checkpoint(path)) == path


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    original = tiny_checkpoints.make("llama3", tmp_path / "llama3")
    gguf = open_checkpoint(tiny_checkpoints.write_gguf(original, tmp_path / "model.gguf"))
    with pytest.raises(ShipwayError, match="divisors"):
        hf_directory(gguf)


def refused(settings: ServeSettings) -> str:
    with pytest.raises(ShipwayError) as caught:
        Server(settings, lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_maxs_server_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "version", lambda name: "25.1.0")
    with pytest.raises(CannotRunError) as caught:
        Server(ServeSettings("anything"), lambda line: None)
    remedy = this_python("-m pip install modular==26.7.0")
    assert str(caught.value).endswith(f"modular 25.1.0 is installed: {remedy}")


def test_a_taken_port_is_refused(tmp_path: Path, port: int) -> None:
    path = tiny_checkpoints.make("llama2", tmp_path / "llama2")
    assert f"cannot listen on 127.0.0.1:{port}" in refused(ServeSettings(str(path), port=port))


def test_more_context_than_the_model_is_made_for_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoints.make("llama2", tmp_path / "llama2")
    assert "--max-length 257 exceeds the 256 tokens" in refused(ServeSettings(str(path), max_length=257))


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoints.make("llama2", tmp_path / "llama2")
    (path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(ServeSettings(str(path)))


def test_the_reason_of_a_death_is_what_the_model_raised() -> None:
    log = json.dumps({"ready": True}) + (
        "\nTraceback (most recent call last):\n  File ...\nIndexError: a request that was answered 500\n"
        "Traceback (most recent call last):\n  File ...\nValueError: embedding: id 900 of a vocabulary of 300\n"
        "ERROR: Worker crashed (...), shutting down\nRuntimeError: athrow(): asynchronous generator is running\n"
    )
    assert death_reason(log) == "ValueError: embedding: id 900 of a vocabulary of 300"
    assert death_reason("") == "no output"
