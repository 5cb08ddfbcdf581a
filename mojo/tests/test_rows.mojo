"""Row kernels: RMSNorm, RoPE, greedy choice."""
from std.math import cos, sin, sqrt
from std.testing import TestSuite, assert_almost_equal, assert_equal
from std.utils.numerics import inf, nan, neg_inf
from kernels.dot_tile import F32
from kernels.greedy import greedy_row
from kernels.qkv_rope_append import rope_rotate
from kernels.rms_norm import rms_norm_row


def test_rms_norm_by_definition() raises:
    for n in [1, 7, 16, 33, 576]:
        var x = List[Float32](length=n, fill=0)
        var weight = List[Float32](length=n, fill=0)
        var y = List[Float32](length=n, fill=nan[F32]())
        var square = Float64(0)
        for i in range(n):
            x[i] = Float32(i % 11) - 4.5
            weight[i] = Float32(1 + i % 3)
            square += Float64(x[i] * x[i])
        rms_norm_row(
            y.unsafe_ptr(), x.unsafe_ptr(), weight.unsafe_ptr(), n, 1e-5
        )
        for i in range(n):
            var right = Float64(x[i] * weight[i]) / sqrt(
                square / Float64(n) + 1e-5
            )
            assert_almost_equal(Float64(y[i]), right, rtol=1e-6)


def test_rms_norm_does_not_overflow_in_its_range() raises:
    var x = List[Float32](length=576, fill=1e18)
    var weight = List[Float32](length=576, fill=1)
    var y = List[Float32](length=576, fill=0)
    rms_norm_row(y.unsafe_ptr(), x.unsafe_ptr(), weight.unsafe_ptr(), 576, 0)
    assert_almost_equal(y[575], 1, rtol=1e-6)


def test_rope_rotates_pairs_and_passes_the_rest() raises:
    for rotary in [2, 16, 40]:
        var d = rotary + 3
        var x = List[Float32](length=d, fill=0)
        var table = List[Float32](length=rotary, fill=0)
        var half = rotary // 2
        for i in range(d):
            x[i] = Float32(i + 1)
        for i in range(half):
            table[i] = cos(Float32(i))
            table[half + i] = sin(Float32(i))
        rope_rotate(x.unsafe_ptr(), table.unsafe_ptr(), rotary)
        for i in range(half):
            var a = Float32(i + 1)
            var b = Float32(half + i + 1)
            assert_almost_equal(x[i], a * table[i] - b * table[half + i])
            assert_almost_equal(x[half + i], b * table[i] + a * table[half + i])
        for i in range(rotary, d):
            assert_equal(x[i], Float32(i + 1))


def choose(*values: Float32) -> Int32:
    var row = List[Float32]()
    for v in values:
        row.append(v)
    return greedy_row(row.unsafe_ptr(), len(row))


def test_greedy_takes_the_lowest_of_ties_and_skips_nan() raises:
    assert_equal(choose(1, 3, 3, 2), 1)
    assert_equal(choose(nan[F32](), -5, nan[F32]()), 1)
    assert_equal(choose(nan[F32](), nan[F32]()), 0)
    assert_equal(choose(neg_inf[F32](), neg_inf[F32]()), 0)
    assert_equal(choose(1, inf[F32](), inf[F32]()), 1)
    var row = List[Float32](length=1000, fill=0)
    for at in [0, 15, 16, 17, 500, 991, 992, 999]:
        row[at] = 1
        assert_equal(greedy_row(row.unsafe_ptr(), 1000), Int32(at))
        row[at] = 0


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
