"""The ops over the KV cache on a simulated GPU: projections with RoPE and append, attention.

One function per op of the catalogue, as in ``shipway.simt.row_ops``; the cache is
``[slots, layers, 2, capacity, kv_heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shipway.simt.device import Device
from shipway.simt.matrix_ops import qkv
from shipway.simt.row_ops import DTYPES, GRID, checked, unwritten
from shipway.targets.kernels import HOPPER

SPLIT = 128
"""Keys of a split in ``attention_decode.mojo``: its scratch is sized by them."""
CONTIGUOUS = "0"  # the kernels' parameter `paged`
NO_PAGES = (0, 0)  # page_size and page_stride
SHORTEST = 1  # attention_prefill takes every sequence that has a new token


def qkv_rope_append(
    device: Device,
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    bias_q: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    norm_q: Tensor | None,
    norm_k: Tensor | None,
    eps: float,
    table: Tensor,
    cache: Tensor,
    offsets: Tensor,
    start: Tensor,
    layer: int,
    *,
    tf32: bool = False,
) -> Tensor:
    """Projects x ``[T, K]``; returns q ``[T, heads, head_dim]`` and appends k and v to the cache in place."""
    biases, norms = (bias_q, bias_k, bias_v), (norm_q, norm_k)
    size = checked("qkv_rope_append", x.dtype, x, wq, wk, wv, *biases, *norms, eps, table, cache, offsets, start, layer)
    projected = qkv(device, x, wq, wk, wv, tf32=tf32)
    return rope_append(device, size, projected, biases, norms, eps, table, cache, offsets, start, layer)


def rope_append(
    device: Device,
    size: Mapping[str, int],
    projected: Tensor,
    biases: Sequence[Tensor | None],
    norms: Sequence[Tensor | None],
    eps: float,
    table: Tensor,
    cache: Tensor,
    offsets: Tensor,
    start: Tensor,
    layer: int,
) -> Tensor:
    """What ``qkv_rope_append`` of these sizes does with its projections ``[T, Nq + 2 Nk]`` float32."""
    head_dim, heads = size["D"], size["Nq"] // size["D"]
    out = unwritten(size["T"], heads, head_dim, dtype=cache.dtype)
    absent, no_pages = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    device.launch(
        "rope_append",
        (DTYPES[cache.dtype], CONTIGUOUS),
        GRID,
        [
            out,
            cache,
            no_pages,
            projected,
            *(absent if optional is None else optional for optional in (*biases, *norms)),
            float(eps),
            table,
            offsets,
            start,
            size["T"],
            size["B"],
            heads,
            size["kv_heads"],
            head_dim,
            size["rotary_dim"],
            size["layers"],
            layer,
            size["capacity"],
            *NO_PAGES,
            int(biases[0] is not None),
            int(norms[0] is not None),
        ],
    )
    return out


def attention_prefill(
    device: Device, q: Tensor, cache: Tensor, offsets: Tensor, start: Tensor, layer: int, scale: float, window: int
) -> Tensor:
    """Causal attention of q ``[T, heads, head_dim]`` over the cache -> the same shape."""
    size = checked("attention_prefill", q.dtype, q, cache, offsets, start, layer, scale, window)
    out = unwritten(*q.shape, dtype=q.dtype)
    by_wgmma = device.arch in HOPPER and q.dtype != torch.float32
    device.launch(
        "attention_prefill_wgmma" if by_wgmma else "attention_prefill",
        (DTYPES[q.dtype], str(size["D"]), CONTIGUOUS),
        GRID,
        [out, q, cache, *_batch(size, offsets, start, layer), float(scale), window, SHORTEST],
    )
    return out


def attention_decode(
    device: Device, q: Tensor, cache: Tensor, offsets: Tensor, start: Tensor, layer: int, scale: float, window: int
) -> Tensor:
    """Attention of one new token per sequence: q ``[B, heads, head_dim]`` -> the same shape."""
    size = checked("attention_decode", q.dtype, q, cache, offsets, start, layer, scale, window)
    act, head_dim, heads = DTYPES[q.dtype], size["D"], size["H"]
    splits = -(-size["capacity"] // SPLIT)
    partial = unwritten(size["B"], heads, splits, head_dim + 2, dtype=torch.float32)
    rows = "1" if heads == size["kv_heads"] else "4"
    device.launch(
        "attention_decode",
        (act, str(head_dim), CONTIGUOUS, rows),
        GRID,
        [partial, q, cache, *_batch(size, offsets, start, layer), splits, float(scale), window],
    )
    out = unwritten(*q.shape, dtype=q.dtype)
    device.launch(
        "attention_combine",
        (act, str(head_dim)),
        GRID,
        [out, partial, offsets, start, size["B"], heads, splits, window],
    )
    return out


def _batch(size: Mapping[str, int], offsets: Tensor, start: Tensor, layer: int) -> list[Tensor | int]:
    """The arguments of both attention kernels from ``lookup`` to ``page_stride``."""
    no_pages = torch.zeros(1, dtype=torch.int32)
    sizes = [size[name] for name in ("B", "H", "kv_heads", "layers")]
    return [no_pages, offsets, start, *sizes, layer, size["capacity"], *NO_PAGES]
