"""The projections to q, k and v as one launch, GEMM and GEMV.

out `[T, Nq + 2 Nk]` float32 holds x @ wq^T, x @ wk^T and x @ wv^T side by
side; `rope_append` takes it from there.
"""
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
from kernels.gpu.gemm_tile import BlockTile, GemmTile, Product, WarpTile
from kernels.gpu.gemv_rows import GemvRows
from kernels.gpu.staging import DenseRows, loads_in_chunks
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


@fieldwise_init
struct Projections[M: TrivialRegisterPassable](TrivialRegisterPassable):
    """wq, wk and wv, each of type M, and their rows.

    Numbers of 32 bits, since AMD has few scalar registers for what a block
    keeps from tile to tile.
    """

    var matrices: StaticTuple[Self.M, 3]
    var nq: Int32
    var nk: Int32

    @always_inline
    def width(self) -> Int:
        """Columns of out."""
        return Int(self.nq + 2 * self.nk)

    @always_inline
    def tiles[size: Int](self) -> Int:
        """Tiles of `size` columns, none of which spans two projections."""
        return Int(_tiles[size](self.nq) + 2 * _tiles[size](self.nk))

    @always_inline
    def of_tile[size: Int](self, tile: Int) -> Projection[Self.M]:
        """The projection that a tile of `size` columns is of."""
        var q_tiles = Int(_tiles[size](self.nq))
        var k_tiles = Int(_tiles[size](self.nk))
        if tile < q_tiles:
            return {self.matrices[0], Int(self.nq), 0, tile * size}
        elif tile < q_tiles + k_tiles:
            return {
                self.matrices[1],
                Int(self.nk),
                Int(self.nq),
                (tile - q_tiles) * size,
            }
        else:
            return {
                self.matrices[2],
                Int(self.nk),
                Int(self.nq + self.nk),
                (tile - q_tiles - k_tiles) * size,
            }


@always_inline
def _tiles[size: Int](rows: Int32) -> Int32:
    return (rows + Int32(size - 1)) // Int32(size)


@fieldwise_init
struct Projection[M: TrivialRegisterPassable](TrivialRegisterPassable):
    """One of wq, wk and wv, and a tile of it."""

    var matrix: Self.M
    var n: Int
    """Rows of the matrix."""
    var first: Int
    """Column of out where the projection begins."""
    var column: Int
    """First column of the tile in the projection."""


@always_inline
def qkv_gemm_tile[
    G: BlockTile, in_chunks: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: Global[G.t],
    of: Projections[Global[G.t]],
    m: Int,
    k: Int,
    tile: Int,
    scratch: Shared[G.t],
):
    """Computes one tile of one projection.

    Parameters:
        G: The tile, of one matrix of weights.
        in_chunks: Whether rows of x and weights can be read by 16-byte loads.

    Args:
        dst: `[T, Nq + 2 Nk]` float32.
        x: `[T, K]`.
        of: The weights, `[Nq, K]` and twice `[Nk, K]`.
        m: T.
        k: K.
        tile: Which tile; neighbours share columns.
        scratch: `G.SCRATCH` elements of shared memory.
    """
    comptime W = WarpTile[G]
    var m_tiles = ceildiv(m, G.MT)
    var place = divide(tile, m_tiles)
    var row = place[1] * G.MT
    var p = of.of_tile[G.NT](place[0])
    var sums = G.sums[in_chunks](
        Product(
            x,
            DenseRows(k),
            StaticTuple[Global[G.t], G.COUNT](p.matrix),
            m,
            p.n,
            k,
        ),
        row,
        p.column,
        scratch,
    )
    var lane = Int(lane_id())
    comptime for i in range(W.FM):
        comptime for j in range(W.FN):
            comptime for e in range(accumulator_size()):
                var r = row + W.row[i, e](lane)
                var c = p.column + W.column[j, e](lane)
                if r < m and c < p.n:
                    var v = sums[W.index[0, i, j]()][e]
                    dst[unsafe_offset=r * of.width() + p.first + c] = v


