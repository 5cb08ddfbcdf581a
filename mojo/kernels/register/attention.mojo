"""Ops `attention` and `attention_paged`, one body for both cache layouts."""
from std.utils.numerics import FlushDenormals
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.attention import AttentionTiles, attention_share, combine_share
from kernels.kv_cache import CacheShape, KVCache
from kernels.register.kv_cache import check_sequences, contiguous, paged
from kernels.workers import fork, worker_count


def check_attention[
    D: Int
](
    op: StaticString,
    cached: CacheShape,
    heads: Int,
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
    window: Int32,
) raises:
    """Raises unless queries and a batch have shapes that fit the cache."""
    if (
        cached.head_dim != D
        or heads % cached.kv_heads != 0
        or offsets.dim_size(0) != start.dim_size(0) + 1
        or start.dim_size(0) > cached.sequences
        or layer < 0
        or Int(layer) >= cached.layers
        or window < 0
    ):
        raise Error(
            op,
            ": q has ",
            heads,
            " heads of ",
            D,
            ", the cache ",
            cached.kv_heads,
            " of ",
            cached.head_dim,
            ", ",
            cached.sequences,
            " sequences, ",
            cached.layers,
            " layers; layer ",
            layer,
            ", window ",
            window,
        )


def attention_tiles[
    D: Int
](
    op: StaticString,
    cached: CacheShape,
    tokens: Int,
    heads: Int,
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
    window: Int32,
) raises -> AttentionTiles:
    """Checks a batch of `tokens` rows against the cache; returns its tiles."""
    check_attention[D](op, cached, heads, offsets, start, layer, window)
    # A row before position 0 sees no key, and is 0: what the rows of a query
    # longer than its keys are, masks being aligned bottom-right.
    check_sequences(
        op,
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        start.dim_size(0),
        tokens,
        cached.capacity,
        cached.capacity,
        Int.MIN,
    )
    return AttentionTiles(
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        start.dim_size(0),
        heads,
        cached.kv_heads,
        D,
        Int(window),
    )


def attention[
    t: DType, C: KVCache, //, D: Int
](
    output: OutputTensor[dtype=t, rank=3, ...],
    cache: Pointer[mut=True, Scalar[t], _],
    at: C,
    q: InputTensor[dtype=t, rank=3, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
    scale: Float32,
    window: Int32,
) raises:
    """Causal attention of q[T, heads, head_dim] over the KV cache.

    Sequence b's rows offsets[b] .. offsets[b + 1] - 1 stand at positions
    start[b], start[b] + 1, ...; their keys and values are in the cache. One row
    alone goes to `attention_decode`, several to `attention_prefill`. `window`
    is the number of last keys a row sees, itself included; 0 means all.
    """
    if q.dim_size(2) != D:
        raise Error("attention: q has heads of ", q.dim_size(2), ", not ", D)
    var tiles = attention_tiles[D](
        "attention",
        at.extent(),
        q.dim_size(0),
        q.dim_size(1),
        offsets,
        start,
        layer,
        window,
    )
    var out = output.unsafe_ptr()
    var qp = q.unsafe_ptr()
    var workers = worker_count(tiles.count, tiles.work)
    var partial = List[Float32](length=tiles.partials, fill=0)
    var pp = partial.unsafe_ptr()

    def share(worker: Int) {imm}:
        attention_share[D](
            out, pp, qp, cache, at, Int(layer), scale, tiles, worker, workers
        )

    fork(share, workers)
    with FlushDenormals():
        combine_share[D](out, pp, tiles, 0, 1)


@extensibility.register("attention")
struct Attention:
    """`attention` over a cache `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        t: DType, //, head_dim: Int, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        q: InputTensor[dtype=t, rank=3, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        attention[head_dim](
            output,
            cache.unsafe_ptr(),
            contiguous(cache),
            q,
            offsets,
            start,
            layer,
            scale,
            window,
        )


@extensibility.register("attention_paged")
struct AttentionPaged:
    """`attention` over MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        t: DType, //, head_dim: Int, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        blocks: MutableInputTensor[dtype=t, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        q: InputTensor[dtype=t, rank=3, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        attention[head_dim](
            output,
            blocks.unsafe_ptr(),
            paged(blocks, lookup, page_stride),
            q,
            offsets,
            start,
            layer,
            scale,
            window,
        )
