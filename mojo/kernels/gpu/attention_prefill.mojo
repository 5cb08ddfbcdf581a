"""Causal attention of a prompt's tokens over the KV cache, online softmax.

A block attends a tile of query rows of one head, each warp 16 of them (or
16 rows and a part of the columns, where head_dim is large). While scores are
computed the values are under way, and while values are summed the next keys.
"""
from std.math import ceildiv, exp2
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import isfinite, neg_inf
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    AddressSpace,
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from kernels.attention_decode import first_key
from kernels.gpu.attention_decode import LOG2E
from kernels.gpu.block import THREADS, WARPS, quotient, size, threads_metadata
from kernels.gpu.reduce import lanes_max
from kernels.gpu.product_rows import rows_max, rows_sum
from kernels.gpu.staging import (
    RowOffsets,
    Staged,
    arrive,
    chunk,
    commit,
)
from kernels.gpu.tile_op import (
    F32,
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
struct RunRows(RowOffsets):
    """Rows of one KV head within a run of the cache, counted from a step's
    first.

    A row before `low` is hidden from the whole tile and stands for row `low`,
    so that it is not read. Within a run in 32 bits: registers are short.
    """

    var low: UInt32
    var offset: Int
    """Of row 0."""
    var stride: UInt32

    @always_inline
    def at(self, row: Int) -> Int:
        return self.offset + Int(max(UInt32(row), self.low) * self.stride)


@fieldwise_init
struct Scratch[t: DType](TrivialRegisterPassable):
    """Shared memory of a block."""

    var tiles: Shared[Self.t]
    """`[tiling.elements]`."""
    var odd: Shared[DType.int32]
    """`[THREADS]`: keys with values that are not finite."""


@fieldwise_init
struct Mask(TrivialRegisterPassable):
    """What a lane's rows see of a step's keys.

    In 32 bits and relative to the lane's first element: registers are short.
    """

    var position: Int32
    """Of the first element's row, counted from the step's first key."""
    var column: Int32
    """Of the first element, which is its key in a product of scores."""
    var reach: UInt32
    """Keys that a row sees, its own included, 2^31 for all."""

    @always_inline
    def sees_key[i: Int](self, key: Int) -> Bool:
        """Whether the row of element i sees a key of the step."""
        var distance = self.position + Int32(c_row[i](0) - key)
        return UInt32(distance) < self.reach  # negative ones are large

    @always_inline
    def sees_own[i: Int](self, tile: Int) -> Bool:
        """Whether the row of element i sees the key of its column in one of the
        step's tiles of 16 keys."""
        comptime KEY = c_col[i](0)
        return Self(self.position - self.column, 0, self.reach).sees_key[i](
            tile * TILE + KEY
        )


@always_inline
def _clean_values[
    t: DType, //, D: Int, KEYS: Int
](values: Shared[t], odd: Shared[DType.int32], thread: Int):
    """Zeroes values that are not finite, and flags their keys.

    Where some rows see a key and others do not, a weight of 0 would still make
    NaN of them.

    Args:
        values: `[KEYS, D]`, rows `row_stride` apart.
        odd: `[THREADS]`, written: the thread's finds in key thread % KEYS.
        thread: Number of the thread in its block.
    """
    comptime V = chunk[t]()
    comptime LD = row_stride[t](D)
    comptime PER_KEY = THREADS() // KEYS
    var row = values.unsafe_offset(thread % KEYS * LD)
    var found = False
    for c in range(thread // KEYS * V, D, PER_KEY * V):
        var v = row.unsafe_offset(c).unsafe_load[width=V, alignment=16]()
        var fine = isfinite(v)
        if not fine.reduce_and():
            row.unsafe_offset(c).unsafe_store[alignment=16](
                fine.select(v, SIMD[t, V](0))
            )
            found = True
    odd[unsafe_offset=thread] = Int32(found)


@always_inline
def _any(odd: Shared[DType.int32], lane: Int) -> Bool:
    """Whether any thread found something, for every lane."""
    var found = Int32(0)
    comptime for w in range(WARPS):
        found |= odd[unsafe_offset=w * WARP_SIZE + lane]
    return lanes_max[WARP_SIZE](Float32(found)) > 0


@always_inline
def _add_odd[
    t: DType, N: Int, //, D: Int
](
    mut sums: Array[Accumulator, N],
    value: Pointer[Scalar[t], _],
    key: Int,
    mask: Mask,
    own_column: Int,
    lane: Int,
):
    """Adds what `_clean_values` took away of one key, where rows see it.

    Args:
        sums: Products of the warp, 16 columns each.
        value: `[D]` of the key.
        key: Number of the key in its step.
        mask: What rows see.
        own_column: The warp's first 16 columns.
        lane: Number of the thread in its warp.
    """
    comptime for c in range(N):
        comptime for e in range(accumulator_size()):
            var d = (own_column + c) * TILE + c_col[e](lane)
            if mask.sees_key[e](key):
                var v = value[unsafe_offset=d].cast[F32]()
                if not isfinite(v):
                    sums[c][e] += v


@fieldwise_init
struct Rows(TrivialRegisterPassable):
    """Softmax of a lane's rows over the keys so far."""

    var top: Accumulator
    """Maximum of each element's row."""
    var total: Accumulator
    """Sum of the weights of each element's columns."""

    @staticmethod
    @always_inline
    def none() -> Self:
        return {Accumulator(neg_inf[F32]()), Accumulator(0)}

    @always_inline
    def weigh[
        N: Int, //, t: DType
    ](mut self, mut scores: Array[Accumulator, N]) -> Accumulator:
        """Turns scores, in units of log2, into weights that t holds, so that
        what is summed is what values are weighted by.

        Returns:
            The factor of what was summed before.
        """
        var top = self.top
        comptime for j in range(N):
            top = max(top, scores[j])
        top = rows_max(top)
        # While every score is minus infinity, score - top would be NaN.
        var none = top.eq(Accumulator(neg_inf[F32]()))
        var shift = none.select(Accumulator(0), top)
        var before = exp2(self.top - shift)
        self.top = top
        self.total *= before
        comptime for j in range(N):
            scores[j] = exp2(scores[j] - shift).cast[t]().cast[F32]()
            self.total += scores[j]
        return before


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

    # In 32 bits: scalar registers are short on AMD.
    var low = Int32(first_key(start, window))
    var high = Int32(start) + min(Int32(T.rows()), Int32(rows))
    var stride = UInt32(at.row_stride())

    @always_inline
    def begin(value: Int, base: Int32, to: Shared[t]) {imm} -> Keys.Held:
        """Begins to copy a step's keys or values; none from `high` on."""
        var there = size(min(base, high - 1))
        var first = at.offset(b, layer, value, there, kv_head)
        var run = RunRows(UInt32(max(low - base, 0)), first, stride)
        var count = size(max(high - base, 0))
        return Keys.start(cache, run, 0, count, 0, D, to, thread)

    comptime V = chunk[t]()
    comptime PER_ROW = UInt32(D // V)
    comptime PIECES = UInt32(T.rows()) * PER_ROW
    var from_row = UInt32(heads * D)
    for piece in range(UInt32(thread), PIECES, UInt32(THREADS())):
        var row = piece // PER_ROW
        var c = Int(piece % PER_ROW * UInt32(V))
        var query = SIMD[t, V](0)
        if row < UInt32(rows):
            query = q.unsafe_offset(Int(row * from_row) + c).unsafe_load[
                width=V, alignment=16
            ]()
        sq.unsafe_offset(Int(row) * LD + c).unsafe_store[alignment=16](0, query)
    var base = Int32(UInt32(low) // UInt32(KEYS) * UInt32(KEYS))
    if base < high:
        Keys.finish(begin(0, base, sk), sk, thread)
    commit()

    var softmax = Rows.none()
    var sums = Array[Accumulator, COLUMNS](fill=Accumulator(0))
    while base < high:
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
        var mask = Mask(
            Int32(start) - base + Int32(own_row + c_row[0](lane)),
            Int32(c_col[0](lane)),
            UInt32(1) << 31 if window == 0 else UInt32(window),
        )
        # Only where the diagonal or the window's edge crosses the step do some
        # rows see a key that others do not.
        var edge = base + Int32(KEYS - 1) > Int32(start) or (
            window != 0 and base < high - Int32(window)
        )
        comptime for j in range(KEYS // TILE):
            scores[j] *= scale
            if edge:
                comptime for i in range(accumulator_size()):
                    if not mask.sees_own[i](j):
                        scores[j][i] = neg_inf[F32]()
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
            _clean_values[D, KEYS](sv, scratch.odd, thread)
            barrier()
            if _any(scratch.odd, lane):
                var first = at.offset(b, layer, 1, size(base), kv_head)
                for i in range(THREADS()):
                    if scratch.odd[unsafe_offset=i] != 0:
                        _add_odd[D](
                            sums,
                            cache.unsafe_offset(
                                first + Int(UInt32(i % KEYS) * stride)
                            ),
                            i % KEYS,
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
    for piece in range(UInt32(thread), PIECES, UInt32(THREADS())):
        var row = piece // PER_ROW
        var c = Int(piece % PER_ROW * UInt32(V))
        if row < UInt32(rows):
            var y = sq.unsafe_offset(Int(row) * LD + c).unsafe_load[
                width=V, alignment=16
            ]()
            if Int32(start) + Int32(row) < 0:
                y = 0
            dst.unsafe_offset(Int(row * from_row) + c).unsafe_store[
                alignment=16
            ](0, y)
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
    var tiles = unsafe_stack_allocation[
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
    def attend[C: KVCache](at: C) {imm}:
        # What lives as long as the loop in 32 bits: scalar registers are short
        # on AMD.
        var step = Int32(grid_dim.x)
        var b = Int32(0)
        var before = Int32(0)  # tiles of the sequences before b
        var tile = Int32(block_idx.x)
        while b < batch:
            var row = offsets[unsafe_offset=size(b)]
            var rows = offsets[unsafe_offset=size(b) + 1] - row
            var blocks = ceildiv(UInt32(rows), UInt32(T.rows()))
            if rows < shortest:
                blocks = 0
            var count = Int32(blocks) * heads
            if tile >= before + count:
                before += count
                b += 1
                continue
            # The last rows, which see most keys, first.
            var local = size(tile - before)
            var block = quotient(local, size(heads))
            var head = local - block * size(heads)
            var row0 = (Int32(blocks) - 1 - Int32(block)) * Int32(T.rows())
            var base = (size(row + row0) * size(heads) + head) * D
            attention_prefill_tile[D](
                dst.unsafe_offset(base),
                q.unsafe_offset(base),
                cache,
                at,
                size(b),
                size(layer),
                size(heads),
                # As head // (heads // kv_heads), by a divisor that is there.
                quotient(head * size(kv_heads), size(heads)),
                size(rows - row0),
                Int(start[unsafe_offset=size(b)] + row0),
                size(window),
                scale * LOG2E,
                Scratch(tiles, odd),
                Int(thread_idx.x),
            )
            tile += step

    comptime if paged:
        attend(PagedCache(shape, size(page_size), Int(page_stride), lookup))
    else:
        attend(ContiguousCache(shape))
