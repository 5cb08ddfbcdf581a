"""RoPE comes from the configuration and is that of transformers, at far positions too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding, apply_rotary_pos_emb

from shipway.model.config import ModelConfig
from shipway.model.rope import RopeConfig, rope_table
from shipway.ops.rope import rotate

POSITIONS = (0, 1, 2, 31, 4095, 8191, 8192, 32767)
ULP = 2.0**-23  # of 1 in float32

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA32 = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}

SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama 3.1": LLAMA31,
    "llama 3.2": LLAMA32,
    "yarn": YARN,
    "yarn of qwen2": YARN | {"original_max_position_embeddings": 32768},
    "yarn, bounds not rounded": YARN | {"truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 1.5},
    "yarn, betas": YARN | {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    "yarn, mscales": YARN | {"factor": 8.0, "original_max_position_embeddings": 512, "mscale": 1, "mscale_all_dim": 2},
}


def both(scaling: dict[str, Any], theta: float, head_dim: int) -> tuple[RopeConfig, LlamaRotaryEmbedding]:
    raw = BASE | {"head_dim": head_dim, "rope_parameters": scaling | {"rope_theta": theta}}
    return ModelConfig.from_hf(raw).rope, LlamaRotaryEmbedding(LlamaConfig(**raw))


def their_table(embedding: torch.nn.Module) -> np.ndarray:
    cos, sin = embedding(torch.zeros(1), torch.tensor([POSITIONS]))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).numpy()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (5e5, 64), (5e5, 128), (1e6, 80), (1234567.0, 96)])
def test_frequencies_are_those_of_transformers(scaling: str, theta: float, head_dim: int) -> None:
    """Ours are taken in float64 and rounded once. Transformers rounds its power, its reciprocal and its scaling.

    Between two bands it rounds the share that is kept as well, which what the share decides amplifies.
    """
    settings = SCALINGS[scaling]
    rope, theirs = both(settings, theta, head_dim)
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    share = np.zeros(len(plain))
    if settings["rope_type"] == "llama3":
        share = settings["original_max_position_embeddings"] * plain / (2 * math.pi) / 3 * plain
    if settings["rope_type"] == "yarn":
        share = plain
    roundings = 4 * plain / rope.factor + 4 * rope.inv_freq() + 4 * share * (1 - 1 / rope.factor)
    roundings[rope.inv_freq() == plain.astype(np.float32)] = 0  # kept whole: the bound of plain frequencies
    bound = np.maximum(roundings * ULP / 2, rope.inv_freq() * ULP)
    assert (np.abs(rope.inv_freq() - theirs.inv_freq.numpy().astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_table_of_the_same_frequencies_is_that_of_transformers(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Angles are rounded alike, so that at any position only the last bit of a cosine may differ."""
    rope, theirs = both(SCALINGS[scaling], 5e5, 64)
    monkeypatch.setattr(RopeConfig, "inv_freq", lambda self: theirs.inv_freq.numpy())
    table = rope_table(rope, POSITIONS[-1] + 1)[list(POSITIONS)]
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, their_table(theirs), rtol=0, atol=ULP * rope.attention_factor)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_table_is_that_of_transformers_but_for_the_last_bits_of_the_frequencies(scaling: str) -> None:
    rope, theirs = both(SCALINGS[scaling], 5e5, 64)
    frequencies = np.stack([rope.inv_freq(), theirs.inv_freq.numpy()]).astype(np.float64)
    # An angle is off by the position times the frequency's difference, and rounded to float32 on both sides.
    at = np.array(POSITIONS)[:, None]
    off = at * np.abs(frequencies[0] - frequencies[1]) + at * frequencies.max(0) * ULP
    bound = rope.attention_factor * (np.concatenate([off, off], axis=1) + ULP)
    table = rope_table(rope, POSITIONS[-1] + 1)[list(POSITIONS)]
    assert (np.abs(table.astype(np.float64) - their_table(theirs)) <= bound).all()


def test_theta_and_factor_come_from_the_configuration() -> None:
    tables = [
        rope_table(both(scaling, theta, 64)[0], 64)
        for scaling, theta in (({}, 1e4), ({}, 5e5), (LLAMA31, 5e5), (LLAMA32, 5e5))
    ]
    for i, one in enumerate(tables):
        for other in tables[i + 1 :]:
            assert np.abs(one - other).max() > 1e-3


def test_rope_scaling_comes_before_rope_parameters_as_in_transformers() -> None:
    raw = BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA32, "rope_parameters": {"rope_type": "default"}}
    theirs = LlamaConfig(**raw)
    rope = ModelConfig.from_hf(raw).rope
    assert (rope.kind, rope.factor, rope.theta) == ("llama3", 32.0, 5e5)
    assert theirs.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_partial_rotary_turns_the_leading_dimensions_as_transformers_does(factor: float) -> None:
    """As in StableLM, whose class reads the factor; transformers' classes of our architectures leave it unread."""
    raw = BASE | {"rope_theta": 5e5, "partial_rotary_factor": factor, "head_dim": 64}
    rope = ModelConfig.from_hf(raw).rope
    theirs = StableLmRotaryEmbedding(
        StableLmConfig(hidden_size=256, num_attention_heads=4, rope_theta=5e5, partial_rotary_factor=factor)
    )
    assert rope.rotary_dim == 2 * len(theirs.inv_freq) == 64 * factor
    at = torch.tensor([[0, 1, 5, 31]])
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    turned, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    expected, _ = apply_rotary_pos_emb(turned, turned, *(y[0] for y in theirs(x, at)), unsqueeze_dim=1)
    found = rotate(x.numpy(), rope_table(rope, 32), at[0].numpy())
    np.testing.assert_allclose(found, torch.cat((expected, rest), -1).numpy(), rtol=0, atol=64 * ULP)


def test_position_zero_is_the_identity() -> None:
    np.testing.assert_array_equal(rope_table(RopeConfig(10000.0, 8), 1), [[1, 1, 1, 1, 0, 0, 0, 0]])
