"""The parts of a Llama-family decoder in JAX, which the ``xla`` route and the ops' ``jax`` rows share.

Sums are float32 at full precision; in bf16 the operands of products with weights are bfloat16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum of products in float32, at full precision."""
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x [M, K]``, rounded to the dtype of ``weight [N, K]``, times its transpose: ``[M, N]`` f32."""
    rows = x.astype(weight.dtype)
    if weight.dtype == jnp.bfloat16 and len(rows) == 1:
        # XLA's product of one bf16 row reads weights 20 times slower than that of two (an LM head: 128 and 7 ms).
        rows = jnp.repeat(rows, 2, axis=0)
    return product("mk,nk->mn", rows, weight)[: len(x)]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float | jax.Array) -> jax.Array:
    """RMSNorm over the last axis of ``x`` f32."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the first ``rotary_dim`` of ``x [..., S, heads, head_dim]``; pairs are (i, i + rotary_dim / 2).

    Args:
        x: The heads, f32.
        angles: Cosines and sines ``[S, 1, rotary_dim]``, side by side.
    """
    cos, sin = jnp.split(angles, 2, axis=-1)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, scale: float | jax.Array) -> jax.Array:
    """Attention whose query heads share key heads, f32.

    Args:
        q: ``[B, heads, S, head_dim]``. Heads that share a key head become rows of one matrix, so that keys and values
            are never repeated.
        keys: ``[B, kv_heads, T, head_dim]``.
        values: ``[B, kv_heads, T, head_dim]``.
        seen: Which keys a query sees, bool ``[..., S, T]``.
        scale: Factor on the scores.

    Returns:
        ``[B, S, heads * head_dim]``; NaN where a query sees nothing.
    """
    batch, kv_heads = keys.shape[:2]
    q = q.reshape(batch, kv_heads, -1, *q.shape[2:])
    # XLA has no batched product of bf16 with a float32 sum on the CPU.
    q, keys, values = (x.astype(jnp.float32) for x in (q, keys, values))
    scores = product("bhgsd,bhtd->bhgst", q, keys) * scale
    attention = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return product("bhgst,bhtd->bshgd", attention, values).reshape(batch, q.shape[3], -1)
