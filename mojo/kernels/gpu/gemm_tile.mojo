"""One tile of x `[M, K]` @ w `[N, K]`^T by a block, summed in registers.

A tile has `MT` rows by `NT` columns, of one product or of several with the
same x (gate and up). The ops are written for any `BlockTile`. `GemmTile` runs
everywhere: the warps stand side by side in it; two stages of shared memory are
filled in turn, with one barrier per step of K.
"""
from std.math import ceildiv
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import barrier, lane_id, thread_idx, warp_id
from kernels.gpu.block import WARPS, Global
from kernels.gpu.staging import DenseRows, RowOffsets, Staged, arrive, commit
from kernels.gpu.tile_op import (
    TILE,
    Accumulator,
    Operand,
    Shared,
    c_col,
    c_row,
    load_a,
    load_b,
    mma16,
    row_stride,
)


@fieldwise_init
struct GatheredRows(RowOffsets):
    """Rows of a dense matrix in the order of a list."""

    var rows: Global[DType.int32]
    var columns: Int
    """Elements from row to row."""

    @always_inline
    def at(self, row: Int) -> Int:
        return Int(self.rows[unsafe_offset=row]) * self.columns


@fieldwise_init
struct Product[R: RowOffsets, t: DType, COUNT: Int](
    ImplicitlyCopyable, Movable
):
    """x `[M, K]` and `COUNT` weight matrices `[N, K]` to multiply it by."""

    var x: Global[Self.t]
    var rows: Self.R
    """Where the rows of x begin."""
    var weights: StaticTuple[Global[Self.t], Self.COUNT]
    var m: Int
    var n: Int
    var k: Int


trait BlockTile:
    """Tiles of one shape, and how a block sums one."""

    comptime t: DType
    """Dtype of x and w."""
    comptime MT: Int
    """Rows of a tile."""
    comptime NT: Int
    """Columns of a tile."""
    comptime COUNT: Int
    """Weight matrices that x is multiplied by."""
    comptime WARPS_M: Int
    """Warps one below the other in a tile; the others stand beside them."""
    comptime SCRATCH: Int
    """Elements of shared memory that a tile needs."""
    comptime ALIGNMENT: Int
    """Bytes that their address is a multiple of."""

    @staticmethod
    def sums[
        R: RowOffsets, //, in_chunks: Bool
    ](
        of: Product[R, Self.t, Self.COUNT],
        row: Int,
        column: Int,
        scratch: Shared[Self.t],
    ) -> Array[
        Accumulator, Self.COUNT * Self.MT * Self.NT // WARPS // TILE**2
    ]:
        """Sums the tile at `row`, `column`; all threads of the block call it.

        Rows from M on and columns from N on are 0; nothing is read there.

        Parameters:
            R: How the rows of x lie.
            in_chunks: Whether rows of x and w can be read by 16-byte loads.

        Args:
            of: What is multiplied.
            row: First row of the tile.
            column: First column of the tile.
            scratch: `SCRATCH` elements of shared memory.

        Returns:
            The warp's elements of the tile, found by `WarpTile`.
        """
        ...


struct WarpTile[G: BlockTile]:
    """What a warp has of a tile: 16x16 products, FM by FN for each weight."""

    comptime WARPS_N = WARPS // Self.G.WARPS_M
    comptime FM = Self.G.MT // Self.G.WARPS_M // TILE
    """Products one below the other."""
    comptime FN = Self.G.NT // Self.WARPS_N // TILE
    """Products side by side."""

    @staticmethod
    @always_inline
    def index[w: Int, i: Int, j: Int]() -> Int:
        """Where `sums` holds the product of weights w, i-th from above, j-th
        from the left."""
        return (w * Self.FM + i) * Self.FN + j

    @staticmethod
    @always_inline
    def first_row() -> Int:
        """The warp's first row in the tile."""
        return Int(warp_id()) // Self.WARPS_N * (Self.FM * TILE)

    @staticmethod
    @always_inline
    def first_column() -> Int:
        """The warp's first column in the tile."""
        return Int(warp_id()) % Self.WARPS_N * (Self.FN * TILE)

    @staticmethod
    @always_inline
    def row[i: Int, e: Int](lane: Int) -> Int:
        """Row in the tile of element e of the i-th product from above."""
        return Self.first_row() + i * TILE + c_row[e](lane)

    @staticmethod
    @always_inline
    def column[j: Int, e: Int](lane: Int) -> Int:
        """Column in the tile of element e of the j-th product from the left."""
        return Self.first_column() + j * TILE + c_col[e](lane)


