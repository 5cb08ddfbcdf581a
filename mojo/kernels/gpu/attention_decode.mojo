"""Attention of one new token per sequence over the KV cache, split over keys.

Every split of `SPLIT` keys, aligned to the cache's start, leaves its own
maximum, sum and weighted values; `attention_combine` merges them in key order.
So the result depends neither on the grid nor on the batch.
"""
from std.math import ceildiv, exp2
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    AddressSpace,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from kernels.attention_decode import first_key, partial_size
from kernels.gpu.block import (
    MIN_BLOCKS,
    THREADS,
    quotient,
    size,
    threads_metadata,
)
from kernels.gpu.reduce import halvings, lanes_sum
from kernels.gpu.tile_op import F32, Shared
from kernels.kv_cache import (
    RUN,
    CacheShape,
    ContiguousCache,
    KVCache,
    PagedCache,
)

comptime SPLIT = RUN
"""Keys of a split: all at one row stride, and enough splits of a context of
some thousand keys for every multiprocessor."""
comptime CHUNK = 8
"""Elements of a row that a lane reads, 16 bytes of 16-bit numbers."""
comptime AHEAD = 2
"""Keys whose loads a group of lanes has in flight: 2 KiB a warp, with room for
enough warps."""
comptime LOG2E = Float32(1.4426950408889634)


@fieldwise_init
struct Softmax(TrivialRegisterPassable):
    """A lane's share of a pass over some keys: maximum of the scores in units of
    log2, sum of the weights and weighted values."""

    var top: Float32
    var sum: Float32
    var values: SIMD[F32, CHUNK]

    @staticmethod
    @always_inline
    def none() -> Self:
        return {neg_inf[F32](), 0, 0}


@always_inline
def reference(top: Float32) -> Float32:
    """What scores are taken relative to; while every score is minus infinity,
    score - top would be NaN."""
    return 0 if top == neg_inf[F32]() else top


@always_inline
def _lanes[D: Int]() -> Int:
    """Lanes of a key, a power of two."""
    return 1 << halvings(ceildiv(D, CHUNK))


@always_inline
def groups[D: Int]() -> Int:
    """Keys that a block attends to at a time."""
    return THREADS() // _lanes[D]()


