"""One tile of x `[M, K]` @ w `[N, K]`^T on Hopper: `GemmTile` by `wgmma`.

The warpgroup's four warps stand one below the other. Stages of shared memory
are filled in turn: while a step of K is multiplied, the products of the step
before may still run, and the two steps after are on their way.
"""
from std.math import ceildiv
from max.gpu import barrier, thread_idx
from max.gpu.memory import async_copy_wait_group
from kernels.gpu.block import WARPS
from kernels.gpu.gemm_tile import BlockTile, Product
from kernels.gpu.staging import DenseRows, RowOffsets, Staged, commit
from kernels.gpu.tile_op import TILE, Accumulator, Shared
from kernels.gpu.wgmma_op import (
    ROWS,
    Panel,
    begin_products,
    commit_products,
    copies_seen,
    multiply,
    settle,
    wait_products,
)

comptime KT = 32
"""K of a step: with more, fewer steps would fit and be under way."""
comptime AHEAD = 2
"""Steps whose copies are under way."""
comptime STAGES = AHEAD + 2
"""One more is multiplied, and one before may still be."""


struct WgmmaTile[dtype: DType, columns: Int, count: Int](BlockTile):
    """Tiles of 64 rows.

    Parameters:
        dtype: Dtype of x and w, bfloat16 or float16.
        columns: Columns, a multiple of 16.
        count: Weight matrices that x is multiplied by.
    """

    comptime t = Self.dtype
    comptime MT = ROWS
    comptime NT = Self.columns
    comptime COUNT = Self.count
    comptime WARPS_M = WARPS
    comptime P = Panel[Self.t, KT]
    comptime STAGE = (Self.MT + Self.COUNT * Self.NT) * KT
    comptime SCRATCH = STAGES * Self.STAGE
    comptime ALIGNMENT = Self.P.ALIGNMENT
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
        var steps = ceildiv(of.k, KT)
        var sums = Self.Sums(fill=Accumulator(0))
        barrier()  # The tile before this one may still be read.
        comptime for step in range(AHEAD):
            if step < steps:
                Self._copy[in_chunks](
                    of,
                    row,
                    column,
                    step * KT,
                    scratch.unsafe_offset(step * Self.STAGE),
                )
            commit()
        begin_products(sums)
        for step in range(steps):
            var stage = scratch.unsafe_offset(step % STAGES * Self.STAGE)
            async_copy_wait_group(Int32(AHEAD - 1))
            copies_seen()
            # All copies of this step have landed. No products but those of the
            # step before run: the stage of the one before that is free.
            barrier()
            if step + AHEAD < steps:
                Self._copy[in_chunks](
                    of,
                    row,
                    column,
                    (step + AHEAD) * KT,
                    scratch.unsafe_offset((step + AHEAD) % STAGES * Self.STAGE),
                )
            commit()
            # The rows of several weights are one matrix to the product.
            comptime for i in range(Self.P.STEPS):
                multiply(
                    sums,
                    Self.P.rows(stage, i),
                    Self.P.rows(stage.unsafe_offset(Self.MT * KT), i),
                )
            commit_products()
            wait_products[1]()
        wait_products[0]()
        settle(sums)
        return sums^

    @staticmethod
    @always_inline
    def _copy[
        R: RowOffsets, //, in_chunks: Bool
    ](
        of: Product[R, Self.t, Self.COUNT],
        row: Int,
        column: Int,
        k0: Int,
        to: Shared[Self.t],
    ):
        """Copies the step at `k0` to the stage `to`: in chunks, the copies are
        under way afterwards; else they are done."""
        comptime X = Staged[Self.t, Self.MT, KT, in_chunks, swizzled=True]
        comptime W = Staged[Self.t, Self.NT, KT, in_chunks, swizzled=True]
        var thread = Int(thread_idx.x)
        X.finish(
            X.start(of.x, of.rows, row, of.m, k0, of.k, to, thread), to, thread
        )
        comptime for i in range(Self.COUNT):
            var w_to = to.unsafe_offset((Self.MT + i * Self.NT) * KT)
            W.finish(
                W.start(
                    of.weights[i],
                    DenseRows(of.k),
                    column,
                    of.n,
                    k0,
                    of.k,
                    w_to,
                    thread,
                ),
                w_to,
                thread,
            )
