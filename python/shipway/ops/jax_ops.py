"""Every catalogue op in JAX, compiled by XLA for the CPU, on torch CPU tensors.

The maths is that of the ``xla`` route. XLA compiles for fixed sizes: as in the route, rows are padded to powers of two
and the KV cache is read up to one of a few lengths; every other size is compiled for as it comes, some 20 to 100 ms
each. Tensors are shared through DLPack; what is not contiguous, or must be padded, is copied. JAX cannot write to the
caller's memory: the rows of keys and values that XLA has computed are copied into the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from shipway import jax_parts
from shipway.ops.attention import visible
from shipway.ops.data import sequences
from shipway.ops.qkv_rope_append import positions_of

_ACT = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_FEWEST_ROWS = 16  # but one row stays one
_FEWEST_KEYS = 256  # then four times as many, and so on


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Returns a function per catalogue op on torch CPU tensors, arguments as in the op's reference.

    Args:
        dtype: ``"f32"``, ``"bf16"`` or ``"f16"``: activations, matrices and KV cache.
        head_dim: Is not compiled for before a call brings it.
    """
    jax.config.update("jax_platforms", "cpu")
    norm = jax.jit(partial(_rms_norm, act=_ACT[dtype]))
    return {
        "embedding": lambda ids, table: _rowwise(_embedding, (ids,), table),
        "rms_norm": lambda x, weight, eps: _rowwise(norm, (x,), weight, np.float32(eps)),
        "rope": lambda x, table, positions: _rowwise(_rope, (x, positions), _padded(table, _rows(len(table)))),
        "qkv_rope_append": _qkv_rope_append,
        "attention_prefill": _attention,
        "attention_decode": _attention,
        "linear": lambda x, w: _rowwise(_linear, (x,), w),
        "linear_residual": lambda x, w, residual: _rowwise(_linear_residual, (x, residual), w),
        "gate_up_silu": lambda x, gate, up: _rowwise(_gate_up_silu, (x,), gate, up),
        "mlp": lambda x, gate, up, down, residual: _rowwise(_mlp, (x, residual), gate, up, down),
        "lm_head": lambda x, w, rows: _rowwise(_lm_head, (rows,), _padded(x, _rows(len(x))), w),
        "greedy": lambda logits: _rowwise(_greedy, (logits,)),
        "sample": lambda logits, uniform, temperature, top_k, top_p, vocab: _rowwise(
            _sample, (logits, uniform), np.float32(temperature), np.int32(top_k or vocab), np.float32(top_p), vocab
        ),
    }


# Calls.


def _rows(count: int) -> int:
    """What a number of rows is padded to."""
    return 1 if count <= 1 else max(_FEWEST_ROWS, 1 << (count - 1).bit_length())


def _keys(count: int) -> int:
    """How much of the KV cache is read to see ``count`` rows of it."""
    return next(length for step in range(16) if (length := _FEWEST_KEYS << 2 * step) >= count)


