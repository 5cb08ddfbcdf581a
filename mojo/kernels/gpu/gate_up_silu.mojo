"""The MLP's first half: silu(x @ gate^T) * (x @ up^T), GEMM and GEMV."""
from std.math import ceildiv, exp
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
from kernels.gpu.gemm_tile import BlockTile, GemmTile, Product, WarpTile
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
"""Columns of a GEMM tile, of gate and of up, `wgmma` or not."""


@always_inline
def silu(x: Float32) -> Float32:
    """Computes x * sigmoid(x); for x from -inf to inf it is 0 to inf."""
    return x / (1 + exp(-x))


@always_inline
def gate_up_silu_gemm_tile[
    R: RowOffsets, //, G: BlockTile, in_chunks: Bool
](
    dst: MutPointer[Scalar[G.t], MutAnyOrigin],
    of: Product[R, G.t, G.COUNT],
    tile: Int,
    scratch: Shared[G.t],
):
    """Computes one tile of out = silu(x @ gate^T) * (x @ up^T).

    Parameters:
        R: How the rows of x lie.
        G: The tile, of two matrices of weights.
        in_chunks: Whether rows of x, gate and up can be read by 16-byte loads.

    Args:
        dst: `[M, N]`.
        of: x, gate and up.
        tile: Which tile; neighbours share columns.
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
                    var gate = sums[W.index[0, i, j]()][e]
                    var up = sums[W.index[1, i, j]()][e]
                    dst[unsafe_offset=r * of.n + c] = (silu(gate) * up).cast[
                        G.t
                    ]()


@always_inline
def _gate_up_silu_by_tiles[
    G: BlockTile
](
    dst: MutPointer[Scalar[G.t], MutAnyOrigin],
    x: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    gate: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    up: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out by tiles G of two matrices of weights, arguments as of
    `gate_up_silu_gemm`."""
    var scratch = unsafe_stack_allocation[
        G.SCRATCH,
        Scalar[G.t],
        alignment=G.ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var columns = Int(k)
    var of = Product(
        untracked(x),
        DenseRows(columns),
        StaticTuple[Global[G.t], G.COUNT](untracked(gate), untracked(up)),
        Int(m),
        Int(n),
        columns,
    )

    @always_inline
    def tiles[in_chunks: Bool]() {imm}:
        for tile in range(
            Int(block_idx.x),
            ceildiv(of.m, G.MT) * ceildiv(of.n, G.NT),
            Int(grid_dim.x),
        ):
            gate_up_silu_gemm_tile[G, in_chunks](dst, of, tile, scratch)

    if (
        loads_in_chunks(x, columns)
        and loads_in_chunks(gate, columns)
        and loads_in_chunks(up, columns)
    ):
        tiles[True]()
    else:
        tiles[False]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def gate_up_silu_gemm[
    t: DType, MT: Int, tf32: Bool = False
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    gate: ImmPointer[Scalar[t], ImmutAnyOrigin],
    up: ImmPointer[Scalar[t], ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out = silu(x @ gate^T) * (x @ up^T), by any number of blocks.

    Parameters:
        t: Dtype of all arrays.
        MT: Rows of a tile, 16 or 64.
        tf32: Whether float32 is multiplied as tf32, on NVIDIA's matrix units.

    Args:
        dst: `[M, N]`.
        x: `[M, K]`.
        gate: `[N, K]`.
        up: `[N, K]`.
        m: M, from 0.
        n: N, from 1.
        k: K, from 1.
    """
    _gate_up_silu_by_tiles[GemmTile[t, MT, NT, 2, tf32]](
        dst, x, gate, up, m, n, k
    )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def gate_up_silu_wgmma[
    t: DType
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    gate: ImmPointer[Scalar[t], ImmutAnyOrigin],
    up: ImmPointer[Scalar[t], ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """`gate_up_silu_gemm` on sm_90a, by `wgmma`.

    Parameters:
        t: Dtype of all arrays, bfloat16 or float16.
    """
    _gate_up_silu_by_tiles[WgmmaTile[t, NT, 2]](dst, x, gate, up, m, n, k)


@always_inline
def gate_up_silu_gemv_tile[
    W: WeightFormat, t: DType, //, BATCH: Int, in_chunks: Bool
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: Global[t],
    weights: StaticTuple[W, 2],
    m: Int,
    n: Int,
    k: Int,
    tile: Int,
):
    """Computes one tile of out = silu(x @ gate^T) * (x @ up^T): `BATCH` rows
    of x times the rows of gate and up that the warps of a block take.

    Parameters:
        W: Format of gate and up.
        t: Dtype of x and out.
        BATCH: Rows of x of a tile.
        in_chunks: Whether rows of x and weights can be read by 16-byte loads.

    Args:
        dst: `[M, N]`.
        x: `[M, K]`.
        weights: gate and up, `[N, K]`.
        m: M.
        n: N.
        k: K.
        tile: Which tile; neighbours have the same rows of x.
    """
    comptime G = GemvRows[W, t, 2, BATCH]
    var per_batch = ceildiv(n, WARPS * G.ROWS)
    var place = divide(tile, per_batch)
    var first = place[0] * BATCH
    var row = (place[1] * WARPS + Int(warp_id())) * G.ROWS
    if row >= n:
        return
    var x_at = StaticTuple[Int, BATCH]()
    comptime for b in range(BATCH):
        # Rows that are missing are the last one again, and dropped.
        x_at[b] = min(first + b, m - 1) * k
    var products = G(weights, x, x_at, n, k).products[in_chunks](row)
    var lane = Int(lane_id())
    var token = first + lane % BATCH
    var column = row + lane // BATCH
    if lane < G.OUTPUTS and token < m and column < n:
        var y = silu(products[0]) * products[1]
        dst[unsafe_offset=token * n + column] = y.cast[t]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def gate_up_silu_gemv[
    w: DType, t: DType, BATCH: Int
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    gate: ImmPointer[Scalar[w], ImmutAnyOrigin],
    gate_scales: ImmPointer[Float16, ImmutAnyOrigin],
    gate_zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    up: ImmPointer[Scalar[w], ImmutAnyOrigin],
    up_scales: ImmPointer[Float16, ImmutAnyOrigin],
    up_zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Computes out = silu(x @ gate^T) * (x @ up^T), by any number of blocks.

    Parameters:
        w: Format of the weights (`weight_format`): float32, bfloat16, float16,
            int8, or uint8 for int4.
        t: Dtype of x and out.
        BATCH: Rows of x for which the weights are read once, 1 to 8.

    Args:
        dst: `[M, N]`.
        x: `[M, K]`.
        gate: `[N, K]` in the format.
        gate_scales: `[N, ceil(K / 32)]`, read when int8 or int4.
        gate_zeros: `[N, ceil(K / 32)]`, read when int4.
        up: `[N, K]` in the format.
        up_scales: As `gate_scales`.
        up_zeros: As `gate_zeros`.
        m: M, from 0.
        n: N, from 1.
        k: K, from 1.
    """

    @always_inline
    def tiles[W: WeightFormat, //, in_chunks: Bool](g: W, u: W) {imm}:
        for tile in range(
            Int(block_idx.x),
            ceildiv(Int(m), BATCH)
            * ceildiv(Int(n), WARPS * GemvRows[W, t, 2, BATCH].ROWS),
            Int(grid_dim.x),
        ):
            gate_up_silu_gemv_tile[BATCH, in_chunks](
                dst,
                untracked(x),
                StaticTuple[W, 2](g, u),
                Int(m),
                Int(n),
                Int(k),
                tile,
            )

    @always_inline
    def all_tiles[W: WeightFormat, //](g: W, u: W) {imm}:
        if loads_in_chunks(x, Int(k)) and g.in_chunks() and u.in_chunks():
            tiles[True](g, u)
        else:
            tiles[False](g, u)

    comptime if w == DType.int8:
        all_tiles(
            Int8Weight(gate, gate_scales, Int(k)),
            Int8Weight(up, up_scales, Int(k)),
        )
    elif w == DType.uint8:
        all_tiles(
            Int4Weight(gate, gate_scales, gate_zeros, Int(k)),
            Int4Weight(up, up_scales, up_zeros, Int(k)),
        )
    else:
        all_tiles(
            PlainWeight[w](untracked(gate), Int(k)),
            PlainWeight[w](untracked(up), Int(k)),
        )
