"""Attention over a prompt on simulated GPUs in many orders of execution, by many grids."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from shipway.simt.device import Device

SLOTS, LAYERS, LAYER, KV_HEADS, HEADS, HEAD_DIM, CAPACITY = 2, 2, 1, 2, 4, 64, 256
LENGTHS, STARTS = (70, 131), (90, 0)
KERNELS = (("sm_90a", "attention_prefill"), ("sm_90a", "attention_prefill_wgmma"), ("gfx942", "attention_prefill"))


@cache
def device(arch: str) -> Device:
    return Device(arch)


def inputs() -> tuple[Tensor, Tensor]:
    """q and a contiguous cache, NaN wherever no key is."""
    drawn = torch.Generator().manual_seed(0)
    cached = torch.full((SLOTS, LAYERS, 2, CAPACITY, KV_HEADS, HEAD_DIM), float("nan")).bfloat16()
    for b, keys in enumerate(map(sum, zip(LENGTHS, STARTS, strict=True))):
        cached[b, LAYER, :, :keys] = torch.randn(2, keys, KV_HEADS, HEAD_DIM, generator=drawn).bfloat16()
    return torch.randn(sum(LENGTHS), HEADS, HEAD_DIM, generator=drawn).bfloat16(), cached


def attended(arch: str, kernel: str, q: Tensor, cached: Tensor, seed: int, grid: int = 3) -> Tensor:
    out = torch.full_like(q, float("nan"))
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    start = torch.tensor(STARTS, dtype=torch.int32)
    no_pages = torch.zeros(1, dtype=torch.int32)
    sizes = (SLOTS, HEADS, KV_HEADS, LAYERS, LAYER, CAPACITY)
    device(arch).launch(
        kernel,
        ("bf16", str(HEAD_DIM), "0"),
        grid,
        [out, q, cached, no_pages, offsets, start, *sizes, 0, 0, 0.1, 0, 1],
        seed=seed,
    )
    return out


@pytest.mark.parametrize(("arch", "kernel"), KERNELS)
def test_neither_order_nor_grid_matters(arch: str, kernel: str) -> None:
    q, cached = inputs()
    expected = attended(arch, kernel, q, cached, seed=0)
    assert expected.isfinite().all()
    for seed in range(2, 8):
        assert torch.equal(attended(arch, kernel, q, cached, seed=seed, grid=seed), expected)
