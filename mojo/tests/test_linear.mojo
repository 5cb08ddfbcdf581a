"""Linear tiles: every element written once, edges not read past."""
from std.testing import TestSuite, assert_equal
from kernels.linear import LinearTiles, linear_tile


def check(m: Int, n: Int, k: Int) raises:
    """Small integers, so float32 sums are exact."""
    var x = List[Float32](length=m * k, fill=0)
    var w = List[Float32](length=n * k, fill=0)
    for i in range(m * k):
        x[i] = Float32((i * 7) % 5 - 2)
    for i in range(n * k):
        w[i] = Float32((i * 3) % 7 - 3)
    var rows = List[Int32](length=m, fill=0)
    for i in range(m):
        rows[i] = Int32(m - 1 - i)
    var added = List[Float32](length=m * n, fill=5)
    var sum = List[Float32](length=m * n, fill=-1e9)
    var picked = List[Float32](length=m * n, fill=-1e9)
    var tiles = LinearTiles(m, n, k, 4)
    for tile in range(tiles.count()):
        linear_tile[True, False](
            sum.unsafe_ptr(),
            x.unsafe_ptr(),
            w.unsafe_ptr(),
            added.unsafe_ptr(),
            rows.unsafe_ptr(),
            tiles,
            tile,
        )
        linear_tile[False, True](
            picked.unsafe_ptr(),
            x.unsafe_ptr(),
            w.unsafe_ptr(),
            added.unsafe_ptr(),
            rows.unsafe_ptr(),
            tiles,
            tile,
        )
    for i in range(m):
        for j in range(n):
            var exact = Float32(0)
            for e in range(k):
                exact += x[i * k + e] * w[j * k + e]
            assert_equal(sum[i * n + j], exact + 5)
            assert_equal(picked[(m - 1 - i) * n + j], exact)


def test_ragged_shapes() raises:
    for m in [1, 2, 3, 4, 5, 7, 9]:
        for n in [1, 3, 15, 16, 17, 40]:
            for k in [1, 17, 64]:
                check(m, n, k)


def test_more_rows_than_one_block() raises:
    check(300, 18, 576)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
