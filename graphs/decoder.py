"""The whole decoder as one MAX graph of our Mojo ops: prefill, decode and scoring at any length, one compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Graph, TensorType, TensorValue

from shipway.graphs import ops
from shipway.graphs.external_weights import external_weights
from shipway.model.config import ModelConfig

_LAYERS_PER_OP = 10  # an op costs a fork-join, 20 us with its dispatch; compile time grows with the op's tensors


@dataclass(frozen=True)
class Batch:
    """What one step reads: ``tokens [T]``, ``offsets [B + 1]``, ``start [B]``, ``rows [R]``, all int32."""

    tokens: TensorValue
    offsets: TensorValue
    start: TensorValue
    rows: TensorValue


def _layer_weights(config: ModelConfig, weight: Callable[[str], TensorValue], layer: int) -> ops.LayerWeights:
    at = f"model.layers.{layer}."

    def of_heads(*kinds: str) -> list[TensorValue]:
        return [weight(f"{at}self_attn.{kind}") for kind in kinds]

    q, k, v, wo = of_heads("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    biases = of_heads("q_proj.bias", "k_proj.bias", "v_proj.bias") if config.qkv_bias else None
    norms = of_heads("q_norm.weight", "k_norm.weight") if config.qk_norm else None
    return ops.LayerWeights(
        norm_in=weight(at + "input_layernorm.weight"),
        qkv=(q, k, v),
        biases=(biases[0], biases[1], biases[2]) if biases else None,
        norms=(norms[0], norms[1]) if norms else None,
        wo=wo,
        norm_mlp=weight(at + "post_attention_layernorm.weight"),
        gate=weight(at + "mlp.gate_proj.weight"),
        up=weight(at + "mlp.up_proj.weight"),
        down=weight(at + "mlp.down_proj.weight"),
    )


def decode(
    config: ModelConfig,
    act: DType,
    weight: Callable[[str], TensorValue],
    batch: Batch,
    table: TensorValue,
    cache: BufferValue | ops.Pages,
    tf32: bool = False,
) -> TensorValue:
    """The layers: logits f32 ``[R, vocab_size]`` of the batch's rows; its keys and values go into the cache."""
    embed = weight("model.embed_tokens.weight")
    x = ops.embedding(batch.tokens, embed)
    layers = range(config.num_hidden_layers)
    for some in (layers[i : i + _LAYERS_PER_OP] for i in layers[::_LAYERS_PER_OP]):
        x = ops.decoder_layers(
            x,
            [_layer_weights(config, weight, layer) for layer in some],
            [config.sliding_window[layer] or 0 for layer in some],
            some[0],
            config.rms_norm_eps,
            table,
            cache,
            batch.offsets,
            batch.start,
            config.head_dim,
            tf32,
        )
    head = embed if config.tie_word_embeddings else weight("lm_head.weight")
    x = ops.rms_norm(x, weight("model.norm.weight"), config.rms_norm_eps, act)
    return ops.lm_head(x, head, batch.rows, tf32)


def build_decoder(config: ModelConfig, dtype: str, weights: str, extension: Path, device: DeviceRef) -> Graph:
    """Builds the graph.

    Inputs: ``tokens [T]`` int32, ``offsets [B + 1]`` int32, ``start [B]`` int32, ``rows [R]`` int32 (which tokens get
    logits), the RoPE table f32 ``[positions, rotary_dim]``, the KV cache
    ``[slots, layers, 2, capacity, kv_heads, head_dim]`` (written in place). Outputs: logits f32 ``[R, vocab_size]``,
    greedy ids int32 ``[R]``. Weights are external, by their Hugging Face names: matrices in the format ``weights``,
    norm weights and biases f32.

    Args:
        config: The architecture.
        dtype: Activations and KV cache, ``"f32"`` or ``"bf16"``, or on an NVIDIA GPU ``"tf32"``: f32, with matrix
            products of more than eight rows in tf32. The residual stream is f32 in all.
        weights: Storage format of the matrices, ``"f32"``, ``"bf16"`` or ``"f16"``.
        extension: The precompiled kernels.
        device: Where it runs.
    """
    tf32 = dtype == "tf32"
    act, matrix = DType.float32 if tf32 else ops.DTYPES[dtype], ops.DTYPES[weights]
    index = DType.int32
    inputs = [
        TensorType(index, ["tokens"], device),
        TensorType(index, ["offsets"], device),
        TensorType(index, ["batch"], device),
        TensorType(index, ["rows"], device),
        TensorType(DType.float32, ["positions", config.rope.rotary_dim], device),
        BufferType(
            act,
            ["slots", config.num_hidden_layers, 2, "capacity", config.num_key_value_heads, config.head_dim],
            device,
        ),
    ]
    with Graph("decoder", input_types=inputs, custom_extensions=[extension]) as graph:
        weight = external_weights(graph, config, matrix, device)
        tokens, offsets, start, rows, table = (value.tensor for value in graph.inputs[:5])
        batch = Batch(tokens, offsets, start, rows)
        logits = decode(config, act, weight, batch, table, graph.inputs[5].buffer, tf32)
        graph.output(logits, ops.greedy(logits))
    return graph
