"""Causal attention of a prompt's tokens on Hopper's asynchronous products.

As `attention_prefill`, for 16-bit dtypes on sm_90a: a block is a warpgroup and
attends 64 query rows of one head. Scores are products of swizzled shared
memory, weights stay in registers as the first operand of the products with
values, which are read where they lie, a key per row. While scores are computed
the values are under way, and while values are summed the next keys.
"""
from std.memory import unsafe_stack_allocation
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    AddressSpace,
    barrier,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.memory import async_copy_wait_group
from kernels.gpu.attention_decode import LOG2E
from kernels.gpu.attention_prefill import SHARED, TWO_BLOCKS
from kernels.gpu.attention_queries import (
    QueryTile,
    each_query_tile,
    load_queries,
    write_outputs,
)
from kernels.gpu.attention_rows import RowSoftmax
from kernels.gpu.attention_step import (
    SeenKeys,
    TileLayout,
    add_odd,
    any_odd,
    clean_values,
)
from kernels.gpu.block import quotient, size, threads_metadata
from kernels.gpu.product_rows import rows_sum
from kernels.gpu.staging import Staged, commit
from kernels.gpu.tile_op import (
    TILE,
    Accumulator,
    Shared,
    accumulator_size,
    c_col,
)
from kernels.gpu.wgmma_op import (
    CHUNK,
    ROWS,
    Fragment,
    Panel,
    Sums,
    begin_products,
    column,
    commit_products,
    copies_seen,
    fragment,
    multiply,
    row,
    settle,
    wait_products,
)
from kernels.kv_cache import (
    CacheShape,
    ContiguousCache,
    KVCache,
    PagedCache,
)


def keys_of_step(head_dim: Int) -> Int:
    """Keys of a step, a divisor of `RUN`: as many as fit in shared memory
    beside the queries, twice for their values, and in registers."""
    for keys in [64, 32]:
        if (ROWS + 2 * keys) * head_dim * 2 <= SHARED:
            return keys
    return 16


def panel_columns(head_dim: Int) -> Int:
    """Columns of a panel: the widest swizzle that head_dim is a multiple of."""
    for columns in [64, 32]:
        if head_dim % columns == 0:
            return columns
    return 16