def _padded(x: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """``x`` with zeros behind it along one axis, or ``x`` itself where it is long enough."""
    if x.shape[axis] >= count:
        return x
    shape = list(x.shape)
    shape[axis] = count
    longer = x.new_zeros(shape)
    longer.narrow(axis, 0, x.shape[axis]).copy_(x)
    return longer


def _shared(x: torch.Tensor) -> jax.Array:
    return jnp.from_dlpack(x.detach().contiguous())


def _rowwise(
    function: Callable[..., jax.Array], per_row: tuple[torch.Tensor, ...], *others: torch.Tensor | np.generic | int
) -> torch.Tensor:
    """Calls ``function(*per_row, *others)`` with padded rows, and cuts its result."""
    count = len(per_row[0])
    rows = (_shared(_padded(x, _rows(count))) for x in per_row)
    shared = (_shared(x) if isinstance(x, torch.Tensor) else x for x in others)
    return _torch(function(*rows, *shared))[:count]


def _torch(x: jax.Array) -> torch.Tensor:
    return from_dlpack(x.block_until_ready())


def _qkv_rope_append(
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
) -> torch.Tensor:
    positions = torch.from_numpy(positions_of(offsets.numpy(), start.numpy()))
    slots = torch.repeat_interleave(torch.arange(len(start)), offsets.diff())
    weights = (wq, wk, wv, bias_q, bias_k, bias_v, norm_q, norm_k)
    rows = _rows(len(x))
    q, k, v = _qkv(
        cache.shape[-1],
        *(_shared(_padded(y, rows)) for y in (x, positions.int())),
        _shared(_padded(table, _rows(len(table)))),
        *(None if w is None else _shared(w) for w in weights),
        np.float32(eps),
    )
    cache[slots, layer, 0, positions] = _torch(k)[: len(x)]
    cache[slots, layer, 1, positions] = _torch(v)[: len(x)]
    return _torch(q)[: len(x)]


def _attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    offsets: torch.Tensor,
    start: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    batch = sequences(offsets.numpy(), start.numpy())
    longest = max((new.stop - new.start for _, new, *_ in batch), default=0)
    if longest == 0:
        return torch.empty_like(q)
    length, keys = _rows(longest), _keys(cache.shape[3])
    # Sequences side by side: their tokens padded to one length, each with its own view of the cache.
    rows = torch.zeros(len(batch), length, dtype=torch.int64)
    seen = np.zeros((len(batch), 1, 1, length, keys), bool)
    for b, new, _, total in batch:
        count = new.stop - new.start
        rows[b, :count] = torch.arange(new.start, new.stop)
        seen[b, ..., :count, :total] = visible(count, total, window)
    kept = _padded(cache[: len(batch), layer], keys, axis=2)
    totals = np.array([total for *_, total in batch], np.int32)
    out = _torch(_attend(_shared(q[rows]), _shared(kept), seen, totals, np.float32(scale)))
    return torch.cat([out[b, : new.stop - new.start] for b, new, *_ in batch])


# What XLA compiles.


@jax.jit
def _embedding(ids: jax.Array, table: jax.Array) -> jax.Array:
    return table[ids].astype(jnp.float32)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: jax.Array, act: jnp.dtype) -> jax.Array:
    return jax_parts.rms_norm(x, weight, eps).astype(act)


@jax.jit
def _rope(x: jax.Array, positions: jax.Array, table: jax.Array) -> jax.Array:
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
def _attend(q: jax.Array, kept: jax.Array, seen: jax.Array, totals: jax.Array, scale: jax.Array) -> jax.Array:
    """``q [B, S, heads, head_dim]``, ``kept [B, 2, T, kv_heads, head_dim]`` to ``[B, S, heads, head_dim]``."""
    valid = (jnp.arange(kept.shape[2]) < totals[:, None])[:, None, :, None, None]
    keys, values = jnp.where(valid, kept, 0).swapaxes(2, 3).swapaxes(0, 1)  # unwritten rows may hold NaN
    y = jax_parts.attend(q.swapaxes(1, 2), keys, values, seen, scale).reshape(q.shape)
    return jnp.where(seen.any(-1)[:, 0, 0, :, None, None], y, 0).astype(q.dtype)  # a token that sees nothing gives 0


_linear = jax.jit(jax_parts.linear)


@jax.jit
def _linear_residual(x: jax.Array, residual: jax.Array, w: jax.Array) -> jax.Array:
    return residual + jax_parts.linear(x, w)


@jax.jit
def _gate_up_silu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(jax_parts.linear(x, gate)) * jax_parts.linear(x, up)).astype(x.dtype)


@jax.jit
def _mlp(x: jax.Array, residual: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return residual + jax_parts.linear(_gate_up_silu(x, gate, up), down)


@jax.jit
def _lm_head(rows: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
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
    weights = jnp.where(rank < top_k, jnp.exp((scores - largest) / temperature), 0)
    before = jnp.cumsum(weights, axis=-1) - weights
    weights = jnp.where((rank == 0) | (top_p >= 1) | (before < top_p * weights.sum(-1, keepdims=True)), weights, 0)
    mass = jnp.cumsum(weights, axis=-1)
    at = jnp.sum(mass <= uniform[:, None] * mass[:, -1:], axis=-1)
    at = jnp.clip(at, 0, jnp.maximum(jnp.count_nonzero(weights, axis=-1) - 1, 0))
    return jnp.take_along_axis(order, at[:, None], axis=-1)[:, 0].astype(jnp.int32)
