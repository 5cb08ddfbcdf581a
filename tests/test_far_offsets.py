"""Offsets past 2^31 elements: indices are 64 bits wide. Memory is virtual: untouched pages of zeros cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shipway.ops.catalogue import OPS

FAR = 2**31
HEAD_DIM = 64


def op(name: str, implementation: str) -> Callable[..., Any]:
    return OPS[name].implementations[implementation].make("bf16", HEAD_DIM)


def zeros(*shape: int) -> torch.Tensor:
    """bf16 zeros that are not yet in memory."""
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("implementation", ["torch", "mojo"])
def test_embedding_row_past_2_31_elements(implementation: str) -> None:
    table = zeros(FAR // 4096 + 2, 4096)
    table[-1] = 3
    ids = torch.tensor([len(table) - 1, 0], dtype=torch.int32)
    out = op("embedding", implementation)(ids, table)
    assert out[0].eq(3).all()
    assert out[1].eq(0).all()


@pytest.mark.parametrize("implementation", ["torch", "mojo"])
@pytest.mark.parametrize("place", ["layer", "sequence"])
def test_append_and_attention_past_2_31_elements_of_the_cache(implementation: str, place: str) -> None:
    # Two layers or two slots, of which the second begins at element 2^31.
    capacity = FAR // (2 * HEAD_DIM)
    cache = zeros(*((1, 2) if place == "layer" else (2, 1)), 2, capacity, 1, HEAD_DIM)
    assert cache.select(1 if place == "layer" else 0, 1).storage_offset() == FAR
    layer = 1 if place == "layer" else 0
    batch = cache.shape[0]
    offsets = torch.tensor([0, 1, 2][: batch + 1], dtype=torch.int32)
    start = torch.zeros(batch, dtype=torch.int32)
    x = torch.ones(batch, 8, dtype=torch.bfloat16)
    w = torch.full((HEAD_DIM, 8), 0.5, dtype=torch.bfloat16)
    table = torch.cat([torch.ones(4, HEAD_DIM // 2), torch.zeros(4, HEAD_DIM // 2)], 1)
    none = [None] * 5
    q = op("qkv_rope_append", implementation)(x, w, w, 2 * w, *none, 1e-6, table, cache, offsets, start, layer)
    assert cache[-1, layer, 0, 0].eq(4).all()
    assert cache[-1, layer, 1, 0].eq(8).all()
    assert cache[0, 0, :, 0].eq(0).all() == (place == "layer")
    out = op("attention_decode", implementation)(q, cache, offsets, start, layer, HEAD_DIM**-0.5, 0)
    assert out.eq(8).all()
