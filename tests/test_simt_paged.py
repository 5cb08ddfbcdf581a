"""Attention and append over pages, on simulated GPUs, give the bits of a contiguous cache.

Pages lie out of order, apart from each other, with NaN between them, beside pages of nobody and past each sequence's
end. A page is a multiple of 128 keys, the splits of decode and the runs of prefill, so a boundary is never inside one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shipway.model.rope import RopeConfig, rope_table
from shipway.simt import attention_ops
from shipway.simt.device import Device

DEVICES = {arch: Device(arch) for arch in ("sm_90a", "gfx942")}
CAPACITY, LAYERS, KV_HEADS, HEADS, HEAD_DIM = 512, 2, 2, 4, 64
LAYER, SCALE = 1, 0.125
BATCH = 3
PREFILL = torch.tensor([0, 70, 75, 76]), torch.tensor([90, 253, 0])  # rows across a boundary, and at a page's start
DECODE = torch.arange(BATCH + 1), torch.tensor([127, 128, 400])  # the last key of a page, the first, several pages
PAGED = {
    "rope_append": (1, (1, 2, 22, 23)),
    "attention_prefill": (2, (2, 3, 12, 13)),
    "attention_prefill_wgmma": (2, (2, 3, 12, 13)),
    "attention_decode": (2, (2, 3, 12, 13)),
}
"""Place of the parameter `paged`, and of the arguments cache, lookup, page_size and page_stride."""


@dataclass
class Pages:
    """A cache ``[slots, layers, 2, capacity, kv_heads, head_dim]`` in pages, as a device on which kernels find it."""

    device: Device
    page_size: int
    lookup: torch.Tensor
    storage: torch.Tensor

    @classmethod
    def of(cls, device: Device, page_size: int, cache: torch.Tensor) -> Pages:
        per_sequence = CAPACITY // page_size
        shuffled = torch.randperm(BATCH * per_sequence + 2, generator=torch.Generator().manual_seed(3))
        lookup = shuffled[: BATCH * per_sequence].view(BATCH, per_sequence)
        page = 2 * LAYERS * page_size * KV_HEADS * HEAD_DIM
        storage = torch.full((len(shuffled), page + 64), torch.nan, dtype=cache.dtype)
        for b in range(BATCH):
            for i, at in enumerate(lookup[b].tolist()):
                part = cache[b, :, :, i * page_size : (i + 1) * page_size]
                storage[at, :page] = part.transpose(0, 1).reshape(-1)
        return cls(device, page_size, lookup.to(torch.uint32), storage)

    @property
    def arch(self) -> str:
        return self.device.arch

    def launch(self, kernel: str, parameters: tuple[str, ...], grid: int, arguments: Sequence[Any]) -> None:
        values, given = list(parameters), list(arguments)
        if kernel in PAGED:
            paged, places = PAGED[kernel]
            values[paged] = "1"
            of_pages = (self.storage, self.lookup, self.page_size, self.storage.shape[1])
            for place, argument in zip(places, of_pages, strict=True):
                given[place] = argument
        self.device.launch(kernel, tuple(values), grid, given)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cache_up_to(ends: torch.Tensor) -> torch.Tensor:
    """A cache with NaN from each sequence's end on."""
    cache = drawn(BATCH, LAYERS, 2, CAPACITY, KV_HEADS, HEAD_DIM)
    for b, end in enumerate(ends.tolist()):
        cache[b, :, :, end:] = torch.nan
    return cache


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


on_each = pytest.mark.parametrize(("arch", "page_size"), [(arch, size) for arch in DEVICES for size in (128, 256)])


@on_each
@pytest.mark.parametrize(
    ("op", "batch", "window"),
    [("attention_prefill", PREFILL, 0), ("attention_decode", DECODE, 0), ("attention_decode", DECODE, 140)],
)
def test_attention_over_pages(
    op: str, batch: tuple[torch.Tensor, torch.Tensor], window: int, arch: str, page_size: int
) -> None:
    offsets, start = (part.int() for part in batch)
    cache = cache_up_to(start + offsets.diff())
    q = drawn(int(offsets[-1]), HEADS, HEAD_DIM, seed=1)
    attend = getattr(attention_ops, op)
    expected = attend(DEVICES[arch], q, cache, offsets, start, LAYER, SCALE, window)
    out = attend(Pages.of(DEVICES[arch], page_size, cache), q, cache, offsets, start, LAYER, SCALE, window)
    assert expected.isfinite().all()
    assert same_bits(out, expected)


@on_each
def test_append_to_pages(arch: str, page_size: int) -> None:
    offsets, start = (part.int() for part in PREFILL)
    cache = cache_up_to(start)
    pages = Pages.of(DEVICES[arch], page_size, cache)
    x = drawn(int(offsets[-1]), 32, seed=1)
    wq, wk, wv = (drawn(heads * HEAD_DIM, 32, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    table = torch.from_numpy(rope_table(RopeConfig(10000.0, HEAD_DIM), CAPACITY))

    def append(device: Any) -> torch.Tensor:
        absent = (None,) * 5
        return attention_ops.qkv_rope_append(device, x, wq, wk, wv, *absent, 1e-5, table, cache, offsets, start, LAYER)

    q_of_pages = append(pages)
    q = append(DEVICES[arch])  # the only one that writes the cache
    assert same_bits(q_of_pages, q)
    assert same_bits(pages.storage, Pages.of(DEVICES[arch], page_size, cache).storage)
    assert cache[1, LAYER, :, 253:258].isfinite().all()
