"""The inner product: right sums, and the same bits in every tile."""
from std.random import rand, seed
from std.testing import TestSuite, assert_almost_equal, assert_equal
from kernels.dot_tile import (
    BF16,
    F32,
    OUT,
    W,
    dot_tile,
    fold_lanes,
    row_offsets,
)


def fill[t: DType](n: Int) -> List[Scalar[t]]:
    var raw = List[Float32](length=n, fill=0)
    rand(raw.unsafe_ptr(), n, min=-1, max=1)
    var values = List[Scalar[t]](length=n, fill=0)
    for i in range(n):
        values[i] = raw[i].cast[t]()
    return values^


def check_tiles[xt: DType, wt: DType](k: Int) raises:
    seed(k)
    var x = fill[xt](4 * k)
    var w = fill[wt](OUT * k)
    var xp = x.unsafe_ptr()
    var wp = w.unsafe_ptr()
    for m in range(4):
        var row = dot_tile[1, OUT, True](
            xp,
            row_offsets[1](m, 3, k),
            wp,
            row_offsets[OUT](0, OUT - 1, k),
            k,
        )
        for n in range(0, OUT, 4):
            var tile = dot_tile[4, 4, False](
                xp,
                row_offsets[4](0, 3, k),
                wp,
                row_offsets[4](n, OUT - 1, k),
                k,
            )
            for j in range(4):
                assert_equal(row[n + j], tile[m * 4 + j])
                var exact = Float64(0)
                for i in range(k):
                    exact += (
                        x[m * k + i].cast[DType.float64]()
                        * w[(n + j) * k + i].cast[DType.float64]()
                    )
                assert_almost_equal(
                    row[n + j].cast[DType.float64](), exact, atol=1e-5
                )


def test_gemv_and_gemm_tiles_have_the_same_bits() raises:
    for k in [1, 2, W - 1, W, W + 1, 2 * W, 2 * W + 1, 63, 576, 1040]:
        check_tiles[F32, F32](k)
        check_tiles[BF16, BF16](k)
        check_tiles[F32, BF16](k)
        check_tiles[F32, DType.float16](k)


def test_fold_sums_each_vector_into_its_own_lane() raises:
    var v = Array[SIMD[F32, W], W](fill=0)
    for i in range(W):
        for lane in range(W):
            v[i][lane] = Float32(i * 100 + lane)
    var sums = fold_lanes(v)
    for i in range(W):
        assert_equal(sums[i], Float32(i * 100 * W + W * (W - 1) // 2))


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
