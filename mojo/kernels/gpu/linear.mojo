"""Rows of activations times a weight matrix `[N, K]`: GEMM, GEMV, LM head."""
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    AddressSpace,
    block_idx,
    grid_dim,
    lane_id,
    warp_id,
)
from kernels.gpu.block import (
    MIN_BLOCKS,
    WARPS,
    Global,
    divide,
    threads_metadata,
    untracked,
)
from kernels.gpu.gemm_tile import (
    BlockTile,
    GatheredRows,
    GemmTile,
    Product,
    WarpTile,
)
from kernels.gpu.gemv_rows import GemvRows
from kernels.gpu.staging import DenseRows, RowOffsets, loads_in_chunks
from kernels.gpu.tile_op import Shared, accumulator_size
from kernels.gpu.weight_format import (
    Int4Weight,
    Int8Weight,
    PlainWeight,
    WeightFormat,
)
from kernels.gpu.wgmma_tile import WgmmaTile

comptime NT = 64
"""Columns of a GEMM tile."""
comptime WGMMA_NT = 128
"""Columns of a GEMM tile of `wgmma`."""


@always_inline
def linear_gemm_tile[
    R: RowOffsets, //, G: BlockTile, residual: Bool, in_chunks: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    of: Product[R, G.t, G.COUNT],
    added: ImmPointer[Float32, ImmutAnyOrigin],
    tile: Int,
    scratch: Shared[G.t],
):
    """Computes one tile of out = x @ w^T (+ added).

    Parameters:
        R: How the rows of x lie.
        G: The tile, of one matrix of weights.
        residual: Whether `added` is added.
        in_chunks: Whether rows of x and w can be read by 16-byte loads.

    Args:
        dst: `[M, N]` float32.
        of: x and w.
        added: `[M, N]` float32, read when `residual`.
        tile: Which tile; neighbours share columns, so weights are read while
            they are in the cache.
        scratch: `G.SCRATCH` elements of shared memory.
    """
    comptime W = WarpTile[G]
    var m_tiles = ceildiv(of.m, G.MT)
    var place = divide(tile, m_tiles)
    var row = place[1] * G.MT
    var column = place[0] * G.NT
    var sums = G.sums[in_chunks](of, row, column, scratch)
    var lane = Int(lane_id())
    comptime for i in range(W.FM):
        comptime for j in range(W.FN):
            comptime for e in range(accumulator_size()):
                var r = row + W.row[i, e](lane)
                var c = column + W.column[j, e](lane)
                if r < of.m and c < of.n:
                    var v = sums[W.index[0, i, j]()][e]
                    comptime if residual:
                        v += added[unsafe_offset=r * of.n + c]
                    dst[unsafe_offset=r * of.n + c] = v


