"""Keys and values of a step of attention over a prompt: which ones are seen,
where they lie, and what becomes of values that are not finite."""
from std.utils.numerics import isfinite
from max.gpu import WARP_SIZE
from kernels.attention_decode import first_key
from kernels.gpu.attention_rows import Mask
from kernels.gpu.block import THREADS, WARPS, size
from kernels.gpu.reduce import lanes_max
from kernels.gpu.staging import RowOffsets, chunk
from kernels.gpu.tile_op import (
    F32,
    TILE,
    Accumulator,
    Shared,
    accumulator_size,
    c_col,
    row_stride,
)
from kernels.kv_cache import KVCache


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
struct SeenKeys(TrivialRegisterPassable):
    """Keys that the rows of a tile see, in 32 bits: scalar registers are short
    on AMD."""

    var start: Int32
    """Position of the first row."""
    var window: Int32
    """Keys that a row sees, its own included, 0 for all."""
    var low: Int32
    """First key that a row sees."""
    var high: Int32
    """Keys from here on are seen by none."""
    var stride: UInt32
    """Elements from a row of the cache to the next."""

    @staticmethod
    @always_inline
    def of(start: Int, rows: Int32, window: Int, stride: Int) -> Self:
        """Those of `rows` rows from position `start` on."""
        return {
            Int32(start),
            Int32(window),
            Int32(first_key(start, window)),
            Int32(start) + rows,
            UInt32(stride),
        }

    @always_inline
    def first_step[KEYS: Int](self) -> Int32:
        """First key of the first step, a multiple of KEYS."""
        return Int32(UInt32(self.low) // UInt32(KEYS) * UInt32(KEYS))

    @always_inline
    def count(self, base: Int32) -> Int:
        """Keys from `base` on that are seen."""
        return size(max(self.high - base, 0))

    @always_inline
    def rows[
        C: KVCache, //
    ](
        self,
        at: C,
        b: Int,
        layer: Int,
        value: Int,
        base: Int32,
        kv_head: Int,
    ) -> RunRows:
        """Where rows of the cache from key `base` on lie, arguments as those of
        `KVCache.offset`."""
        var there = size(min(base, self.high - 1))
        var first = at.offset(b, layer, value, there, kv_head)
        return {UInt32(max(self.low - base, 0)), first, self.stride}

    @always_inline
    def mask(self, base: Int32, row: Int, column: Int) -> Mask:
        """What a lane sees of the step at `base`, its first element at `row`
        and `column` of the scores."""
        return {
            self.start - base + Int32(row),
            Int32(column),
            UInt32(1) << 31 if self.window == 0 else UInt32(self.window),
        }


trait TileLayout(TrivialRegisterPassable):
    """Where the rows of a tile lie in shared memory."""

    @staticmethod
    def at(row: Int, column: Int) -> Int:
        """Elements from the tile's first to the chunk of a row at a column."""
        ...


struct PaddedRows[t: DType, D: Int](TileLayout):
    """Rows of D elements, `row_stride` apart."""

    @staticmethod
    @always_inline
    def at(row: Int, column: Int) -> Int:
        return row * row_stride[Self.t](Self.D) + column


@always_inline
def clean_values[
    t: DType, //, L: TileLayout, D: Int, KEYS: Int
](values: Shared[t], odd: Shared[DType.int32], thread: Int):
    """Zeroes values that are not finite, and flags their keys.

    Where some rows see a key and others do not, a weight of 0 would still make
    NaN of them. After a barrier `add_odd` gives them to the rows that do.

    Parameters:
        t: Dtype.
        L: Layout of the values.
        D: The head_dim, a multiple of 16.
        KEYS: Keys of a step.

    Args:
        values: `[KEYS, D]`.
        odd: `[THREADS]`, written: the thread's finds in key thread % KEYS.
        thread: Number of the thread in its block.
    """
    comptime V = chunk[t]()
    comptime PER_KEY = THREADS() // KEYS
    var key = thread % KEYS
    var found = False
    for c in range(thread // KEYS * V, D, PER_KEY * V):
        var at = values.unsafe_offset(L.at(key, c))
        var v = at.unsafe_load[width=V, alignment=16]()
        var fine = isfinite(v)
        if not fine.reduce_and():
            at.unsafe_store[alignment=16](fine.select(v, SIMD[t, V](0)))
            found = True
    odd[unsafe_offset=thread] = Int32(found)


@always_inline
def any_odd(odd: Shared[DType.int32], lane: Int) -> Bool:
    """Whether `clean_values` flagged a key, for every lane."""
    var found = Int32(0)
    comptime for w in range(WARPS):
        found |= odd[unsafe_offset=w * WARP_SIZE + lane]
    return lanes_max[WARP_SIZE](Float32(found)) > 0


@always_inline
def add_odd[
    t: DType, N: Int, //, KEYS: Int
](
    mut sums: Array[Accumulator, N],
    values: Pointer[Scalar[t], _],
    stride: UInt32,
    odd: Shared[DType.int32],
    mask: Mask,
    own_column: Int,
    lane: Int,
):
    """Adds what `clean_values` took away, where rows see it.

    Parameters:
        t: Dtype.
        N: Products of the warp, 16 columns each.
        KEYS: Keys of a step.

    Args:
        sums: The products.
        values: Those of the step's first key, in the cache.
        stride: Elements from a key's values to the next one's.
        odd: The flags.
        mask: What rows see.
        own_column: The warp's first 16 columns.
        lane: Number of the thread in its warp.
    """
    for i in range(THREADS()):
        if odd[unsafe_offset=i] == 0:
            continue
        var key = i % KEYS
        var value = values.unsafe_offset(Int(UInt32(key) * stride))
        comptime for c in range(N):
            comptime for e in range(accumulator_size()):
                var d = (own_column + c) * TILE + c_col[e](lane)
                if mask.sees_key[e](key):
                    var v = value[unsafe_offset=d].cast[F32]()
                    if not isfinite(v):
                        sums[c][e] += v
