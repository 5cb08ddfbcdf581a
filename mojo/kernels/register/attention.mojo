"""Ops `attention` and `attention_paged`, one body for both cache layouts."""
from std.math import ceildiv
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.attention_decode import (
    SPLIT,
    attention_decode_tile,
    combine_splits,
    first_key,
    partial_size,
)
from kernels.attention_prefill import (
    KEYS,
    QUERIES,
    attention_prefill_tile,
    values_size,
)
from kernels.kv_cache import KVCache
from kernels.register.kv_cache import check_sequences, contiguous, paged
from kernels.workers import worker_count


@fieldwise_init
struct Sequence(ImplicitlyCopyable, Movable):
    """One sequence's rows, visible keys and tiles."""

    var row: Int
    var rows: Int
    var start: Int
    var low: Int
    var splits: Int
    var tile: Int
    var tiles: Int
    var partial: Int


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
    comptime PARTIAL = partial_size(D)
    var cached = at.extent()
    var heads = q.dim_size(1)
    var b = start.dim_size(0)
    if (
        cached.head_dim != D
        or q.dim_size(2) != D
        or heads % cached.kv_heads != 0
        or offsets.dim_size(0) != b + 1
        or b > cached.sequences
        or layer < 0
        or Int(layer) >= cached.layers
        or window < 0
    ):
        raise Error(
            "attention: q has ",
            heads,
            " heads of ",
            q.dim_size(2),
            ", the cache ",
            cached.kv_heads,
            " of ",
            cached.head_dim,
        )
    var op = offsets.unsafe_ptr()
    var sp = start.unsafe_ptr()
    # A row before position 0 sees no key, and is 0: what the rows of a query
    # longer than its keys are, masks being aligned bottom-right.
    check_sequences(
        "attention",
        op,
        sp,
        b,
        q.dim_size(0),
        cached.capacity,
        cached.capacity,
        Int.MIN,
    )
    var group = heads // cached.kv_heads
    var w = Int(window)

    var sequences = List[Sequence](capacity=b)
    var count = 0
    var partials = 0
    var work = 0
    for i in range(b):
        var row = Int(op[unsafe_offset=i])
        var rows = Int(op[unsafe_offset=i + 1]) - row
        var s = Int(sp[unsafe_offset=i])
        var low = first_key(s, w)
        var splits = ceildiv(max(0, s + 1 - low // SPLIT * SPLIT), SPLIT)
        var tiles = heads * ceildiv(rows, QUERIES)
        if rows == 1:
            tiles = cached.kv_heads * splits
        sequences.append(
            Sequence(row, rows, s, low, splits, count, tiles, partials)
        )
        count += tiles
        work += rows * heads * max(0, s + rows) * D
        if rows == 1:
            partials += heads * splits * PARTIAL

    var out = output.unsafe_ptr()
    var qp = q.unsafe_ptr()
    var workers = worker_count(count, work)
    var partial = List[Float32](length=partials, fill=0)
    var pp = partial.unsafe_ptr()
    var seqs = sequences.unsafe_ptr()

    def share(worker: Int) {imm}:
        var scores = Array[Float32, QUERIES * KEYS](fill=0)
        var acc = Array[Float32, values_size(D)](fill=0)
        # Round robin: causal tiles grow along a prompt.
        var i = 0
        for tile in range(worker, count, workers):
            while (
                tile >= seqs[unsafe_offset=i].tile + seqs[unsafe_offset=i].tiles
            ):
                i += 1
            var s = seqs[unsafe_offset=i]
            var local = tile - s.tile
            var q_rows = qp.unsafe_offset(s.row * heads * D)
            if s.rows == 1:
                attention_decode_tile[D](
                    pp.unsafe_offset(s.partial),
                    q_rows,
                    cache,
                    at,
                    i,
                    Int(layer),
                    local // s.splits,
                    local % s.splits,
                    s.splits,
                    group,
                    s.low,
                    s.start + 1,
                    scale,
                    scores.unsafe_ptr(),
                )
            else:
                var r0 = local // heads * QUERIES
                var head = local % heads
                attention_prefill_tile[D](
                    out.unsafe_offset(s.row * heads * D),
                    q_rows,
                    cache,
                    at,
                    i,
                    Int(layer),
                    head,
                    heads,
                    head // group,
                    r0,
                    min(r0 + QUERIES, s.rows),
                    s.start,
                    w,
                    scale,
                    scores.unsafe_ptr(),
                    acc.unsafe_ptr(),
                )

    if workers == 1:
        share(0)
    else:
        sync_parallelize(share, workers)

    for i in range(b):
        var s = sequences[i]
        if s.rows != 1:
            continue
        for h in range(heads):
            combine_splits[D](
                out.unsafe_offset((s.row * heads + h) * D),
                pp.unsafe_offset(s.partial + h * s.splits * PARTIAL),
                s.splits,
            )


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
