"""A checkpoint written as a Hugging Face directory is the same model."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.config import ModelConfig
from shipway.model.export import hf_config, write_directory
from shipway.model.rope import RopeConfig


@pytest.mark.parametrize("name", sorted(tiny_checkpoints.SPECS))
def test_config_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    config = open_checkpoint(tiny_checkpoints.make(name, tmp_path)).config
    assert ModelConfig.from_hf(hf_config(config)) == config


def test_gguf_becomes_a_directory_with_the_same_weights_and_tokens(tmp_path: Path) -> None:
    source = tiny_checkpoints.make("smollm2", tmp_path / "source")
    gguf = open_checkpoint(tiny_checkpoints.write_gguf(source, tmp_path / "tiny.gguf"))
    out = tmp_path / "out"
    out.mkdir()
    write_directory(gguf, out, "bf16")
    written = open_checkpoint(out)
    assert written.config == gguf.config
    for name, weight in written.weights.items():
        kept = "bf16" if len(weight.shape) == 2 else "f32"
        assert weight.format == kept
        np.testing.assert_array_equal(weight.blocks, gguf.weights[name].dequantise(kept))
    text = "def f(x):\n\treturn x  # café 😀"
    assert written.tokenizer.encode(text) == gguf.tokenizer.encode(text)
    assert written.tokenizer.eos_ids == gguf.tokenizer.eos_ids
    assert written.tokenizer.bos_id == gguf.tokenizer.bos_id
    assert written.tokenizer.chat_template == gguf.tokenizer.chat_template


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_file_has_the_mode_the_umask_gives(umask: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints.make("llama3", tmp_path / "source"))
    (tmp_path / "out").mkdir()
    before = os.umask(umask)
    try:
        write_directory(checkpoint, tmp_path / "out", "f32")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~umask}


def test_llama_3_divisors_are_said_as_the_scaling_they_come_from(tmp_path: Path) -> None:
    config = open_checkpoint(tiny_checkpoints.make("llama3", tmp_path)).config
    scaled = RopeConfig(5e5, 16, "llama3", 32.0, 8192, 1.0, 4.0)
    divisors = tuple((RopeConfig(5e5, 16).inv_freq() / scaled.inv_freq()).tolist())
    config = dataclasses.replace(config, rope=RopeConfig(5e5, 16, "llama3", divisors=divisors))
    written = ModelConfig.from_hf(hf_config(config)).rope
    np.testing.assert_allclose(written.inv_freq(), config.rope.inv_freq(), rtol=1e-5)


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    config = open_checkpoint(tiny_checkpoints.make("llama3", tmp_path)).config
    rope = dataclasses.replace(config.rope, kind="llama3", divisors=(3.0,) * (config.rope.rotary_dim // 2))
    with pytest.raises(ShipwayError, match="rope_freqs"):
        hf_config(dataclasses.replace(config, rope=rope))


def test_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoints.make("llama3", tmp_path))
    with pytest.raises(ShipwayError, match="cannot write the model"):
        write_directory(checkpoint, tmp_path / "absent", "f32")
