"""Every catalogue op in JAX, compiled by XLA for the CPU, on torch CPU tensors.

The maths is that of the ``xla`` route. XLA compiles for fixed sizes, some 50 to 300 ms for each: sizes are padded to a
few, none of them a multiple of a vector, so that any number of calls compiles a handful of shapes per op. One op asked
for alone is compiled for the sizes it is called with, rows as in the route. Tensors are shared through DLPack; what is
not contiguous, or must be padded, is copied. Attention runs sequence by sequence. JAX cannot write to the caller's
memory: the keys and values that XLA has computed are copied into the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from shipway import jax_parts
from shipway.ops.attention_reference import visible
from shipway.ops.data import sequences
from shipway.ops.qkv_rope_append import positions_of
from shipway.signature import SIGNATURES, Number

_ACT = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}

_FEW = {
    "T": (1, 129),
    "R": (1, 129),
    "tokens": (129,),
    "N": (261, 1155),
    "K": (1155,),
    "V": (701,),
    "H": (9,),
    "positions": (151,),
    "q_heads": (15,),
    "kv_heads": (5, 40),
    "group": (1, 8),
    "length": (1, 129),
    "keys": (151, 321),
}
"""What sizes of this name are padded to. A larger one is compiled for as it comes, rows as in the route."""

_ROWS = ("T", "R", "tokens", "length")
_EXACT = {"rms_norm": ("K",)}  # a mean is over its own width
_FILL = {"logits": math.nan}  # NaN is never chosen
_RESULT = {
    "embedding": ("T", "K"),
    "rms_norm": ("T", "K"),
    "rope": ("T", "H", "width"),
    "linear": ("T", "N"),
    "linear_residual": ("T", "N"),
    "gate_up_silu": ("T", "N"),
    "mlp": ("T", "K"),
    "lm_head": ("R", "V"),
    "greedy": ("R",),
    "sample": ("R",),
}


def load_ops(dtype: str, head_dim: int, only: str | None = None) -> dict[str, Callable[..., torch.Tensor]]:
    """Returns a function per catalogue op on torch CPU tensors, arguments as in the op's reference.

    ``bind(*arguments)`` of such a function returns the call alone, its arguments padded and in JAX's arrays.

    Args:
        dtype: ``"f32"``, ``"bf16"`` or ``"f16"``: activations, matrices and KV cache.
        head_dim: Is not compiled for before a call brings it.
        only: An op to be compiled for the sizes of each call, and no other; ``None`` for all, in a few sizes.
    """
    jax.config.update("jax_platforms", "cpu")
    few = only is None
    attention = _Attention(few)
    found: dict[str, Callable[..., torch.Tensor]] = {
        "qkv_rope_append": _QkvRopeAppend(few),
        "attention_prefill": attention,
        "attention_decode": attention,
    }
    functions: dict[str, Callable[..., jax.Array]] = {
        "embedding": _embedding,
        "rms_norm": partial(_rms_norm, _ACT[dtype]),
        "rope": _rope,
        "linear": _linear,
        "linear_residual": _linear_residual,
        "gate_up_silu": _gate_up_silu,
        "mlp": _mlp,
        "lm_head": _lm_head,
        "greedy": _greedy,
        "sample": _sample,
    }
    found |= {name: _Rows(name, function, few) for name, function in functions.items()}
    return found if only is None else {only: found[only]}


def compilations() -> int:
    """Returns how many functions XLA has compiled for these ops so far, one for each combination of sizes."""
    return sum(function._cache_size() for function in _COMPILED)


# Calls.


def _size(name: str | int, count: int, few: bool) -> int:
    """What a size is padded to."""
    for size in _FEW.get(str(name), ()) if few else ():
        if size >= count:
            return size
    if name in _ROWS:
        return count if count <= 1 else max(16, 1 << (count - 1).bit_length())
    return count


def _padded(x: torch.Tensor, shape: tuple[int, ...], fill: float = 0) -> torch.Tensor:
    """``x`` with ``fill`` behind it, or ``x`` itself where nothing is missing."""
    if x.shape == shape:
        return x
    larger = x.new_full(shape, fill)
    larger[tuple(slice(size) for size in x.shape)] = x
    return larger


def _shared(x: torch.Tensor) -> jax.Array:
    return jnp.from_dlpack(x.detach().contiguous())


class _Rows:
    """An op without a KV cache."""

    def __init__(self, op: str, function: Callable[..., jax.Array], few: bool) -> None:
        self._op, self._function, self._few = op, function, few

    def bind(self, *arguments: Any) -> Callable[[], jax.Array]:
        """Returns the call alone."""
        shared: list[Any] = []
        for (name, kind), value in zip(SIGNATURES[self._op].items(), arguments, strict=True):
            if isinstance(kind, Number):
                shared.append((np.float32 if kind.kind is float else np.int32)(value))
                continue
            exact = _EXACT.get(self._op, ())
            named = zip(kind.dims, value.shape, strict=True)
            shape = tuple(count if dim in exact else _size(dim, count, self._few) for dim, count in named)
            shared.append(_shared(_padded(value, shape, _FILL.get(name, 0))))
        return lambda: self._function(*shared).block_until_ready()

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Runs the op."""
        sizes: dict[str | int, int] = {}
        for kind, value in zip(SIGNATURES[self._op].values(), arguments, strict=True):
            if not isinstance(kind, Number):
                sizes.update(zip(kind.dims, value.shape, strict=True))
        result = from_dlpack(self.bind(*arguments)())
        return result[tuple(slice(sizes[dim]) for dim in _RESULT[self._op])].contiguous()


