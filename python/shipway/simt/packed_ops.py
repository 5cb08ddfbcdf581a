"""The ops with packed matrices by their Mojo GEMVs on a simulated GPU, arguments as in ``shipway.signature``.

A matrix is its packed arguments: stored elements, scales, and of int4 zero points.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shipway.signature import MATRICES
from shipway.simt.attention_ops import rope_append
from shipway.simt.device import Device
from shipway.simt.row_ops import DTYPES, GRID, checked, unwritten

_PARTS = {"int8": 2, "int4": 3}
"""Arguments of a matrix."""
STORED = {"int8": "int8", "int4": "uint8"}
"""Words of the formats in kernel variants."""
_BATCH = "4"  # rows of x for which the weights are read once


def linear(device: Device, word: str, x: Tensor, *matrix: Tensor) -> Tensor:
    """``x @ w^T`` float32."""
    size = checked(f"linear_{word}", x.dtype, x, *matrix)
    out = unwritten(size["T"], size["N"], dtype=torch.float32)
    unread = torch.empty(0)
    _launch(device, "linear", word, ("0", "0"), out, x, matrix, [unread, unread.int(), size["T"], size["N"], size["K"]])
    return out


def gate_up_silu(device: Device, word: str, x: Tensor, *matrices: Tensor) -> Tensor:
    """``silu(x @ gate^T) * (x @ up^T)`` in the dtype of x."""
    size = checked(f"gate_up_silu_{word}", x.dtype, x, *matrices)
    out = unwritten(size["T"], size["N"], dtype=x.dtype)
    _launch(device, "gate_up_silu", word, (), out, x, matrices, [size["T"], size["N"], size["K"]])
    return out


def qkv_rope_append(device: Device, word: str, x: Tensor, *arguments: Any) -> Tensor:
    """As of plain matrices: returns q ``[T, heads, head_dim]``, appends k and v to the cache in place."""
    size = checked(f"qkv_rope_append_{word}", x.dtype, x, *arguments)
    count = len(MATRICES["qkv_rope_append"]) * _PARTS[word]
    matrices, rest = arguments[:count], arguments[count:]
    projected = unwritten(size["T"], size["Nq"] + 2 * size["Nk"], dtype=torch.float32)
    sizes = [size[name] for name in ("T", "Nq", "Nk", "K")]
    _launch(device, "qkv", word, (), projected, x, matrices, sizes)
    return rope_append(device, size, projected, rest[:3], rest[3:5], *rest[5:])


def _launch(
    device: Device,
    kernel: str,
    word: str,
    flags: tuple[str, ...],
    out: Tensor,
    x: Tensor,
    matrices: tuple[Tensor, ...],
    rest: list[Any],
) -> None:
    """Launches a GEMV; a matrix without zero points gets some that are not read."""
    each = _PARTS[word]
    no_zeros = [torch.empty(0, dtype=torch.uint8)] * (3 - each)
    weights = [part for at in range(0, len(matrices), each) for part in (*matrices[at : at + each], *no_zeros)]
    # That of q, k and v in int4 has too many arguments for more rows than one.
    batch = "1" if len(x) <= 1 or (kernel, word) == ("qkv", "int4") else _BATCH
    variant = (STORED[word], DTYPES[x.dtype], batch, *flags)
    device.launch(f"{kernel}_gemv", variant, GRID, [out, x, *weights, *rest])