@always_inline
def _linear_by_tiles[
    G: BlockTile, residual: Bool, gather: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    w: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    added: ImmPointer[Float32, ImmutAnyOrigin],
    rows: ImmPointer[Int32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out = x @ w^T (+ added) by tiles G, arguments as of
    `linear_gemm`."""
    var scratch = unsafe_stack_allocation[
        G.SCRATCH,
        Scalar[G.t],
        alignment=G.ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var columns = Int(k)

    @always_inline
    def tiles[R: RowOffsets, //, in_chunks: Bool](x_rows: R) {imm}:
        var of = Product(
            untracked(x),
            x_rows,
            StaticTuple[Global[G.t], G.COUNT](untracked(w)),
            Int(m),
            Int(n),
            columns,
        )
        for tile in range(
            Int(block_idx.x),
            ceildiv(of.m, G.MT) * ceildiv(of.n, G.NT),
            Int(grid_dim.x),
        ):
            linear_gemm_tile[G, residual, in_chunks](
                dst, of, added, tile, scratch
            )

    @always_inline
    def all_tiles[R: RowOffsets, //](x_rows: R) {imm}:
        if loads_in_chunks(x, columns) and loads_in_chunks(w, columns):
            tiles[True](x_rows)
        else:
            tiles[False](x_rows)

    comptime if gather:
        all_tiles(GatheredRows(untracked(rows), columns))
    else:
        all_tiles(DenseRows(columns))


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def linear_gemm[
    t: DType, MT: Int, residual: Bool, gather: Bool, tf32: Bool = False
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    w: ImmPointer[Scalar[t], ImmutAnyOrigin],
    added: ImmPointer[Float32, ImmutAnyOrigin],
    rows: ImmPointer[Int32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out = x @ w^T (+ added), by any number of blocks.

    Parameters:
        t: Dtype of x and w.
        MT: Rows of a tile, 16 or 64: the larger reads less, the smaller
            computes less where M is small.
        residual: Whether `added` is added.
        gather: Whether row i of x is `rows[i]`.
        tf32: Whether float32 is multiplied as tf32, on NVIDIA's matrix units.

    Args:
        dst: `[M, N]` float32.
        x: `[M, K]`, or any number of rows of K when `gather`.
        w: `[N, K]`.
        added: `[M, N]` float32, read when `residual`.
        rows: `[M]` row numbers, read when `gather`.
        m: M, from 0.
        n: N, from 1.
        k: K, from 1.
    """
    _linear_by_tiles[GemmTile[t, MT, NT, 1, tf32], residual, gather](
        dst, x, w, added, rows, m, n, k
    )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def linear_wgmma[
    t: DType, residual: Bool, gather: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    w: ImmPointer[Scalar[t], ImmutAnyOrigin],
    added: ImmPointer[Float32, ImmutAnyOrigin],
    rows: ImmPointer[Int32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """`linear_gemm` on sm_90a, by `wgmma`.

    Parameters:
        t: Dtype of x and w, bfloat16 or float16.
        residual: Whether `added` is added.
        gather: Whether row i of x is `rows[i]`.
    """
    _linear_by_tiles[WgmmaTile[t, WGMMA_NT, 1], residual, gather](
        dst, x, w, added, rows, m, n, k
    )


@always_inline
def linear_gemv_tile[
    W: WeightFormat,
    t: DType,
    //,
    BATCH: Int,
    residual: Bool,
    gather: Bool,
    in_chunks: Bool,
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: Global[t],
    w: W,
    added: ImmPointer[Float32, ImmutAnyOrigin],
    rows: ImmPointer[Int32, ImmutAnyOrigin],
    m: Int,
    n: Int,
    k: Int,
    tile: Int,
):
    """Computes one tile of out = x @ w^T (+ added): `BATCH` rows of x times
    the rows of w that the warps of a block take.

    Parameters:
        W: Format of w.
        t: Dtype of x.
        BATCH: Rows of x of a tile.
        residual: Whether `added` is added.
        gather: Whether row i of x is `rows[i]`.
        in_chunks: Whether rows of x and w can be read by 16-byte loads.

    Args:
        dst: `[M, N]` float32.
        x: `[M, K]`, or any number of rows of K when `gather`.
        w: `[N, K]`.
        added: `[M, N]` float32, read when `residual`.
        rows: `[M]` row numbers, read when `gather`.
        m: M.
        n: N.
        k: K.
        tile: Which tile; neighbours have the same rows of x.
    """
    comptime G = GemvRows[W, t, 1, BATCH]
    var per_batch = ceildiv(n, WARPS * G.ROWS)
    var place = divide(tile, per_batch)
    var first = place[0] * BATCH
    var row = (place[1] * WARPS + Int(warp_id())) * G.ROWS
    if row >= n:
        return
    var x_at = StaticTuple[Int, BATCH]()
    comptime for b in range(BATCH):
        # Rows that are missing are the last one again, and dropped.
        var at = min(first + b, m - 1)
        comptime if gather:
            at = Int(rows[unsafe_offset=at])
        x_at[b] = at * k
    var products = G(StaticTuple[W, 1](w), x, x_at, n, k).products[in_chunks](
        row
    )
    var lane = Int(lane_id())
    var token = first + lane % BATCH
    var column = row + lane // BATCH
    if lane < G.OUTPUTS and token < m and column < n:
        var v = products[0]
        comptime if residual:
            v += added[unsafe_offset=token * n + column]
        dst[unsafe_offset=token * n + column] = v


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def linear_gemv[
    w: DType, t: DType, BATCH: Int, residual: Bool, gather: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    weight: ImmPointer[Scalar[w], ImmutAnyOrigin],
    scales: ImmPointer[Float16, ImmutAnyOrigin],
    zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    added: ImmPointer[Float32, ImmutAnyOrigin],
    rows: ImmPointer[Int32, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out = x @ w^T (+ added), by any number of blocks.

    Parameters:
        w: Format of the weights (`weight_format`): float32, bfloat16, float16,
            int8, or uint8 for int4.
        t: Dtype of x.
        BATCH: Rows of x for which the weights are read once, 1 to 8.
        residual: Whether `added` is added.
        gather: Whether row i of x is `rows[i]`.

    Args:
        dst: `[M, N]` float32.
        x: `[M, K]`, or any number of rows of K when `gather`.
        weight: `[N, K]` in the format.
        scales: `[N, ceil(K / 32)]`, read when int8 or int4.
        zeros: `[N, ceil(K / 32)]`, read when int4.
        added: `[M, N]` float32, read when `residual`.
        rows: `[M]` row numbers, read when `gather`.
        m: M, from 0.
        n: N, from 1.
        k: K, from 1.
    """

    @always_inline
    def tiles[W: WeightFormat, //, in_chunks: Bool](matrix: W) {imm}:
        for tile in range(
            Int(block_idx.x),
            ceildiv(Int(m), BATCH)
            * ceildiv(Int(n), WARPS * GemvRows[W, t, 1, BATCH].ROWS),
            Int(grid_dim.x),
        ):
            linear_gemv_tile[BATCH, residual, gather, in_chunks](
                dst,
                untracked(x),
                matrix,
                added,
                rows,
                Int(m),
                Int(n),
                Int(k),
                tile,
            )

    @always_inline
    def all_tiles[W: WeightFormat, //](matrix: W) {imm}:
        if loads_in_chunks(x, Int(k)) and matrix.in_chunks():
            tiles[True](matrix)
        else:
            tiles[False](matrix)

    comptime if w == DType.int8:
        all_tiles(Int8Weight(weight, scales, Int(k)))
    elif w == DType.uint8:
        all_tiles(Int4Weight(weight, scales, zeros, Int(k)))
    else:
        all_tiles(PlainWeight[w](untracked(weight), Int(k)))
