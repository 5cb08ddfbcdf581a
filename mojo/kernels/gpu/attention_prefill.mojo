"""Causal attention of a prompt's tokens over the KV cache, online softmax.

A block attends a tile of query rows of one head, each warp 16 of them (or
16 rows and a part of the columns, where head_dim is large). While scores are
computed the values are under way, and while values are summed the next keys.
"""
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    AddressSpace,
    barrier,
    lane_id,
    thread_idx,
    warp_id,
)
from kernels.gpu.attention_decode import LOG2E
from kernels.gpu.attention_queries import (
    QueryTile,
    each_query_tile,
    load_queries,
    write_outputs,
)
from kernels.gpu.attention_rows import RowSoftmax
from kernels.gpu.attention_step import (
    PaddedRows,
    SeenKeys,
    add_odd,
    any_odd,
    clean_values,
)
from kernels.gpu.block import THREADS, WARPS, quotient, size, threads_metadata
from kernels.gpu.product_rows import rows_sum
from kernels.gpu.staging import Staged, arrive, commit
from kernels.gpu.tile_op import (
    TILE,
    Accumulator,
    Shared,
    accumulator_size,
    c_at,
    c_col,
    c_row,
    load_a,
    mma16_each,
    product_as_a,
    row_stride,
)
from kernels.kv_cache import (
    CacheShape,
    ContiguousCache,
    KVCache,
    PagedCache,
)

comptime SHARED = 48 << 10
"""Bytes of shared memory that a block may take without asking for more."""
comptime STEP = 4096
"""Elements of a step's keys: with more, the scores and the loads under way do
not fit in registers beside the sums."""
comptime TWO_BLOCKS = __mlir_attr.`2 : i32`
"""As `MIN_BLOCKS` of other kernels, with 255 registers a thread: a warp holds
the sums of all of head_dim."""


@fieldwise_init
struct Tiling(TrivialRegisterPassable):
    """How a block shares out a tile."""

    var row_warps: Int
    """Warps side by side along the rows; the others share out the columns."""
    var keys: Int
    """Keys of a step, a divisor of `RUN`."""
    var one_buffer: Bool
    """Whether keys and values take turns in one buffer."""

    def rows(self) -> Int:
        """Query rows of a tile."""
        return self.row_warps * TILE

    def buffer[t: DType](self, head_dim: Int) -> Int:
        """Elements of a step's keys."""
        return self.keys * row_stride[t](head_dim)

    def elements[t: DType](self, head_dim: Int) -> Int:
        """Elements of shared memory: queries, keys, values, weights."""
        return (
            self.rows() * row_stride[t](head_dim)
            + (1 if self.one_buffer else 2) * self.buffer[t](head_dim)
            + WARPS * TILE * row_stride[t](TILE)
        )


