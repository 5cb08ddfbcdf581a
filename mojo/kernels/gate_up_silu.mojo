"""The MLP's first half: silu(x @ gate^T) * (x @ up^T)."""
from std.math import exp
from kernels.dot_tile import F32, OUT, dot_tile, row_offsets, store_first
from kernels.linear import LinearTiles, MAX_GEMV_ROWS, N_TILE
from kernels.workers import first_tile


@always_inline
def silu[S: Int](x: SIMD[F32, S]) -> SIMD[F32, S]:
    """Computes x * sigmoid(x); the limits at -inf and inf are 0 and inf."""
    return x / (1 + exp(-x))


@always_inline
def _gate_up_block[
    xt: DType, wt: DType, ot: DType, //, MR: Int, by_row: Bool
](
    dst: Pointer[mut=True, Scalar[ot], _],
    x: Pointer[Scalar[xt], _],
    gate: Pointer[Scalar[wt], _],
    up: Pointer[Scalar[wt], _],
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
            var g = dot_tile[MR, NR, by_row](x, x_rows, gate, w_rows, k)
            var u = dot_tile[MR, NR, by_row](x, x_rows, up, w_rows, k)
            var y = (silu(g) * u).cast[ot]()
            comptime for r in range(MR):
                if i + r < m1:
                    store_first(
                        dst.unsafe_offset((i + r) * n + j),
                        y.slice[NR, offset=r * NR](),
                        n1 - j,
                    )


@always_inline
def gate_up_silu_tile[
    xt: DType, wt: DType, ot: DType, //
](
    dst: Pointer[mut=True, Scalar[ot], _],
    x: Pointer[Scalar[xt], _],
    gate: Pointer[Scalar[wt], _],
    up: Pointer[Scalar[wt], _],
    tiles: LinearTiles,
    tile: Int,
):
    """Computes one tile of out = silu(x @ gate^T) * (x @ up^T).

    Parameters:
        xt: Activation dtype.
        wt: Weight dtype.
        ot: Output dtype.

    Args:
        dst: `[M, N]`.
        x: `[M, K]`.
        gate: `[N, K]`.
        up: `[N, K]`.
        tiles: The tiling of out.
        tile: Which tile.
    """
    var m0 = tile // tiles.n_tiles() * tiles.m_tile
    var m1 = min(m0 + tiles.m_tile, tiles.m)
    var n0 = tile % tiles.n_tiles() * N_TILE
    var n1 = min(n0 + N_TILE, tiles.n)
    if tiles.m == 1:
        _gate_up_block[1, True](
            dst, x, gate, up, m0, m1, n0, n1, tiles.n, tiles.k
        )
    elif tiles.m <= MAX_GEMV_ROWS:
        _gate_up_block[4, True](
            dst, x, gate, up, m0, m1, n0, n1, tiles.n, tiles.k
        )
    else:
        _gate_up_block[4, False](
            dst, x, gate, up, m0, m1, n0, n1, tiles.n, tiles.k
        )


@always_inline
def gate_up_silu_share[
    xt: DType, wt: DType, ot: DType, //
](
    dst: Pointer[mut=True, Scalar[ot], _],
    x: Pointer[Scalar[xt], _],
    gate: Pointer[Scalar[wt], _],
    up: Pointer[Scalar[wt], _],
    tiles: LinearTiles,
    worker: Int,
    workers: Int,
):
    """One worker's tiles; arguments as of `gate_up_silu_tile`."""
    for tile in range(
        first_tile(worker, workers, tiles.count()),
        first_tile(worker + 1, workers, tiles.count()),
    ):
        gate_up_silu_tile(dst, x, gate, up, tiles, tile)
