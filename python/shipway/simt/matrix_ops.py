"""The matrix ops by their Mojo GPU kernels on a simulated GPU, arguments as in ``shipway.signature``.

Outputs and what lies between two kernels are filled with NaN before the launch. With ``tf32`` GEMMs multiply float32
as tf32; a GEMV does not, as reading the weights takes all its time.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from shipway.simt.device import Device
from shipway.simt.row_ops import DTYPES, GRID, unwritten
from shipway.targets.kernels import HOPPER

BATCHES = (1, 4, 8)
"""Rows of x for which there are GEMV kernels; more rows go to a GEMM."""
FEW_ROWS = 32
"""Up to this many rows the GEMM has tiles of 16 rows, else of 64; those are Hopper's own where it can."""


def linear(device: Device, x: torch.Tensor, w: torch.Tensor, *, tf32: bool = False) -> torch.Tensor:
    """``x @ w^T`` float32."""
    return _linear(device, x, w, len(x), tf32)


def linear_residual(
    device: Device, x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor, *, tf32: bool = False
) -> torch.Tensor:
    """``residual + x @ w^T`` float32."""
    return _linear(device, x, w, len(x), tf32, residual=residual)


def lm_head(
    device: Device, x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor, *, tf32: bool = False
) -> torch.Tensor:
    """``x[rows] @ w^T`` float32."""
    return _linear(device, x, w, len(rows), tf32, rows=rows)


def gate_up_silu(
    device: Device, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, tf32: bool = False
) -> torch.Tensor:
    """``silu(x @ gate^T) * (x @ up^T)`` in the dtype of x."""
    out = unwritten(len(x), len(gate), dtype=x.dtype)
    sizes = (len(x), *gate.shape)
    kernel, shape = _kernel(device.arch, DTYPES[x.dtype], len(x), tf32)
    if kernel == "gemv":
        no_scales, no_zeros = _unread()
        weights = [gate, no_scales, no_zeros, up, no_scales, no_zeros]
    else:
        weights = [gate, up]
    device.launch(f"gate_up_silu_{kernel}", shape, GRID, [out, x, *weights, *sizes])
    return out


def mlp(
    device: Device,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    *,
    tf32: bool = False,
) -> torch.Tensor:
    """``residual + (silu(x @ gate^T) * (x @ up^T)) @ down^T`` float32."""
    return linear_residual(device, gate_up_silu(device, x, gate, up, tf32=tf32), down, residual, tf32=tf32)


def qkv(
    device: Device, x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, *, tf32: bool = False
) -> torch.Tensor:
    """``x @ wq^T``, ``x @ wk^T`` and ``x @ wv^T`` side by side: ``[T, Nq + 2 Nk]`` float32."""
    out = unwritten(len(x), len(wq) + 2 * len(wk), dtype=torch.float32)
    kernel, shape = _kernel(device.arch, DTYPES[x.dtype], len(x), tf32)
    if kernel == "gemv":
        no_scales, no_zeros = _unread()
        weights = [argument for w in (wq, wk, wv) for argument in (w, no_scales, no_zeros)]
    else:
        weights = [wq, wk, wv]
    device.launch(f"qkv_{kernel}", shape, GRID, [out, x, *weights, len(x), len(wq), *wk.shape])
    return out


def _linear(
    device: Device,
    x: torch.Tensor,
    w: torch.Tensor,
    count: int,
    tf32: bool,
    *,
    residual: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    out = unwritten(count, len(w), dtype=torch.float32)
    kernel, shape = _kernel(device.arch, DTYPES[x.dtype], count, tf32)
    no_scales, no_zeros = _unread()
    weights = [w, no_scales, no_zeros] if kernel == "gemv" else [w]
    added = torch.empty(0) if residual is None else residual
    chosen = torch.empty(0, dtype=torch.int32) if rows is None else rows
    flags = (str(int(residual is not None)), str(int(rows is not None)))
    device.launch(f"linear_{kernel}", (*shape, *flags), GRID, [out, x, *weights, added, chosen, count, *w.shape])
    return out


def _kernel(arch: str, act: str, rows: int, tf32: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the kernel for so many rows of x, ``"gemv"``, ``"gemm"`` or ``"wgmma"``, and its parameters but flags."""
    if rows <= BATCHES[-1]:
        return "gemv", (act, act, str(BATCHES[bisect_left(BATCHES, rows)]))
    if rows > FEW_ROWS and arch in HOPPER and act != "f32":
        return "wgmma", (act,)
    return "gemm", ("tf32" if tf32 else act, "16" if rows <= FEW_ROWS else "64")


def _unread() -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of weights that have none."""
    return torch.empty(0, dtype=torch.float16), torch.empty(0, dtype=torch.uint8)