def tiling[t: DType](head_dim: Int) -> Tiling:
    """The largest tiles that fit in shared memory and in registers."""
    for choice in [
        Tiling(WARPS, 64, False),
        Tiling(WARPS, 32, False),
        Tiling(WARPS, 16, False),
        Tiling(WARPS // 2, 16, False),
        Tiling(1, 16, False),
    ]:
        # What is left is for the flags of values that are not finite.
        var bytes = choice.elements[t](head_dim) * size_of[t]()
        if bytes <= SHARED - 2048 and choice.keys * head_dim <= STEP:
            return choice
    return Tiling(1, 16, True)


@fieldwise_init
struct Scratch[t: DType](TrivialRegisterPassable):
    """Shared memory of a block."""

    var tiles: Shared[Self.t]
    """`[tiling.elements]`."""
    var odd: Shared[DType.int32]
    """`[THREADS]`: keys with values that are not finite."""


@always_inline
def attention_prefill_tile[
    t: DType, C: KVCache, //, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    at: C,
    b: Int,
    layer: Int,
    heads: Int,
    kv_head: Int,
    rows: Int,
    start: Int,
    window: Int,
    scale: Float32,
    scratch: Scratch[t],
    thread: Int,
):
    """Attends one tile of query rows of one head of one sequence.

    Row r stands at position start + r and sees the keys up to its own
    (bottom-right causal), the last `window` of them when window > 0. A row that
    sees no key (start < 0) is 0.

    Parameters:
        t: Dtype of q, of the cache and of the output.
        C: Layout of the cache.
        D: The head_dim, a multiple of 16 up to 256.

    Args:
        dst: `[rows, heads, D]`, at the head.
        q: `[rows, heads, D]`, at the head.
        cache: The KV cache.
        at: Its layout.
        b: The sequence.
        layer: Decoder layer.
        heads: Query heads.
        kv_head: The KV head.
        rows: Rows from the tile's first to the sequence's last, from 1.
        start: Position of the tile's first row.
        window: Sliding window, 0 for none.
        scale: Factor of the scores, times log2(e).
        scratch: Shared memory, free again on return.
        thread: Number of the thread in its block.
    """
    comptime T = tiling[t](D)
    comptime KEYS = T.keys
    comptime LD = row_stride[t](D)
    comptime LP = row_stride[t](TILE)
    comptime COLUMNS = ceildiv(D // TILE, WARPS // T.row_warps)
    comptime Keys = Staged[t, KEYS, D, True]
    comptime Layout = PaddedRows[t, D]
    var lane = Int(lane_id())
    var warp = Int(warp_id())
    var own_row = warp % T.row_warps * TILE
    # The last warps' columns overlap where they do not share out evenly.
    var first_column = 0
    comptime if T.row_warps < WARPS:
        first_column = warp // T.row_warps * COLUMNS
    var own_column = min(first_column, D // TILE - COLUMNS)

    var sq = scratch.tiles
    var sk = sq.unsafe_offset(T.rows() * LD)
    var sv = sk.unsafe_offset(0 if T.one_buffer else T.buffer[t](D))
    var sp = sv.unsafe_offset(T.buffer[t](D) + warp * TILE * LP)

    var here = min(Int32(T.rows()), Int32(rows))
    var seen = SeenKeys.of(start, here, window, at.row_stride())

    @always_inline
    def begin(value: Int, base: Int32, to: Shared[t]) {imm} -> Keys.Held:
        """Begins to copy a step's keys or values, zeros where none is seen."""
        var run = seen.rows(at, b, layer, value, base, kv_head)
        var count = seen.count(base)
        return Keys.start(cache, run, 0, count, 0, D, to, thread)

    var from_row = UInt32(heads * D)
    load_queries[Layout, T.rows(), D](q, sq, here, from_row, thread)
    var base = seen.first_step[KEYS]()
    if base < seen.high:
        Keys.finish(begin(0, base, sk), sk, thread)
    commit()

    var softmax = RowSoftmax.none()
    var sums = Array[Accumulator, COLUMNS](fill=Accumulator(0))
    while base < seen.high:
        arrive()
        var values = Keys.Held(uninitialized=True)
        comptime if not T.one_buffer:
            values = begin(1, base, sv)
            commit()
        var scores = Array[Accumulator, KEYS // TILE](fill=Accumulator(0))
        comptime for k in range(D // TILE):
            var a = load_a[LD](sq.unsafe_offset(own_row * LD + k * TILE), lane)
            mma16_each[LD, False](
                scores, a, sk.unsafe_offset(k * TILE), TILE * LD, lane
            )
        var mask = seen.mask(base, own_row + c_row[0](lane), c_col[0](lane))
        # Only where the diagonal or the window's edge crosses the step do some
        # rows see a key that others do not. Here, not in `SeenKeys`: as a
        # function it takes 3 more scalar registers of CDNA.
        var edge = base + Int32(KEYS - 1) > seen.start or (
            seen.window != 0 and base < seen.high - seen.window
        )
        comptime for j in range(KEYS // TILE):
            scores[j] *= scale
        if edge:
            mask.hide(scores)
        var before = softmax.weigh[t](scores)
        comptime for c in range(COLUMNS):
            sums[c] *= before

        comptime if T.one_buffer:
            barrier()
            values = begin(1, base, sv)
            commit()
        Keys.finish(values, sv, thread)
        arrive()
        var next = Keys.Held(uninitialized=True)
        comptime if not T.one_buffer:
            next = begin(0, base + Int32(KEYS), sk)
            commit()
        if edge:
            clean_values[Layout, D, KEYS](sv, scratch.odd, thread)
            barrier()
            if any_odd(scratch.odd, lane):
                var first = at.offset(b, layer, 1, size(base), kv_head)
                add_odd[KEYS](
                    sums,
                    cache.unsafe_offset(first),
                    seen.stride,
                    scratch.odd,
                    mask,
                    own_column,
                    lane,
                )
        comptime for j in range(KEYS // TILE):
            var a = product_as_a[LP](scores[j], sp, lane)
            mma16_each[LD, True](
                sums,
                a,
                sv.unsafe_offset(j * TILE * LD + own_column * TILE),
                TILE,
                lane,
            )
        comptime if T.one_buffer:
            barrier()
            next = begin(0, base + Int32(KEYS), sk)
            commit()
        Keys.finish(next, sk, thread)
        base += Int32(KEYS)

    # Through the queries' place, so that rows are written in whole chunks.
    var total = rows_sum(softmax.total)
    var own = sq.unsafe_offset(own_row * LD + own_column * TILE)
    arrive()
    comptime for c in range(COLUMNS):
        if own_column + c >= first_column:
            comptime for e in range(accumulator_size()):
                var y = sums[c][e] / total[e]
                own[unsafe_offset=c_at[e, LD](lane) + c * TILE] = y.cast[t]()
    barrier()
    write_outputs[Layout, T.rows(), D](
        dst, sq, here, from_row, seen.start, thread
    )
    barrier()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=TWO_BLOCKS,
)
def attention_prefill[
    t: DType, D: Int, paged: Bool
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
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
    scale: Float32,
    window: Int32,
    shortest: Int32,
):
    """Attends all rows of every sequence of at least `shortest` new tokens.

    Parameters:
        t: Dtype of q, of the cache and of the output.
        D: The head_dim, a multiple of 16 up to 256.
        paged: Whether the cache is MAX's pages (`PagedCache`), else
            `ContiguousCache`.

    Args:
        dst: `[T, heads, D]`, 16-byte aligned.
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
        scale: Factor of the scores.
        window: Keys a row sees, its own included; 0 for all.
        shortest: Sequences of fewer rows are left to `attention_decode`.
    """
    comptime assert D % TILE == 0 and D <= 256
    comptime T = tiling[t](D)
    var memory = unsafe_stack_allocation[
        T.elements[t](D),
        Scalar[t],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var odd = unsafe_stack_allocation[
        THREADS(), Int32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var shape = CacheShape(
        size(batch), size(layers), size(capacity), size(kv_heads), D
    )

    @always_inline
    def attend_all[C: KVCache](at: C) {imm}:
        @always_inline
        def attend(tile: QueryTile) {imm}:
            var base = (size(tile.first) * size(heads) + tile.head) * D
            attention_prefill_tile[D](
                dst.unsafe_offset(base),
                q.unsafe_offset(base),
                cache,
                at,
                tile.b,
                size(layer),
                size(heads),
                # As head // (heads // kv_heads), by a divisor that is there.
                quotient(tile.head * size(kv_heads), size(heads)),
                size(tile.rows),
                Int(start[unsafe_offset=tile.b] + tile.row),
                size(window),
                scale * LOG2E,
                Scratch(memory, odd),
                Int(thread_idx.x),
            )

        each_query_tile[T.rows()](offsets, batch, heads, shortest, attend)

    comptime if paged:
        attend_all(PagedCache(shape, size(page_size), Int(page_stride), lookup))
    else:
        attend_all(ContiguousCache(shape))
