"""The ops of rows on a simulated GPU: norm, embedding, RoPE, choice of the token.

One function per op of the catalogue, on torch CPU tensors, with the arguments of ``shipway.signature``. Outputs and
scratch are full of NaN, or of -1, before a launch: an element that a kernel leaves out is seen. A wrong call raises
``ValueError``, a defect that a launch shows ``shipway.simt.findings.Finding``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shipway.signature import check
from shipway.simt.device import Device

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Words of the dtypes in kernel variants."""
GRID = 3
"""Blocks of a launch: every result is the same for any number, and few make each block take several tiles."""
SPAN = 4096
"""Logits of a span in ``greedy.mojo``: its scratch is sized by them."""


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of NaN, or of -1 where integers are wanted."""
    return torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype)


def checked(op: str, act: torch.dtype, *arguments: Any) -> dict[str, int]:
    """Checks a call; returns its sizes.

    Raises:
        ValueError: The call is wrong, or ``act`` is no dtype of the kernels.
    """
    if act not in DTYPES:
        raise ValueError(f"{op}: activations are {', '.join(map(str, DTYPES))}, not {act}")
    return dict(check(op, DTYPES[act], arguments))


def rms_norm(device: Device, x: Tensor, weight: Tensor, eps: float, act: torch.dtype) -> Tensor:
    """RMSNorm of x ``[T, K]`` float32 by weight ``[K]`` -> ``[T, K]`` in ``act``."""
    size = checked("rms_norm", act, x, weight, eps)
    out = unwritten(*x.shape, dtype=act)
    device.launch("rms_norm", (DTYPES[act],), GRID, [out, x, weight, size["T"], size["K"], float(eps)])
    return out


def embedding(device: Device, ids: Tensor, table: Tensor) -> Tensor:
    """Rows ids ``[T]`` of table ``[V, K]`` -> ``[T, K]`` float32."""
    size = checked("embedding", table.dtype, ids, table)
    out = unwritten(size["T"], size["K"], dtype=torch.float32)
    device.launch("embedding", (DTYPES[table.dtype],), GRID, [out, ids, table, size["T"], size["K"]])
    return out


def rope(device: Device, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """RoPE of x ``[T, heads, head_dim]`` by rows positions ``[T]`` of table ``[positions, rotary_dim]``."""
    size = checked("rope", x.dtype, x, table, positions)
    out = unwritten(*x.shape, dtype=x.dtype)
    numbers = [size[name] for name in ("T", "H", "width", "rotary_dim")]
    device.launch("rope", (DTYPES[x.dtype],), GRID, [out, x, table, positions, *numbers])
    return out


def greedy(device: Device, logits: Tensor) -> Tensor:
    """Ids ``[R]`` of the largest logits of ``[R, V]`` float32."""
    size = checked("greedy", torch.float32, logits)
    spans = -(-size["V"] // SPAN)
    best = unwritten(size["R"], spans, dtype=torch.float32)
    ids = unwritten(size["R"], spans, dtype=torch.int32)
    out = unwritten(size["R"], dtype=torch.int32)
    device.launch("greedy_spans", (), GRID, [best, ids, logits, size["R"], size["V"]])
    device.launch("greedy", (), GRID, [out, best, ids, size["R"], size["V"]])
    return out


def sample(
    device: Device, logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float, vocab: int
) -> Tensor:
    """Ids ``[R]`` drawn from logits ``[R, V]`` float32 by uniform numbers ``[R]``."""
    size = checked("sample", torch.float32, logits, uniform, temperature, top_k, top_p, vocab)
    out = unwritten(size["R"], dtype=torch.int32)
    numbers = [size["R"], size["V"], vocab, float(temperature), top_k, float(top_p)]
    device.launch("sample", (), GRID, [out, logits, uniform, *numbers])
    return out
