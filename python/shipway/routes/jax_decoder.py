"""A Llama-family decoder in JAX: what the ``xla`` route compiles.

Weights and KV cache are arguments. The residual stream, RoPE, scores and softmax are float32; in bf16 the operands of
every product with weights are bfloat16 and its sum float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from shipway import jax_parts
from shipway.model.config import ModelConfig

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}

Weights = dict[str, jax.Array]
Cache = list[tuple[jax.Array, jax.Array]]


def empty_cache(config: ModelConfig, dtype: str, batch: int, capacity: int) -> Cache:
    """Returns keys and values ``[B, kv_heads, capacity, head_dim]`` of every layer."""
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    return [(jnp.zeros(shape, DTYPES[dtype]), jnp.zeros(shape, DTYPES[dtype])) for _ in config.sliding_window]


def step(
    config: ModelConfig,
    kv_length: int,
    every_row: bool,
    weights: Weights,
    cache: Cache,
    table: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Appends tokens to the cache, at position ``start`` of every sequence.

    Args:
        config: The architecture.
        kv_length: How much of the cache is read; at least ``start + length``.
        every_row: Logits of every token instead of each sequence's last.
        weights: Matrices in the activation dtype, norm weights and biases f32, by their Hugging Face names.
        cache: As :func:`empty_cache` made it; its capacity is at least ``start + S``.
        table: RoPE table f32 ``[capacity, rotary_dim]``: cosines and sines side by side.
        tokens: Ids ``[B, S]`` int32; those from ``length`` on are padding. What padding writes to the cache lies behind
            the sequence: the next tokens overwrite it before anything attends to it.
        start: Tokens in the cache, int32.
        length: Tokens that are meant, int32.

    Returns:
        The cache, logits f32 ``[B, vocab_size]`` or ``[B, S, vocab_size]``, their greedy ids.
    """
    batch, new = tokens.shape
    embedding = weights["model.embed_tokens.weight"]
    act = embedding.dtype
    angles = lax.dynamic_slice_in_dim(table, start, new)[:, None]
    distance = (start + jnp.arange(new))[:, None] - jnp.arange(kv_length)

    def linear(x: jax.Array, name: str) -> jax.Array:
        y = jax_parts.linear(x.reshape(-1, x.shape[-1]), weights[name + ".weight"]).reshape(*x.shape[:-1], -1)
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def norm(x: jax.Array, name: str) -> jax.Array:
        return jax_parts.rms_norm(x, weights[name + ".weight"], config.rms_norm_eps)

    x = embedding[tokens].astype(jnp.float32)
    updated = []
    for layer, (window, (keys, values)) in enumerate(zip(config.sliding_window, cache, strict=True)):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm")
        heads = []
        for name in "qkv":
            head = linear(h, f"{at}self_attn.{name}_proj").reshape(batch, new, -1, config.head_dim)
            if name != "v":
                head = norm(head, f"{at}self_attn.{name}_norm") if config.qk_norm else head
                head = jax_parts.rotate(head, angles)
            heads.append(head.swapaxes(1, 2).astype(act))
        q, k, v = heads
        keys = lax.dynamic_update_slice_in_dim(keys, k, start, axis=2)
        values = lax.dynamic_update_slice_in_dim(values, v, start, axis=2)
        updated.append((keys, values))
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        keys, values = keys[:, :, :kv_length], values[:, :, :kv_length]
        y = jax_parts.attend(q, keys, values, seen, config.head_dim**-0.5)
        x = x + linear(y, at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm")
        x = x + linear(
            jax.nn.silu(linear(h, at + "mlp.gate_proj")) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj"
        )
    if not every_row:
        x = lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
    logits = linear(norm(x, "model.norm"), config.head)
    logits = logits if every_row else logits[:, 0]
    return updated, logits, jnp.argmax(logits, axis=-1).astype(jnp.int32)