@always_inline
def _qkv_by_tiles[
    G: BlockTile
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    wq: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    wk: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    wv: ImmPointer[Scalar[G.t], ImmutAnyOrigin],
    m: Int32,
    nq: Int32,
    nk: Int32,
    k: Int32,
):
    """Computes the projections by tiles G of one matrix of weights, arguments
    as of `qkv_gemm`."""
    var scratch = unsafe_stack_allocation[
        G.SCRATCH,
        Scalar[G.t],
        alignment=G.ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var columns = Int(k)
    var of = Projections(
        StaticTuple[Global[G.t], 3](
            untracked(wq), untracked(wk), untracked(wv)
        ),
        nq,
        nk,
    )

    @always_inline
    def tiles[in_chunks: Bool]() {imm}:
        for tile in range(
            Int(block_idx.x),
            ceildiv(Int(m), G.MT) * of.tiles[G.NT](),
            Int(grid_dim.x),
        ):
            qkv_gemm_tile[G, in_chunks](
                dst, untracked(x), of, Int(m), columns, tile, scratch
            )

    if (
        loads_in_chunks(x, columns)
        and loads_in_chunks(wq, columns)
        and loads_in_chunks(wk, columns)
        and loads_in_chunks(wv, columns)
    ):
        tiles[True]()
    else:
        tiles[False]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def qkv_gemm[
    t: DType, MT: Int, tf32: Bool = False
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wq: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wk: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wv: ImmPointer[Scalar[t], ImmutAnyOrigin],
    m: Int32,
    nq: Int32,
    nk: Int32,
    k: Int32,
):
    """Computes the projections, by any number of blocks.

    Parameters:
        t: Dtype of x and the weights.
        MT: Rows of a tile, 16 or 64.
        tf32: Whether float32 is multiplied as tf32, on NVIDIA's matrix units.

    Args:
        dst: `[T, Nq + 2 Nk]` float32.
        x: `[T, K]`.
        wq: `[Nq, K]`.
        wk: `[Nk, K]`.
        wv: `[Nk, K]`.
        m: T, from 0.
        nq: Nq, from 1.
        nk: Nk, from 1.
        k: K, from 1.
    """
    _qkv_by_tiles[GemmTile[t, MT, NT, 1, tf32]](
        dst, x, wq, wk, wv, m, nq, nk, k
    )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=threads_metadata())
def qkv_wgmma[
    t: DType
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wq: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wk: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wv: ImmPointer[Scalar[t], ImmutAnyOrigin],
    m: Int32,
    nq: Int32,
    nk: Int32,
    k: Int32,
):
    """`qkv_gemm` on sm_90a, by `wgmma`.

    Parameters:
        t: Dtype of x and the weights, bfloat16 or float16.
    """
    _qkv_by_tiles[WgmmaTile[t, WGMMA_NT, 1]](dst, x, wq, wk, wv, m, nq, nk, k)


