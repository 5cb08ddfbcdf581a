"""Stored formats become the dtypes routes compute in, exactly, and without a copy where none is needed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model import weights
from shipway.model.arena import place
from shipway.model.checkpoint import open_checkpoint
from shipway.model.weights import Weight, bf16_bits

EDGES = np.array(
    [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -1.00390625, 1e-45, 3.4e38, 3.3961776e38, np.inf, -np.inf, 65504.0],
    np.float32,
)


def torch_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def test_bf16_rounds_to_nearest_even_like_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate([EDGES, bits.view(np.float32)])
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(bf16_bits(values), torch_bf16(values))


def test_bf16_keeps_every_nan_a_nan() -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert torch.from_numpy(bf16_bits(nans)).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_stored_dtype_is_handed_out_without_a_copy(dtype: str) -> None:
    blocks = np.zeros((3, 5), weights.PLAIN[dtype])
    assert Weight("w", (3, 5), dtype, blocks).dequantise(dtype) is blocks


@pytest.mark.parametrize("stored", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("asked", ["f32", "bf16", "f16"])
def test_plain_formats_convert_like_torch(stored: str, asked: str) -> None:
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    source = torch.randn(7, 13, generator=torch.Generator().manual_seed(1)).to(dtypes[stored])
    bits = source.view(torch.uint16).numpy() if stored == "bf16" else source.numpy()
    got = torch.from_numpy(Weight("w", (7, 13), stored, bits).dequantise(asked))
    assert torch.equal(got.view(dtypes[asked]), source.to(dtypes[asked]))


def test_a_value_beyond_f16_is_refused_not_turned_into_infinity() -> None:
    weight = Weight("layer.w", (1, 2), "f32", np.array([[1.0, 70000.0]], np.float32))
    with pytest.raises(ShipwayError, match=r"layer\.w"):
        weight.dequantise("f16")


# I-quants and the like have no encoder in the gguf package; random bytes are blocks too.
GGUF_TYPES = sorted(t.name for t in gguf.quants._type_traits if t.name != "BF16")


@pytest.mark.parametrize("name", GGUF_TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
def test_every_gguf_type_decodes_as_the_gguf_package_decodes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_ = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(3).integers(0, 256, (37, 2 * size), dtype=np.uint8)
    monkeypatch.setattr(weights, "_CHUNK", 5 * 2 * block)  # 37 rows in chunks of 5: the last is short
    got = Weight("w", (37, 2 * block), name.lower(), blocks).dequantise("f32")
    np.testing.assert_array_equal(got, gguf.dequantize(blocks, type_).reshape(37, 2 * block))


@pytest.mark.parametrize("name", ["mistral", "smollm2"])
def test_a_directory_is_mapped_not_copied(name: str, tmp_path: Path) -> None:
    """Sharded float32 and single-file bfloat16: what is handed out is what transformers loads, backed by the file."""
    path = tiny_checkpoints.make(name, tmp_path)
    checkpoint, state = open_checkpoint(path), tiny_checkpoints.reference(path).state_dict()
    for key, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(weight.dequantise("f32"), state[key].numpy())
        assert not weight.blocks.flags.owndata
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (name == "mistral")


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3"])
def test_a_gguf_holds_the_tensors_of_the_directory_it_was_made_from(name: str, tmp_path: Path) -> None:
    """q and k rows come back in Hugging Face order for llama and are left alone for qwen3."""
    directory = open_checkpoint(tiny_checkpoints.make(name, tmp_path / name))
    file = open_checkpoint(tiny_checkpoints.write_gguf(tmp_path / name, tmp_path / "model.gguf"))
    assert file.weights.keys() == directory.weights.keys()
    for key, weight in file.weights.items():
        np.testing.assert_array_equal(weight.dequantise("f32"), directory.weights[key].dequantise("f32"))
    np.testing.assert_allclose(file.config.rope.inv_freq(), directory.config.rope.inv_freq(), rtol=3e-7)
    text = "the quick brown fox"
    assert file.tokenizer.encode(text) == directory.tokenizer.encode(text)
    messages = [{"role": "user", "content": " hi "}]
    assert file.tokenizer.chat(messages) == directory.tokenizer.chat(messages)


def test_rows_of_quantised_blocks_are_put_in_order_without_decoding(tmp_path: Path) -> None:
    directory = open_checkpoint(tiny_checkpoints.make("llama2", tmp_path / "hf"))
    path = tiny_checkpoints.write_gguf(tmp_path / "hf", tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    name = "model.layers.1.self_attn.k_proj.weight"
    weight, plain = open_checkpoint(path).weights[name], directory.weights[name].dequantise("f32")
    assert weight.format == "q8_0"
    np.testing.assert_array_equal(weight.blocks, gguf.quantize(plain, gguf.GGMLQuantizationType.Q8_0))


def test_placed_weights_are_the_decoded_ones_on_cache_lines(tmp_path: Path) -> None:
    stored = open_checkpoint(tiny_checkpoints.make("qwen2", tmp_path)).weights
    placed = place(stored, matrices="bf16", vectors="f32")
    assert list(placed) == list(stored)
    for name, array in placed.items():
        kept = "bf16" if array.ndim == 2 else "f32"
        np.testing.assert_array_equal(array, stored[name].dequantise(kept))
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
