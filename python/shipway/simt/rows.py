"""The catalogue's rows ``mojo@TARGET``: our Mojo GPU kernels on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shipway.simt import attention_ops, matrix_ops, row_ops
from shipway.simt.device import Device

_ACTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def load_ops(dtype: str, head_dim: int, target: str) -> dict[str, Callable[..., Any]]:
    """Returns a function per op of the catalogue; kernels are compiled as they are first launched.

    Args:
        dtype: ``"f32"``, ``"bf16"`` or ``"f16"``: activations, matrices and KV cache.
        head_dim: Unused: a call's KV cache says which kernel is launched.
        target: One of ``shipway.simt.device.WARP_SIZES``.
    """
    device = Device(target)
    functions = {
        name: partial(getattr(module, name), device)
        for module, names in (
            (row_ops, ("embedding", "rope", "greedy", "sample")),
            (attention_ops, ("qkv_rope_append", "attention_prefill", "attention_decode")),
            (matrix_ops, ("linear", "linear_residual", "gate_up_silu", "mlp", "lm_head")),
        )
        for name in names
    }
    return {**functions, "rms_norm": partial(row_ops.rms_norm, device, act=_ACTS[dtype])}