struct Panels[t: DType, R: Int, D: Int](TileLayout):
    """A tile of R rows as panels one after another, `[R, panel_columns]` each."""

    comptime Part = Panel[Self.t, panel_columns(Self.D)]
    comptime SIZE = Self.R * panel_columns(Self.D)
    """Elements of a panel."""

    @staticmethod
    @always_inline
    def at(row: Int, column: Int) -> Int:
        comptime W = UInt32(panel_columns(Self.D))
        var part = Int(UInt32(column) // W)
        var piece = Int(UInt32(column) % W // UInt32(CHUNK))
        return part * Self.SIZE + Self.Part.at(row, piece)

    @staticmethod
    @always_inline
    def panel(tile: Shared[Self.t], step: Int) -> Shared[Self.t]:
        """The panel that holds the step-th 16 columns."""
        return tile.unsafe_offset(step // Self.Part.STEPS * Self.SIZE)


@always_inline
def arrive_for_products():
    """Waits until the copies and writes begun are in shared memory, for the
    whole block and its products."""
    async_copy_wait_group(0)
    copies_seen()
    barrier()


@always_inline
def attention_prefill_wgmma_tile[
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
    scratch: Shared[t],
    thread: Int,
):
    """Attends one tile of query rows of one head of one sequence, as
    `attention_prefill_tile`.

    Parameters:
        t: Dtype of q, of the cache and of the output, bfloat16 or float16.
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
        scratch: Shared memory, `[ROWS + 2 * keys_of_step(D), D]`, free again on
            return.
        thread: Number of the thread in its block.
    """
    comptime KEYS = keys_of_step(D)
    comptime W = panel_columns(D)
    comptime Queries = Panels[t, ROWS, D]
    comptime Step = Panels[t, KEYS, D]
    comptime Keys = Staged[t, KEYS, W, True, swizzled=True]
    var lane = Int(lane_id())
    var warp = Int(warp_id())
    var sq = scratch
    var sk = sq.unsafe_offset(ROWS * D)
    var sv = sk.unsafe_offset(KEYS * D)

    var here = min(Int32(ROWS), Int32(rows))
    var seen = SeenKeys.of(start, here, window, at.row_stride())

    @always_inline
    def begin(value: Int, base: Int32, to: Shared[t]) {imm}:
        """Begins to copy a step's keys or values, zeros where none is seen."""
        var run = seen.rows(at, b, layer, value, base, kv_head)
        var count = seen.count(base)
        comptime for part in range(D // W):
            var panel = to.unsafe_offset(part * Step.SIZE)
            _ = Keys.start(cache, run, 0, count, part * W, D, panel, thread)
        commit()

    var from_row = UInt32(heads * D)
    load_queries[Queries, ROWS, D](q, sq, here, from_row, thread)
    var base = seen.first_step[KEYS]()
    if base < seen.high:
        begin(0, base, sk)

    var softmax = RowSoftmax.none()
    var sums = Sums[D](fill=Accumulator(0))
    while base < seen.high:
        arrive_for_products()
        begin(1, base, sv)
        var scores = Sums[KEYS](fill=Accumulator(0))
        begin_products(scores)
        comptime for k in range(D // TILE):
            comptime Part = Queries.Part
            comptime STEP = k % Part.STEPS
            multiply(
                scores,
                Part.rows(Queries.panel(sq, k), STEP),
                Part.rows(Step.panel(sk, k), STEP),
            )
        commit_products()
        wait_products[0]()
        settle(scores)

        var mask = seen.mask(base, row[0](warp, lane), column[0, 0](lane))
        # Only where the diagonal or the window's edge crosses the step do some
        # rows see a key that others do not.
        var edge = base + Int32(KEYS - 1) > seen.start or (
            seen.window != 0 and base < seen.high - seen.window
        )
        comptime for j in range(KEYS // TILE):
            scores[j] *= scale
        if edge:
            mask.hide(scores)
        var before = softmax.weigh[t](scores)
        comptime for c in range(D // TILE):
            sums[c] *= before
        var weights = Array[Fragment[t], KEYS // TILE](fill=0)
        comptime for j in range(KEYS // TILE):
            weights[j] = fragment[t](scores[j])

        arrive_for_products()
        if edge:
            # The keys' place is free until the next ones are under way.
            var odd = sk.unsafe_bitcast[Int32]()
            clean_values[Step, D, KEYS](sv, odd, thread)
            copies_seen()
            barrier()
            if any_odd(odd, lane):
                var first = at.offset(b, layer, 1, size(base), kv_head)
                add_odd[KEYS](
                    sums,
                    cache.unsafe_offset(first),
                    seen.stride,
                    odd,
                    mask,
                    0,
                    lane,
                )
            barrier()
        base += Int32(KEYS)
        begin(0, base, sk)
        comptime for j in range(KEYS // TILE):
            settle(weights[j])
        begin_products(sums)
        comptime for j in range(KEYS // TILE):
            multiply(sums, weights[j], Step.Part.columns[KEYS](sv, j))
        commit_products()
        wait_products[0]()
        comptime for j in range(KEYS // TILE):
            settle(weights[j])
        settle(sums)

    # Through the queries' place, so that rows are written in whole chunks.
    var total = rows_sum(softmax.total)
    async_copy_wait_group(0)
    barrier()
    comptime for c in range(D // TILE):
        comptime for e in range(0, accumulator_size(), 2):
            var y = SIMD[t, 2](
                (sums[c][e] / total[e]).cast[t](),
                (sums[c][e + 1] / total[e + 1]).cast[t](),
            )
            var chunk = Queries.at(row[e](warp, lane), column[c, e](0))
            var own = chunk + c_col[0](lane)
            sq.unsafe_offset(own).unsafe_store[alignment=4](0, y)
    barrier()
    write_outputs[Queries, ROWS, D](dst, sq, here, from_row, seen.start, thread)
    barrier()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=TWO_BLOCKS,
)
def attention_prefill_wgmma[
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
        t: Dtype of q, of the cache and of the output, bfloat16 or float16.
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
    comptime assert t.is_half_float() and D % TILE == 0 and D <= 256
    var memory = unsafe_stack_allocation[
        (ROWS + 2 * keys_of_step(D)) * D,
        Scalar[t],
        alignment=Panels[t, ROWS, D].Part.ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var shape = CacheShape(
        size(batch), size(layers), size(capacity), size(kv_heads), D
    )

    @always_inline
    def attend_all[C: KVCache](at: C) {imm}:
        @always_inline
        def attend(tile: QueryTile) {imm}:
            var base = (size(tile.first) * size(heads) + tile.head) * D
            attention_prefill_wgmma_tile[D](
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
                memory,
                Int(thread_idx.x),
            )

        each_query_tile[ROWS](offsets, batch, heads, shortest, attend)

    comptime if paged:
        attend_all(PagedCache(shape, size(page_size), Int(page_stride), lookup))
    else:
        attend_all(ContiguousCache(shape))