@always_inline
def qkv_gemv_tile[
    W: WeightFormat, t: DType, //, BATCH: Int, in_chunks: Bool
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: Global[t],
    of: Projections[W],
    m: Int,
    k: Int,
    tile: Int,
):
    """Computes one tile of one projection: `BATCH` rows of x times the rows
    of the weights that the warps of a block take.

    Parameters:
        W: Format of the weights.
        t: Dtype of x.
        BATCH: Rows of x of a tile.
        in_chunks: Whether rows of x and weights can be read by 16-byte loads.

    Args:
        dst: `[T, Nq + 2 Nk]` float32.
        x: `[T, K]`.
        of: The weights, `[Nq, K]` and twice `[Nk, K]`.
        m: T.
        k: K.
        tile: Which tile; neighbours have the same rows of x.
    """
    comptime G = GemvRows[W, t, 1, BATCH]
    comptime SIZE = WARPS * G.ROWS
    var per_batch = of.tiles[SIZE]()
    var place = divide(tile, per_batch)
    var first = place[0] * BATCH
    var p = of.of_tile[SIZE](place[1])
    var row = p.column + Int(warp_id()) * G.ROWS
    if row >= p.n:
        return
    var x_at = StaticTuple[Int, BATCH]()
    comptime for b in range(BATCH):
        # Rows that are missing are the last one again, and dropped.
        x_at[b] = min(first + b, m - 1) * k
    var products = G(StaticTuple[W, 1](p.matrix), x, x_at, p.n, k).products[
        in_chunks
    ](row)
    var lane = Int(lane_id())
    var token = first + lane % BATCH
    var column = row + lane // BATCH
    if lane < G.OUTPUTS and token < m and column < p.n:
        dst[unsafe_offset=token * of.width() + p.first + column] = products[0]


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def qkv_gemv[
    w: DType, t: DType, BATCH: Int
](
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    wq: ImmPointer[Scalar[w], ImmutAnyOrigin],
    q_scales: ImmPointer[Float16, ImmutAnyOrigin],
    q_zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    wk: ImmPointer[Scalar[w], ImmutAnyOrigin],
    k_scales: ImmPointer[Float16, ImmutAnyOrigin],
    k_zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    wv: ImmPointer[Scalar[w], ImmutAnyOrigin],
    v_scales: ImmPointer[Float16, ImmutAnyOrigin],
    v_zeros: ImmPointer[UInt8, ImmutAnyOrigin],
    m: Int32,
    nq: Int32,
    nk: Int32,
    k: Int32,
):
    """Computes the projections, by any number of blocks.

    Parameters:
        w: Format of the weights (`weight_format`): float32, bfloat16, float16,
            int8, or uint8 for int4.
        t: Dtype of x.
        BATCH: Rows of x for which the weights are read once, 1 to 8.

    Args:
        dst: `[T, Nq + 2 Nk]` float32.
        x: `[T, K]`.
        wq: `[Nq, K]` in the format.
        q_scales: `[Nq, ceil(K / 32)]`, read when int8 or int4.
        q_zeros: `[Nq, ceil(K / 32)]`, read when int4.
        wk: `[Nk, K]` in the format.
        k_scales: `[Nk, ceil(K / 32)]`, read when int8 or int4.
        k_zeros: `[Nk, ceil(K / 32)]`, read when int4.
        wv: As `wk`.
        v_scales: As `k_scales`.
        v_zeros: As `k_zeros`.
        m: T, from 0.
        nq: Nq, from 1.
        nk: Nk, from 1.
        k: K, from 1.
    """

    @always_inline
    def tiles[W: WeightFormat, //, in_chunks: Bool](q: W, key: W, v: W) {imm}:
        var of = Projections(
            StaticTuple[W, 3](q, key, v),
            nq,
            nk,
        )
        for tile in range(
            Int(block_idx.x),
            ceildiv(Int(m), BATCH)
            * of.tiles[WARPS * GemvRows[W, t, 1, BATCH].ROWS](),
            Int(grid_dim.x),
        ):
            qkv_gemv_tile[BATCH, in_chunks](
                dst, untracked(x), of, Int(m), Int(k), tile
            )

    @always_inline
    def all_tiles[W: WeightFormat, //](q: W, key: W, v: W) {imm}:
        if (
            loads_in_chunks(x, Int(k))
            and q.in_chunks()
            and key.in_chunks()
            and v.in_chunks()
        ):
            tiles[True](q, key, v)
        else:
            tiles[False](q, key, v)

    comptime if w == DType.int8:
        all_tiles(
            Int8Weight(wq, q_scales, Int(k)),
            Int8Weight(wk, k_scales, Int(k)),
            Int8Weight(wv, v_scales, Int(k)),
        )
    elif w == DType.uint8:
        all_tiles(
            Int4Weight(wq, q_scales, q_zeros, Int(k)),
            Int4Weight(wk, k_scales, k_zeros, Int(k)),
            Int4Weight(wv, v_scales, v_zeros, Int(k)),
        )
    else:
        all_tiles(
            PlainWeight[w](untracked(wq), Int(k)),
            PlainWeight[w](untracked(wk), Int(k)),
            PlainWeight[w](untracked(wv), Int(k)),
        )
