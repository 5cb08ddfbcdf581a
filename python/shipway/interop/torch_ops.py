"""The Mojo ops as ``torch.ops.shipway.*`` on CPU tensors, usable under ``torch.compile`` without a graph break.

Importing this module registers them; the kernels of a dtype (and of a head_dim) are compiled, or taken from the
artefact cache, at the first call that needs them. Arguments and results are those of ``shipway.graphs.ops``: tensors
are read and the KV cache is written in place, without a copy. A wrong call raises ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.library import custom_op

from shipway.signature import check

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ANY_HEAD_DIM = 64  # ops that know no heads come with those of this head_dim


@lru_cache
def _kernels(dtype: str, head_dim: int) -> dict[str, Callable[..., Tensor]]:
    from shipway.graphs.single_op import load_ops

    return load_ops(dtype, head_dim)


def _call(op: str, act: torch.dtype, *arguments: object) -> Tensor:
    """Checks a call and runs its kernel."""
    if act not in _NAMES:
        raise ValueError(f"{op}: activations are torch.float32 or torch.bfloat16, not {act}")
    sizes = check(op, _NAMES[act], arguments)
    return _kernels(_NAMES[act], sizes.get("D", _ANY_HEAD_DIM))[op](*arguments)


@custom_op("shipway::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float, act: torch.dtype) -> Tensor:
    """RMSNorm of f32 x ``[T, K]`` with f32 weight ``[K]`` -> ``[T, K]`` in ``act``."""
    return _call("rms_norm", act, x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, act: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=act)


@custom_op("shipway::linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, w: Tensor) -> Tensor:
    """x ``[T, K]`` @ w ``[N, K]``^T -> f32 ``[T, N]``."""
    return _call("linear", x.dtype, x, w)


@linear.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0], dtype=torch.float32)


@custom_op("shipway::linear_residual", mutates_args=(), device_types="cpu")
def linear_residual(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """f32 residual ``[T, N]`` + x ``[T, K]`` @ w ``[N, K]``^T -> f32 ``[T, N]``."""
    return _call("linear_residual", x.dtype, x, w, residual)


@linear_residual.register_fake
def _(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.empty_like(residual)


@custom_op("shipway::gate_up_silu", mutates_args=(), device_types="cpu")
def gate_up_silu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x @ gate^T) * (x @ up^T): x ``[T, K]``, matrices ``[N, K]`` -> ``[T, N]`` in x's dtype."""
    return _call("gate_up_silu", x.dtype, x, gate, up)


@gate_up_silu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], gate.shape[0])


@custom_op("shipway::qkv_rope_append", mutates_args=("cache",), device_types="cpu")
def qkv_rope_append(
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
) -> Tensor:
    """Projects, norms and rotates q, k, v of x ``[T, K]``; k and v go into the cache -> q ``[T, heads, head_dim]``."""
    projection = (x, wq, wk, wv, bias_q, bias_k, bias_v, norm_q, norm_k, eps, table)
    return _call("qkv_rope_append", x.dtype, *projection, cache, offsets, start, layer)


@qkv_rope_append.register_fake
def _(
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
) -> Tensor:
    head_dim = cache.shape[-1]
    return cache.new_empty(x.shape[0], wq.shape[0] // head_dim, head_dim)


@custom_op("shipway::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor, cache: Tensor, offsets: Tensor, start: Tensor, layer: int, scale: float, window: int
) -> Tensor:
    """Causal attention of q ``[T, heads, head_dim]`` over the cache; ``window`` 0 means all keys."""
    return _call("attention_prefill", q.dtype, q, cache, offsets, start, layer, scale, window)


@attention.register_fake
def _(q: Tensor, cache: Tensor, offsets: Tensor, start: Tensor, layer: int, scale: float, window: int) -> Tensor:
    return torch.empty_like(q)
