"""The whole decoder as one MAX graph of stock ops, none of ours: prefill, decode and scoring at any length."""

from __future__ import annotations

from functools import cache

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType, TensorValue, ops

from shipway.graphs.external_weights import external_weights
from shipway.graphs.ops import DTYPES
from shipway.model.config import ModelConfig

_F32 = DType.float32


def build_stock_decoder(config: ModelConfig, dtype: str, device: DeviceRef) -> Graph:
    """Builds the graph.

    Inputs: ``tokens [B, S]`` int32, ``past [P]`` int64 (the positions 0..P-1 already in the cache, the same for every
    sequence), ``rows [R]`` int32 (which of the B * S tokens get logits), the RoPE table f32
    ``[positions, rotary_dim]``, the KV cache as tensors ``[B, kv_heads, capacity, head_dim]`` (keys of layer 0, values
    of layer 0, keys of layer 1, ...), and the same memory once more as buffers. Outputs: logits f32
    ``[R, vocab_size]``, greedy ids int32 ``[R]``.

    Loading a slice of a buffer copies the whole buffer, slicing a tensor copies the slice only. So old keys and values
    are read through the tensors and new ones written through the buffers. A step reads positions below P and writes
    those from P on: the order in which it does so cannot matter. A layer's number would be a constant in the kernels
    that index a cache of all layers, each of which would then be compiled as many times as there are layers.

    Weights are external, by their Hugging Face names: matrices in ``dtype``, norm weights and biases f32. The residual
    stream, RoPE and attention are f32 in both dtypes; a bf16 product rounds its result to bf16.

    Args:
        config: The architecture.
        dtype: Activations, matrices and KV cache, ``"f32"`` or ``"bf16"``.
        device: Where it runs.
    """
    act = DTYPES[dtype]
    per_layer = [act, ["batch", config.num_key_value_heads, "capacity", config.head_dim], device]
    caches = 2 * config.num_hidden_layers
    inputs = [
        TensorType(DType.int32, ["batch", "new"], device),
        TensorType(DType.int64, ["past"], device),
        TensorType(DType.int32, ["rows"], device),
        TensorType(_F32, ["positions", config.rope.rotary_dim], device),
        *(TensorType(*per_layer) for _ in range(caches)),
        *(BufferType(*per_layer) for _ in range(caches)),
    ]
    shapes = config.tensor_shapes()
    with Graph("stock_decoder", input_types=inputs) as graph:
        weight = cache(external_weights(graph, config, act, device))

        def linear(x: TensorValue, name: str) -> TensorValue:
            y = ops.cast(x @ weight(name + ".weight").T, _F32)
            return y + weight(name + ".bias") if name + ".bias" in shapes else y

        def norm(x: TensorValue, name: str) -> TensorValue:
            return ops.rms_norm(x, weight(name + ".weight"), config.rms_norm_eps)

        tokens, past, rows, table, *old = (value.tensor for value in graph.inputs[:-caches])
        kept = [value.buffer for value in graph.inputs[-caches:]]
        batch, new, seen = Dim("batch"), Dim("new"), Dim("past")
        start, end = (ops.shape_to_tensor([dim])[0] for dim in (seen, seen + new))
        angles = table[(slice(start, end), new), :]
        queries = ops.range(start, end, 1, out_dim=new, dtype=DType.int64, device=device)
        keys = ops.concat([past, queries])
        # Fused into an operation of higher rank, as where a single layer uses a mask, MAX 26.7 takes element (0, 0) of
        # this difference for all. A tile is not fused.
        distance = ops.tile(ops.unsqueeze(queries, 1) - ops.unsqueeze(keys, 0), [1, 1])  # [S, P + S]
        masks = {window: _mask(distance, window) for window in config.windows}

        x = ops.cast(ops.gather(weight("model.embed_tokens.weight"), tokens.reshape([batch * new]), 0), _F32)
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            attn = at + "self_attn."
            h = ops.cast(norm(x, at + "input_layernorm"), act)
            heads = []
            for name in "qkv":
                head = linear(h, f"{attn}{name}_proj").reshape([batch, new, -1, config.head_dim])
                if name != "v":
                    head = norm(head, f"{attn}{name}_norm") if config.qk_norm else head
                    head = _rotate(head, angles)
                heads.append(ops.cast(ops.permute(head, [0, 2, 1, 3]), act))
            keys_values: list[TensorValue] = []
            for kind, fresh in enumerate(heads[1:]):
                kept[2 * layer + kind][:, :, (slice(start, end), new), :] = fresh
                stored = old[2 * layer + kind][:, :, (slice(0, start), seen), :]
                keys_values.append(ops.cast(ops.concat([stored, fresh], axis=2), _F32))
            y = _attention(
                ops.cast(heads[0], _F32), keys_values[0], keys_values[1], masks[config.sliding_window[layer]]
            )
            y = y.reshape([batch * new, config.num_attention_heads * config.head_dim])
            x = x + linear(ops.cast(y, act), attn + "o_proj")
            h = ops.cast(norm(x, at + "post_attention_layernorm"), act)
            h = ops.silu(linear(h, at + "mlp.gate_proj")) * linear(h, at + "mlp.up_proj")
            x = x + linear(ops.cast(h, act), at + "mlp.down_proj")
        x = ops.cast(ops.gather(norm(x, "model.norm"), rows, 0), act)
        logits = linear(x, config.head)
        graph.output(logits, ops.cast(ops.squeeze(ops.argmax(logits, -1), -1), DType.int32))
    return graph


def _rotate(x: TensorValue, angles: TensorValue) -> TensorValue:
    """Rotates the first ``rotary_dim`` of f32 ``x [B, S, heads, head_dim]``; pairs are (i, i + rotary_dim / 2).

    Args:
        x: The heads.
        angles: Cosines and sines ``[S, rotary_dim]``, side by side.
    """
    rotary_dim = int(angles.shape[1])
    half = rotary_dim // 2
    angles = ops.unsqueeze(angles, 1)
    cos, sin = angles[:, :, :half], angles[:, :, half:]
    a, b = x[:, :, :, :half], x[:, :, :, half:rotary_dim]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if rotary_dim < int(x.shape[3]):
        parts.append(x[:, :, :, rotary_dim:])
    return ops.concat(parts, axis=-1)


def _mask(distance: TensorValue, window: int | None) -> TensorValue:
    """0 where a query may attend to a key that lies ``distance [S, T]`` before it, -inf elsewhere; f32."""
    allowed = distance >= 0
    if window is not None:
        allowed = ops.logical_and(allowed, ops.logical_not(distance >= window))
    return ops.where(
        allowed,
        ops.constant(0.0, _F32, device=distance.device),
        ops.constant(float("-inf"), _F32, device=distance.device),
    )


def _attention(q: TensorValue, k: TensorValue, v: TensorValue, mask: TensorValue) -> TensorValue:
    """Attention of ``q [B, heads, S, head_dim]`` over ``k, v [B, kv_heads, T, head_dim]``.

    Heads that share a key head become rows of one matrix, so that keys and values are never repeated.

    Returns:
        ``[B, S, heads, head_dim]``.
    """
    batch, heads, new, head_dim = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    group = int(heads) // int(kv_heads)
    q = q.reshape([batch, kv_heads, group * new, head_dim]) * float(int(head_dim) ** -0.5)
    scores = (q @ k.transpose(-1, -2)).reshape([batch, kv_heads, group, new, total]) + mask
    weights = ops.softmax(scores).reshape([batch, kv_heads, group * new, total])
    return ops.permute((weights @ v).reshape([batch, heads, new, head_dim]), [0, 2, 1, 3])