class _QkvRopeAppend:
    def __init__(self, few: bool) -> None:
        self._few = few

    def bind(
        self,
        x: torch.Tensor,
        wq: torch.Tensor,
        wk: torch.Tensor,
        wv: torch.Tensor,
        bias_q: torch.Tensor | None,
        bias_k: torch.Tensor | None,
        bias_v: torch.Tensor | None,
        norm_q: torch.Tensor | None,
        norm_k: torch.Tensor | None,
        eps: float,
        table: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
    ) -> Callable[[], jax.Array]:
        """Returns the call alone, with the append."""
        tokens, (kv_heads, head_dim) = len(x), cache.shape[-2:]
        positions = torch.from_numpy(positions_of(offsets.numpy(), start.numpy()))
        slots = torch.repeat_interleave(torch.arange(len(start)), offsets.diff())
        size = partial(_size, few=self._few)
        rows, width = size("tokens", tokens), size("K", x.shape[1])
        columns = {"q": size("q_heads", len(wq) // head_dim), "kv": size("kv_heads", kv_heads)}
        columns = {name: heads * head_dim for name, heads in columns.items()}
        by_column = (columns["q"], columns["kv"], columns["kv"])
        matrices = (_padded(w, (n, width)) for w, n in zip((wq, wk, wv), by_column, strict=True))
        biases = (
            None if b is None else _padded(b, (n,)) for b, n in zip((bias_q, bias_k, bias_v), by_column, strict=True)
        )
        shared = [
            None if tensor is None else _shared(tensor)
            for tensor in (
                _padded(x, (rows, width)),
                _padded(positions.int(), (rows,)),
                _padded(table, (size("positions", len(table)), table.shape[1])),
                *matrices,
                *biases,
                norm_q,
                norm_k,
            )
        ]

        def call() -> jax.Array:
            q, *kept = _qkv(head_dim, *shared, np.float32(eps))
            for of, new in enumerate(kept):
                cache[slots, layer, of, positions] = from_dlpack(new)[:tokens, :kv_heads]
            return q

        return call

    def __call__(self, x: torch.Tensor, wq: torch.Tensor, *others: Any) -> torch.Tensor:
        """Runs the op."""
        q = from_dlpack(self.bind(x, wq, *others)())
        return q[: len(x), : len(wq) // q.shape[2]].contiguous()


class _Attention:
    def __init__(self, few: bool) -> None:
        self._few = few

    def bind(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
    ) -> Callable[[], list[jax.Array]]:
        """Returns the calls alone, one per sequence that has new tokens."""
        size = partial(_size, few=self._few)
        kv_heads, head_dim = cache.shape[-2:]
        heads = size("kv_heads", kv_heads), size("group", q.shape[1] // kv_heads)
        calls = []
        for b, new, _, total in sequences(offsets.numpy(), start.numpy()):
            count = new.stop - new.start
            if count == 0:
                continue
            length, keys = size("length", count), size("keys", max(total, 0))
            seen = np.zeros((length, keys), bool)
            seen[:count, :total] = visible(count, total, window)
            grouped = q[new].reshape(count, kv_heads, -1, head_dim)
            kept = cache[b, layer, :, : max(total, 0)]
            shared = (
                _shared(_padded(grouped, (length, *heads, head_dim))),
                _shared(_padded(kept, (2, keys, heads[0], head_dim))),
                jnp.asarray(seen),
                np.float32(scale),
            )
            calls.append(partial(_attend, *shared))
        return lambda: [call().block_until_ready() for call in calls]

    def __call__(self, q: torch.Tensor, cache: torch.Tensor, offsets: torch.Tensor, *others: Any) -> torch.Tensor:
        """Runs the op."""
        kv_heads = cache.shape[-2]
        group = q.shape[1] // kv_heads
        attended = self.bind(q, cache, offsets, *others)()
        counts = [count for count in offsets.diff().tolist() if count]
        out = torch.empty(q.shape, dtype=q.dtype)
        for rows, y, count in zip(out.split(counts), attended, counts, strict=True):
            rows.copy_(from_dlpack(y)[:count, :kv_heads, :group].reshape(count, *q.shape[1:]))
        return out


# What XLA compiles.


@jax.jit
def _embedding(ids: jax.Array, table: jax.Array) -> jax.Array:
    return table[ids].astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def _rms_norm(act: Any, x: jax.Array, weight: jax.Array, eps: jax.Array) -> jax.Array:
    return jax_parts.rms_norm(x, weight, eps).astype(act)


@jax.jit
def _rope(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    return jax_parts.rotate(x.astype(jnp.float32), table[positions][:, None]).astype(x.dtype)


@partial(jax.jit, static_argnums=0)
def _qkv(
    head_dim: int,
    x: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    wq: jax.Array,
    wk: jax.Array,
    wv: jax.Array,
    bias_q: jax.Array | None,
    bias_k: jax.Array | None,
    bias_v: jax.Array | None,
    norm_q: jax.Array | None,
    norm_k: jax.Array | None,
    eps: jax.Array,
) -> tuple[jax.Array, ...]:
    angles = table[positions][:, None]

    def heads(w: jax.Array, bias: jax.Array | None, norm: jax.Array | None, rotated: bool) -> jax.Array:
        y = jax_parts.linear(x, w)
        y = (y if bias is None else y + bias).reshape(len(x), -1, head_dim)
        y = y if norm is None else jax_parts.rms_norm(y, norm, eps)
        return (jax_parts.rotate(y, angles) if rotated else y).astype(x.dtype)

    return heads(wq, bias_q, norm_q, True), heads(wk, bias_k, norm_k, True), heads(wv, bias_v, None, False)


@jax.jit
def _attend(q: jax.Array, kept: jax.Array, seen: jax.Array, scale: jax.Array) -> jax.Array:
    """``q [S, kv_heads, group, head_dim]``, ``kept [2, T, kv_heads, head_dim]``: as ``q``, 0 where nothing is seen."""
    length, kv_heads, group, head_dim = q.shape
    keys, values = kept.swapaxes(1, 2)[:, None]
    flat = q.reshape(length, kv_heads * group, head_dim).swapaxes(0, 1)[None]
    y = jax_parts.attend(flat, keys, values, seen, scale).reshape(q.shape)
    return jnp.where(seen.any(-1)[:, None, None, None], y, 0).astype(q.dtype)


_linear = jax.jit(jax_parts.linear)


@jax.jit
def _linear_residual(x: jax.Array, w: jax.Array, residual: jax.Array) -> jax.Array:
    return residual + jax_parts.linear(x, w)


@jax.jit
def _gate_up_silu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(jax_parts.linear(x, gate)) * jax_parts.linear(x, up)).astype(x.dtype)


@jax.jit
def _mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, residual: jax.Array) -> jax.Array:
    return residual + jax_parts.linear(_gate_up_silu(x, gate, up), down)


@jax.jit
def _lm_head(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    return jax_parts.linear(x[rows], w)


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(_numbers(logits), axis=-1).astype(jnp.int32)


def _numbers(logits: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


@jax.jit
def _sample(
    logits: jax.Array, uniform: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, vocab: jax.Array
) -> jax.Array:
    rank = jnp.arange(logits.shape[1])
    scores = jnp.where(rank < vocab, _numbers(logits), -jnp.inf)
    order = jnp.argsort(scores, axis=-1, stable=True, descending=True)
    scores = jnp.take_along_axis(scores, order, axis=-1)
    largest = jnp.maximum(scores[:, :1], jnp.finfo(jnp.float32).min)
    weights = jnp.where(rank < jnp.where(top_k > 0, top_k, vocab), jnp.exp((scores - largest) / temperature), 0)
    before = jnp.cumsum(weights, axis=-1) - weights
    weights = jnp.where((rank == 0) | (top_p >= 1) | (before < top_p * weights.sum(-1, keepdims=True)), weights, 0)
    mass = jnp.cumsum(weights, axis=-1)
    at = jnp.sum(mass <= uniform[:, None] * mass[:, -1:], axis=-1)
    at = jnp.clip(at, 0, jnp.maximum(jnp.count_nonzero(weights, axis=-1) - 1, 0))
    return jnp.take_along_axis(order, at[:, None], axis=-1)[:, 0].astype(jnp.int32)


_COMPILED: tuple[Any, ...] = (
    _embedding,
    _rms_norm,
    _rope,
    _qkv,
    _attend,
    _linear,
    _linear_residual,
    _gate_up_silu,
    _mlp,
    _lm_head,
    _greedy,
    _sample,
)