@always_inline
def attention_decode_tile[
    t: DType, C: KVCache, //, D: Int, ROWS: Int
](
    partial: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    rows: Int,
    cache: Pointer[Scalar[t], _],
    at: C,
    b: Int,
    layer: Int,
    kv_head: Int,
    split: Int,
    splits: Int,
    low: Int,
    high: Int,
    scale: Float32,
    scratch: Shared[F32],
    thread: Int,
):
    """Attends up to ROWS query heads of one KV head to one split of keys.

    Parameters:
        t: Dtype of q and of the cache.
        C: Layout of the cache.
        D: The head_dim, a multiple of 16 up to 256.
        ROWS: Query heads computed.

    Args:
        partial: `[rows, splits, D + 2]`: values, maximum (in units of log2),
            sum; at this split of the first row.
        q: `[rows, D]`.
        rows: Query heads, from 1 to ROWS.
        cache: The KV cache.
        at: Its layout.
        b: The sequence.
        layer: Decoder layer.
        kv_head: The KV head.
        split: Which split, counted from the one that holds key `low`.
        splits: Splits that partial has room for.
        low: First visible key.
        high: One past the last visible key.
        scale: Factor of the scores, times log2(e).
        scratch: `[groups(D), D + 2]`, free again on return.
        thread: Number of the thread in its block.
    """
    comptime LANES = _lanes[D]()
    comptime GROUPS = groups[D]()
    comptime STEP = min(AHEAD, ceildiv(SPLIT, GROUPS))
    comptime ALIGN = min(16, CHUNK * size_of[t]())
    var d0 = thread % LANES * CHUNK
    # In 32 bits, and relative to base: registers are short.
    var base = (Int32(UInt32(low) // UInt32(SPLIT)) + Int32(split)) * Int32(
        SPLIT
    )
    var first = max(Int32(low) - base, 0)
    var end = min(Int32(high) - base, Int32(SPLIT))
    var group = Int32(thread // LANES)
    var stride = UInt32(at.row_stride())
    var there = size(base)
    var keys = cache.unsafe_offset(at.offset(b, layer, 0, there, kv_head) + d0)
    var values = cache.unsafe_offset(
        at.offset(b, layer, 1, there, kv_head) + d0
    )

    var query = Array[SIMD[F32, CHUNK], ROWS](fill=0)
    var state = Array[Softmax, ROWS](fill=Softmax.none())
    comptime for r in range(ROWS):
        if d0 < D and r < rows:
            query[r] = (
                q.unsafe_offset(r * D + d0)
                .unsafe_load[width=CHUNK, alignment=ALIGN]()
                .cast[F32]()
            )
    # The number of steps is the same for all threads, as shuffles need it.
    comptime STRIDE = Int32(STEP * GROUPS)
    for step in range(first // STRIDE * STRIDE, end, STRIDE):
        var k = Array[SIMD[t, CHUNK], STEP](fill=0)
        var v = Array[SIMD[t, CHUNK], STEP](fill=0)
        comptime for u in range(STEP):
            var j = step + Int32(u * GROUPS) + group
            if first <= j and j < end and d0 < D:
                var row = Int(UInt32(j) * stride)
                k[u] = keys.unsafe_offset(row).unsafe_load[
                    width=CHUNK, alignment=ALIGN
                ]()
                v[u] = values.unsafe_offset(row).unsafe_load[
                    width=CHUNK, alignment=ALIGN
                ]()
        # One key or value widened at a time: registers are short.
        var scores = Array[SIMD[F32, STEP], ROWS](fill=0)
        comptime for u in range(STEP):
            var j = step + Int32(u * GROUPS) + group
            var key = k[u].cast[F32]()
            comptime for r in range(ROWS):
                var s = lanes_sum[LANES]((key * query[r]).reduce_add()) * scale
                var seen = first <= j and j < end
                scores[r][u] = s if seen else neg_inf[F32]()
        comptime for r in range(ROWS):
            var top = max(state[r].top, scores[r].reduce_max())
            var before = exp2(state[r].top - reference(top))
            scores[r] = exp2(scores[r] - reference(top))
            state[r] = {
                top,
                state[r].sum * before + scores[r].reduce_add(),
                state[r].values * before,
            }
        comptime for u in range(STEP):
            var value = v[u].cast[F32]()
            comptime for r in range(ROWS):
                state[r].values = value.fma(scores[r][u], state[r].values)

    comptime SIZE = partial_size(D)
    comptime for r in range(ROWS):
        var own = scratch.unsafe_offset(Int(group) * SIZE)
        if d0 < D:
            comptime for c in range(CHUNK):
                own[unsafe_offset=d0 + c] = state[r].values[c]
        if d0 == 0:
            own[unsafe_offset=D] = state[r].top
            own[unsafe_offset=D + 1] = state[r].sum
        barrier()
        if r < rows:
            merge[D](
                partial.unsafe_offset(r * splits * SIZE),
                scratch,
                # Groups from `end` on saw no key. As a constant, the count
                # would have all the loads of a merge in registers at once.
                min(Int32(GROUPS), end),
                thread,
            )
        barrier()


@always_inline
def merge[
    D: Int
](
    dst: Pointer[mut=True, Float32, _],
    parts: Shared[F32],
    count: Int32,
    thread: Int,
):
    """Merges `count` parts `[D + 2]` into dst `[D + 2]`, in their order."""
    comptime SIZE = partial_size(D)
    comptime for step in range(ceildiv(D, THREADS())):
        var d = thread + step * THREADS()
        if d < D:
            var top = neg_inf[F32]()
            for i in range(count):
                top = max(top, parts[unsafe_offset=Int(i) * SIZE + D])
            var sum = Float32(0)
            var value = Float32(0)
            for i in range(count):
                var part = parts.unsafe_offset(Int(i) * SIZE)
                var weight = exp2(part[unsafe_offset=D] - reference(top))
                sum += part[unsafe_offset=D + 1] * weight
                value += part[unsafe_offset=d] * weight
            dst[unsafe_offset=d] = value
            if d == 0:
                dst[unsafe_offset=D] = top
                dst[unsafe_offset=D + 1] = sum


@always_inline
def splits_of(position: Int, low: Int) -> Int:
    """Splits that hold a key from `low` to `position`."""
    return ceildiv(max(0, position + 1 - low // SPLIT * SPLIT), SPLIT)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def attention_decode[
    t: DType, D: Int, paged: Bool, ROWS: Int
](
    partial: MutPointer[Float32, MutAnyOrigin],
    q: ImmPointer[Scalar[t], ImmutAnyOrigin],
    cache: ImmPointer[Scalar[t], ImmutAnyOrigin],
    lookup: ImmPointer[UInt32, ImmutAnyOrigin],
    offsets: ImmPointer[Int32, ImmutAnyOrigin],
    start: ImmPointer[Int32, ImmutAnyOrigin],
    batch: Int32,
    heads: Int32,
    kv_heads: Int32,
    layers: Int32,
    layer: Int32,
    capacity: Int32,
    page_size: Int32,
    page_stride: Int64,
    splits: Int32,
    scale: Float32,
    window: Int32,
):
    """Leaves the splits of every sequence that has exactly one new token.

    Parameters:
        t: Dtype of q and of the cache.
        D: The head_dim, a multiple of 16 up to 256.
        paged: Whether the cache is MAX's pages (`PagedCache`), else
            `ContiguousCache`.

    Args:
        partial: `[batch, heads, splits, D + 2]` float32.
        q: `[T, heads, D]`, 16-byte aligned.
        cache: The KV cache, 16-byte aligned.
        lookup: `[batch, capacity / page_size]`, read when `paged`.
        offsets: `[batch + 1]` first row of each sequence.
        start: `[batch]` position of each sequence's first row.
        batch: Number of sequences.
        heads: Query heads.
        kv_heads: Heads of the cache, a divisor of heads.
        layers: Layers of the cache.
        layer: Decoder layer.
        capacity: Positions of a sequence.
        page_size: Positions of a page, used when `paged`.
        page_stride: Elements from a page to the next, used when `paged`.
        splits: `ceildiv(capacity, SPLIT)`.
        scale: Factor of the scores.
        window: Keys a row sees, its own included; 0 for all.
    """
    comptime assert D % 16 == 0 and D <= 256
    var scratch = unsafe_stack_allocation[
        groups[D]() * partial_size(D),
        Float32,
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var shape = CacheShape(
        size(batch), size(layers), size(capacity), size(kv_heads), D
    )

    @always_inline
    def attend[C: KVCache](at: C) {imm}:
        var group = Int32(quotient(size(heads), size(kv_heads)))
        # What lives as long as the loop in 32 bits: scalar registers are short
        # on AMD.
        var pairs = batch * kv_heads
        var tile = Int32(block_idx.x)
        while tile < pairs * splits:
            var split = quotient(size(tile), size(pairs))
            var pair = size(tile - Int32(split) * pairs)
            tile += Int32(grid_dim.x)
            var b = quotient(pair, size(kv_heads))
            var kv_head = size(Int32(pair) - Int32(b) * kv_heads)
            var row = offsets[unsafe_offset=b]
            var position = Int(start[unsafe_offset=b])
            var low = first_key(position, size(window))
            if offsets[unsafe_offset=b + 1] != row + 1 or split >= splits_of(
                position, low
            ):
                continue
            var h0 = Int32(0)
            while h0 < group:
                var head = size(Int32(kv_head) * group + h0)
                var rows = Int(min(Int32(ROWS), group - h0))
                attention_decode_tile[D, ROWS](
                    partial.unsafe_offset(
                        ((b * size(heads) + head) * size(splits) + split)
                        * partial_size(D)
                    ),
                    q.unsafe_offset((size(row) * size(heads) + head) * D),
                    rows,
                    cache,
                    at,
                    b,
                    size(layer),
                    kv_head,
                    split,
                    size(splits),
                    low,
                    position + 1,
                    scale * LOG2E,
                    scratch,
                    Int(thread_idx.x),
                )
                h0 += Int32(ROWS)

    comptime if paged:
        attend(PagedCache(shape, size(page_size), Int(page_stride), lookup))
    else:
        attend(ContiguousCache(shape))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def attention_combine[
    t: DType, D: Int
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    partial: ImmPointer[Float32, ImmutAnyOrigin],
    offsets: ImmPointer[Int32, ImmutAnyOrigin],
    start: ImmPointer[Int32, ImmutAnyOrigin],
    batch: Int32,
    heads: Int32,
    splits: Int32,
    window: Int32,
):
    """Merges what `attention_decode` left, in key order; a row that sees no key
    is 0. Rows of other sequences than those of one new token stay as they are.

    Parameters:
        t: Dtype of the output.
        D: The head_dim.

    Args:
        dst: `[T, heads, D]`.
        partial: `[batch, heads, splits, D + 2]` float32.
        offsets: `[batch + 1]` first row of each sequence.
        start: `[batch]` position of each sequence's first row.
        batch: Number of sequences.
        heads: Query heads.
        splits: Splits that partial has room for.
        window: Keys a row sees, its own included; 0 for all.
    """
    comptime SIZE = partial_size(D)
    for tile in range(
        Int(block_idx.x), size(batch) * size(heads), Int(grid_dim.x)
    ):
        var b = quotient(tile, size(heads))
        var row = size(offsets[unsafe_offset=b])
        if size(offsets[unsafe_offset=b + 1]) != row + 1:
            continue
        var position = Int(start[unsafe_offset=b])
        var count = splits_of(position, first_key(position, size(window)))
        var parts = partial.unsafe_offset(tile * size(splits) * SIZE)
        var to = dst.unsafe_offset(
            (row * size(heads) + tile - b * size(heads)) * D
        )
        for d in range(Int(thread_idx.x), D, THREADS()):
            var top = neg_inf[F32]()
            for s in range(count):
                top = max(top, parts[unsafe_offset=s * SIZE + D])
            var sum = Float32(0)
            var value = Float32(0)
            for s in range(count):
                var part = parts.unsafe_offset(s * SIZE)
                var weight = exp2(part[unsafe_offset=D] - reference(top))
                sum += part[unsafe_offset=D + 1] * weight
                value += part[unsafe_offset=d] * weight
            var y = value / sum if count > 0 else Float32(0)
            to[unsafe_offset=d] = y.cast[t]()
