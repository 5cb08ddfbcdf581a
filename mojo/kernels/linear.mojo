"""Rows of activations times a weight matrix `[N, K]`: GEMV, GEMM, LM head."""
from std.math import ceildiv
from kernels.dot_tile import (
    F32,
    OUT,
    dot_tile,
    row_offsets,
    store_first,
)
from kernels.workers import first_tile

comptime N_TILE = 16
"""Rows of the weight matrix in a tile."""
comptime X_BYTES = 192 * 1024
"""Activations a worker keeps in its L2 while the weights stream past."""
comptime MAX_GEMV_ROWS = 4
"""Up to this many activation rows the weights are read in address order."""


@always_inline
def rows_per_tile(m: Int, row_bytes: Int) -> Int:
    """Activation rows of a tile, a multiple of 4: equal blocks of at most
    `X_BYTES`, since a short last block would stream the weights for little."""
    var most = max(4, X_BYTES // max(row_bytes, 1) // 4 * 4)
    var blocks = max(1, ceildiv(m, most))
    return max(4, ceildiv(ceildiv(m, blocks), 4) * 4)


struct LinearTiles(ImplicitlyCopyable, Movable):
    """Tiles of out `[M, N]`: blocks of x rows, each over all of w's blocks."""

    var m: Int
    var n: Int
    var k: Int
    var m_tile: Int

    def __init__(out self, m: Int, n: Int, k: Int, x_bytes: Int):
        self.m = m
        self.n = n
        self.k = k
        self.m_tile = rows_per_tile(m, k * x_bytes)

    def n_tiles(self) -> Int:
        return ceildiv(self.n, N_TILE)

    def count(self) -> Int:
        if self.m == 0:
            return 0
        return ceildiv(self.m, self.m_tile) * self.n_tiles()


@always_inline
def _linear_block[
    xt: DType,
    wt: DType,
    //,
    MR: Int,
    by_row: Bool,
    residual: Bool,
    gather: Bool,
](
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[xt], _],
    w: Pointer[Scalar[wt], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    m0: Int,
    m1: Int,
    n0: Int,
    n1: Int,
    n: Int,
    k: Int,
):
    comptime NR = OUT // MR
    for j in range(n0, n1, NR):
        var w_rows = row_offsets[NR](j, n1 - 1, k)
        for i in range(m0, m1, MR):
            var x_rows = row_offsets[MR](i, m1 - 1, k)
            comptime if gather:
                comptime for r in range(MR):
                    x_rows[r] = Int(rows[unsafe_offset=min(i + r, m1 - 1)]) * k
            var y = dot_tile[MR, NR, by_row](x, x_rows, w, w_rows, k)
            comptime for r in range(MR):
                if i + r < m1:
                    var at = (i + r) * n + j
                    var v = y.slice[NR, offset=r * NR]()
                    comptime if residual:
                        if j + NR <= n1:
                            v += added.unsafe_load[width=NR](at)
                        else:
                            for lane in range(n1 - j):
                                v[lane] += added[unsafe_offset=at + lane]
                    store_first(dst.unsafe_offset(at), v, n1 - j)


@always_inline
def linear_tile[
    xt: DType, wt: DType, //, residual: Bool, gather: Bool
](
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[xt], _],
    w: Pointer[Scalar[wt], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    tiles: LinearTiles,
    tile: Int,
):
    """Computes one tile of out = x @ w^T (+ added).

    Parameters:
        xt: Activation dtype.
        wt: Weight dtype.
        residual: Whether `added` `[M, N]` is added.
        gather: Whether row i of x is `rows[i]`.

    Args:
        dst: `[M, N]` float32.
        x: `[M, K]`.
        w: `[N, K]`.
        added: `[M, N]` float32, read when `residual`.
        rows: `[M]` row numbers, read when `gather`.
        tiles: The tiling of out.
        tile: Which tile.
    """
    var m0 = tile // tiles.n_tiles() * tiles.m_tile
    var m1 = min(m0 + tiles.m_tile, tiles.m)
    var n0 = tile % tiles.n_tiles() * N_TILE
    var n1 = min(n0 + N_TILE, tiles.n)
    if tiles.m == 1:
        _linear_block[1, True, residual, gather](
            dst, x, w, added, rows, m0, m1, n0, n1, tiles.n, tiles.k
        )
    elif tiles.m <= MAX_GEMV_ROWS:
        _linear_block[4, True, residual, gather](
            dst, x, w, added, rows, m0, m1, n0, n1, tiles.n, tiles.k
        )
    else:
        _linear_block[4, False, residual, gather](
            dst, x, w, added, rows, m0, m1, n0, n1, tiles.n, tiles.k
        )


@always_inline
def linear_share[
    xt: DType, wt: DType, //, residual: Bool, gather: Bool
](
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[xt], _],
    w: Pointer[Scalar[wt], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    tiles: LinearTiles,
    worker: Int,
    workers: Int,
):
    """One worker's tiles; arguments as of `linear_tile`."""
    for tile in range(
        first_tile(worker, workers, tiles.count()),
        first_tile(worker + 1, workers, tiles.count()),
    ):
        linear_tile[residual, gather](dst, x, w, added, rows, tiles, tile)