struct GemmTile[
    dtype: DType, rows: Int, columns: Int, count: Int, tf32: Bool = False
](BlockTile):
    """Tiles of one shape, by `mma16`.

    Parameters:
        dtype: Dtype of x and w.
        rows: Rows: 16, 32, or a multiple of 32.
        columns: Columns, a multiple of 64.
        count: Weight matrices that x is multiplied by.
        tf32: Whether float32 is multiplied as tf32 (`tile_op`).
    """

    comptime t = Self.dtype
    comptime MT = Self.rows
    comptime NT = Self.columns
    comptime COUNT = Self.count
    comptime WARPS_M = 2 if Self.MT > 32 else 1
    comptime KT = 64 // size_of[Self.t]()
    """K of a step: 64 bytes of a row, two sectors of memory."""
    comptime LD = row_stride[Self.t](Self.KT)
    comptime STAGE = (Self.MT + Self.COUNT * Self.NT) * Self.LD
    comptime SCRATCH = 2 * Self.STAGE
    comptime ALIGNMENT = 16
    comptime Warp = WarpTile[Self]
    comptime Sums = Array[
        Accumulator, Self.COUNT * Self.MT * Self.NT // WARPS // TILE**2
    ]

    @staticmethod
    @always_inline
    def sums[
        R: RowOffsets, //, in_chunks: Bool
    ](
        of: Product[R, Self.t, Self.COUNT],
        row: Int,
        column: Int,
        scratch: Shared[Self.t],
    ) -> Array[
        Accumulator, Self.COUNT * Self.MT * Self.NT // WARPS // TILE**2
    ]:
        var lane = Int(lane_id())
        var steps = ceildiv(of.k, Self.KT)
        var sums = Self.Sums(fill=Accumulator(0))
        var a_at = Self.Warp.first_row() * Self.LD
        var b_at = (Self.MT + Self.Warp.first_column()) * Self.LD
        var stages = _Stages[
            R, Self.t, Self.MT, Self.NT, Self.KT, Self.COUNT, in_chunks
        ](of, row, column, Int(thread_idx.x))
        barrier()  # The tile before this one may still be read.
        stages.start(0, scratch)
        stages.finish(scratch)
        for step in range(steps):
            var stage = scratch.unsafe_offset((step & 1) * Self.STAGE)
            var next = scratch.unsafe_offset(((step + 1) & 1) * Self.STAGE)
            var more = step + 1 < steps
            arrive()
            if more:
                stages.start((step + 1) * Self.KT, next)
            comptime for kt in range(0, Self.KT, TILE):
                Self._multiply(
                    sums,
                    stage.unsafe_offset(a_at + kt),
                    stage.unsafe_offset(b_at + kt),
                    lane,
                )
            if more:
                stages.finish(next)
        return sums^

    @staticmethod
    @always_inline
    def _multiply(
        mut sums: Self.Sums, a: Shared[Self.t], b: Shared[Self.t], lane: Int
    ):
        """Adds the warp's products over 16 k."""
        var left = Array[
            Operand[Self.t, Self.LD, False, Self.tf32], Self.Warp.FM
        ](fill=load_a[Self.LD, Self.tf32](a, lane))
        comptime for i in range(1, Self.Warp.FM):
            left[i] = load_a[Self.LD, Self.tf32](
                a.unsafe_offset(i * TILE * Self.LD), lane
            )
        comptime for w in range(Self.COUNT):
            comptime for j in range(Self.Warp.FN):
                var right = load_b[Self.LD, Self.tf32](
                    b.unsafe_offset((w * Self.NT + j * TILE) * Self.LD), lane
                )
                comptime for i in range(Self.Warp.FM):
                    mma16(
                        sums[Self.Warp.index[w, i, j]()], left[i], right, lane
                    )


struct _Stages[
    R: RowOffsets,
    t: DType,
    MT: Int,
    NT: Int,
    KT: Int,
    COUNT: Int,
    in_chunks: Bool,
]:
    """A block's copies of x and the weights of one tile to shared memory."""

    comptime X = Staged[Self.t, Self.MT, Self.KT, Self.in_chunks]
    comptime W = Staged[Self.t, Self.NT, Self.KT, Self.in_chunks]
    var of: Product[Self.R, Self.t, Self.COUNT]
    var row: Int
    var column: Int
    var thread: Int
    var x: Self.X.Held
    var w: Array[Self.W.Held, Self.COUNT]

    @always_inline
    def __init__(
        out self,
        of: Product[Self.R, Self.t, Self.COUNT],
        row: Int,
        column: Int,
        thread: Int,
    ):
        self.of = of
        self.row = row
        self.column = column
        self.thread = thread
        self.x = Self.X.Held(fill=SIMD[Self.t, Self.X.CHUNK](0))
        self.w = Array[Self.W.Held, Self.COUNT](
            fill=Self.W.Held(fill=SIMD[Self.t, Self.W.CHUNK](0))
        )

    @always_inline
    def start(mut self, k0: Int, to: Shared[Self.t]):
        """Begins to copy the step at `k0` to the stage `to`."""
        self.x = Self.X.start(
            self.of.x,
            self.of.rows,
            self.row,
            self.of.m,
            k0,
            self.of.k,
            to,
            self.thread,
        )
        comptime for i in range(Self.COUNT):
            self.w[i] = Self.W.start(
                self.of.weights[i],
                DenseRows(self.of.k),
                self.column,
                self.of.n,
                k0,
                self.of.k,
                to.unsafe_offset((Self.MT + i * Self.NT) * Self.W.STRIDE),
                self.thread,
            )
        commit()

    @always_inline
    def finish(self, to: Shared[Self.t]):
        """Ends the copy that `start` began."""
        Self.X.finish(self.x, to, self.thread)
        comptime for i in range(Self.COUNT):
            Self.W.finish(
                self.w[i],
                to.unsafe_offset((Self.MT + i * Self.NT) * Self.W.STRIDE),
                self.thread,
            )
