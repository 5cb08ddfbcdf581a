"""Attention over a prompt on simulated GPUs beyond what the catalogue draws: pages, and many orders of execution."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from shipway.simt.device import Device

PAGE = 128
SLOTS, LAYERS, LAYER, KV_HEADS, HEADS = 2, 2, 1, 2, 4
CAPACITY = 2 * PAGE
LENGTHS, STARTS = (70, 131), (90, 0)  # of the first sequence the keys lie on two pages
WINDOW = 0
KERNELS = (("sm_90a", "attention_prefill"), ("sm_90a", "attention_prefill_wgmma"), ("gfx942", "attention_prefill"))


@cache
def device(arch: str) -> Device:
    return Device(arch)


def inputs(head_dim: int) -> tuple[Tensor, Tensor]:
    """q and a contiguous cache, NaN wherever no key is."""
    drawn = torch.Generator().manual_seed(0)
    cached = torch.full((SLOTS, LAYERS, 2, CAPACITY, KV_HEADS, head_dim), float("nan")).bfloat16()
    for b, keys in enumerate(map(sum, zip(LENGTHS, STARTS, strict=True))):
        cached[b, LAYER, :, :keys] = torch.randn(2, keys, KV_HEADS, head_dim, generator=drawn).bfloat16()
    return torch.randn(sum(LENGTHS), HEADS, head_dim, generator=drawn).bfloat16(), cached


def paged(cached: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as pages ``[pages, 2, layers, page_size, kv_heads, head_dim]`` in another order, and their numbers."""
    pages = cached.unflatten(3, (-1, PAGE)).permute(0, 3, 2, 1, 4, 5, 6).flatten(0, 1)
    order = torch.arange(len(pages)).roll(1)
    return pages[order].contiguous(), torch.argsort(order).to(torch.int32)


def attended(
    arch: str, kernel: str, q: Tensor, cached: Tensor, lookup: Tensor | None = None, seed: int = 1, grid: int = 3
) -> Tensor:
    """What a kernel makes of a contiguous cache, or of pages where ``lookup`` is given."""
    out = torch.full_like(q, float("nan"))
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    start = torch.tensor(STARTS, dtype=torch.int32)
    by_page = (PAGE, cached[0].numel()) if lookup is not None else (0, 0)
    pages = torch.zeros(1, dtype=torch.int32) if lookup is None else lookup
    sizes = (SLOTS, HEADS, KV_HEADS, LAYERS, LAYER, CAPACITY)
    device(arch).launch(
        kernel,
        ("bf16", str(q.shape[2]), str(int(lookup is not None))),
        grid,
        [out, q, cached, pages, offsets, start, *sizes, *by_page, 0.1, WINDOW, 1],
        seed=seed,
    )
    return out


@pytest.mark.parametrize(("arch", "kernel"), KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_give_what_a_contiguous_cache_gives(arch: str, kernel: str, head_dim: int) -> None:
    q, cached = inputs(head_dim)
    contiguous = attended(arch, kernel, q, cached)
    assert contiguous.isfinite().all()
    assert torch.equal(attended(arch, kernel, q, *paged(cached)), contiguous)


@pytest.mark.parametrize(("arch", "kernel"), KERNELS)
def test_neither_order_nor_grid_matters(arch: str, kernel: str) -> None:
    q, cached = inputs(64)
    expected = attended(arch, kernel, q, cached, seed=0)
    for seed in range(2, 8):
        assert torch.equal(attended(arch, kernel, q, cached, seed=seed, grid=seed), expected)
