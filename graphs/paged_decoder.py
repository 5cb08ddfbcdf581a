"""The decoder graph over MAX's paged KV cache, with the inputs that MAX's own server gives a text model."""

from __future__ import annotations

from pathlib import Path

from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.nn.kv_cache import KVCacheInputsPerDevice, KVCacheParams

from shipway.graphs import ops
from shipway.graphs.decoder import Batch, decode
from shipway.graphs.external_weights import external_weights
from shipway.model.config import ModelConfig


def build_paged_decoder(config: ModelConfig, pages: KVCacheParams, extension: Path, device: DeviceRef) -> Graph:
    """Builds the graph; activations and matrices are in the dtype of the KV cache.

    Inputs: ``tokens [T]`` int64, ``offsets [B + 1]`` uint32, ``return_n_logits`` (unused: always the last token's), the
    KV cache's inputs in MAX's order, the RoPE table f32 ``[positions, rotary_dim]``. Output: logits f32
    ``[B, vocab_size]``, of each sequence's last token. Weights are external, by their Hugging Face names.

    Args:
        config: The architecture.
        pages: The KV cache, float32 or bfloat16; its page size is a multiple of 128.
        extension: The precompiled kernels.
        device: Where it runs.
    """
    inputs = [
        TensorType(DType.int64, ["tokens"], device),
        TensorType(DType.uint32, ["offsets"], device),
        TensorType(DType.int64, ["return_n_logits"], DeviceRef.CPU()),
        *tree.leaves(pages.get_symbolic_inputs()),
        TensorType(DType.float32, ["positions", config.rope.rotary_dim], device),
    ]
    with Graph("paged_decoder", input_types=inputs, custom_extensions=[extension]) as graph:
        tokens, offsets, _, *kv, table = graph.inputs
        (cache,) = tree.leaves(pages.unflatten_kv_inputs(iter(kv)), leaf=KVCacheInputsPerDevice)
        # Once per step here, not once per layer in the ops: ids and positions are small int32 to all of them.
        first = offsets.tensor.cast(DType.int32)
        batch = Batch(
            tokens=tokens.tensor.cast(DType.int32),
            offsets=first,
            start=cache.cache_lengths.cast(DType.int32),
            rows=first[1:] - 1,
        )
        weight = external_weights(graph, config, pages.dtype, device)
        cached = ops.Pages(cache.kv_blocks, cache.lookup_table, cache.page_stride)
        graph.output(decode(config, pages.dtype, weight, batch, table.tensor, cached))
    return graph
