"""The catalogue's rows ``mojo@TARGET``: our Mojo GPU kernels on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shipway.signature import MATRICES
from shipway.simt import attention_ops, matrix_ops, packed_ops, row_ops
from shipway.simt.device import Device

_ACTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_MATRIX_OPS = ("linear", "linear_residual", "gate_up_silu", "mlp", "lm_head")
_WITH_PRODUCTS = (*_MATRIX_OPS, "qkv_rope_append")


def load_ops(dtype: str, head_dim: int, target: str) -> dict[str, Callable[..., Any]]:
    """Returns a function per op of the catalogue; kernels are compiled as they are first launched.

    Args:
        dtype: ``"f32"``, ``"bf16"``, ``"f16"`` or ``"tf32"`` (float32, multiplied as tf32): activations, matrices and
            KV cache.
        head_dim: Unused: a call's KV cache says which kernel is launched.
        target: One of ``shipway.simt.device.WARP_SIZES``.
    """
    device = Device(target)
    functions = {
        name: partial(getattr(module, name), device)
        for module, names in (
            (row_ops, ("embedding", "rope", "greedy", "sample")),
            (attention_ops, ("qkv_rope_append", "attention_prefill", "attention_decode")),
            (matrix_ops, _MATRIX_OPS),
        )
        for name in names
    }
    if dtype == "tf32":
        return {name: partial(function, tf32=True) for name, function in functions.items() if name in _WITH_PRODUCTS}
    packed = {
        f"{name}_{word}": partial(getattr(packed_ops, name), device, word)
        for name in MATRICES
        for word in packed_ops.STORED
    }
    return {**functions, **packed, "rms_norm": partial(row_ops.rms_norm, device, act=_ACTS[dtype])}
