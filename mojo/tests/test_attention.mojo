"""Prefill and decode attention against the definition, in float64."""
from std.math import exp, sqrt
from std.random import rand, seed
from std.testing import TestSuite, assert_almost_equal
from std.utils.numerics import nan
from kernels.attention_decode import (
    SPLIT,
    attention_decode_tile,
    combine_splits,
    first_key,
    partial_size,
)
from kernels.attention_prefill import (
    KEYS,
    QUERIES,
    attention_prefill_tile,
    values_size,
)
from kernels.dot_tile import F32
from kernels.kv_cache import ContiguousCache

comptime HEADS = 4
comptime KV_HEADS = 2


def exact[
    D: Int
](
    q: List[Float32],
    cache: List[Float32],
    at: ContiguousCache,
    row: Int,
    head: Int,
    position: Int,
    window: Int,
) -> List[Float64]:
    """The definition: softmax of q.k / sqrt(D) over the visible keys, times v.
    """
    var low = first_key(position, window)
    var out = List[Float64](length=D, fill=0)
    var kv = head // (HEADS // KV_HEADS)
    var total = Float64(0)
    for pass_ in range(2):
        for key in range(low, position + 1):
            var s = Float64(0)
            for i in range(D):
                s += (
                    q[(row * HEADS + head) * D + i].cast[DType.float64]()
                    * cache[at.offset(0, 0, 0, key, kv) + i].cast[
                        DType.float64
                    ]()
                )
            var p = exp(s / sqrt(Float64(D)))
            if pass_ == 0:
                total += p
                continue
            for i in range(D):
                out[i] += (
                    p
                    / total
                    * cache[at.offset(0, 0, 1, key, kv) + i].cast[
                        DType.float64
                    ]()
                )
    return out^


def check[D: Int](rows: Int, start: Int, window: Int) raises:
    seed(rows * 1000 + start)
    var capacity = start + rows + 9
    var at = ContiguousCache(1, capacity, KV_HEADS, D)
    var q = List[Float32](length=rows * HEADS * D, fill=0)
    rand(q.unsafe_ptr(), len(q), min=-2, max=2)
    var cache = List[Float32](
        length=2 * capacity * KV_HEADS * D, fill=nan[F32]()
    )
    for value in range(2):
        rand(
            cache.unsafe_ptr().unsafe_offset(at.offset(0, 0, value, 0, 0)),
            (start + rows) * KV_HEADS * D,
            min=-1,
            max=1,
        )
    var out = List[Float32](length=rows * HEADS * D, fill=nan[F32]())
    var scores = List[Float32](length=QUERIES * KEYS, fill=0)
    var acc = List[Float32](length=values_size(D), fill=0)
    var scale = Float32(1 / sqrt(Float64(D)))
    for head in range(HEADS):
        for r0 in range(0, rows, QUERIES):
            attention_prefill_tile[D](
                out.unsafe_ptr(),
                q.unsafe_ptr(),
                cache.unsafe_ptr(),
                at,
                0,
                0,
                head,
                HEADS,
                head // (HEADS // KV_HEADS),
                r0,
                min(r0 + QUERIES, rows),
                start,
                window,
                scale,
                scores.unsafe_ptr(),
                acc.unsafe_ptr(),
            )
    for row in range(rows):
        var position = start + row
        var low = first_key(position, window)
        var splits = (position - low // SPLIT * SPLIT) // SPLIT + 1
        var partial = List[Float32](
            length=HEADS * splits * partial_size(D), fill=nan[F32]()
        )
        var one = List[Float32](length=HEADS * D, fill=nan[F32]())
        for kv_head in range(KV_HEADS):
            for split in range(splits):
                attention_decode_tile[D](
                    partial.unsafe_ptr(),
                    q.unsafe_ptr().unsafe_offset(row * HEADS * D),
                    cache.unsafe_ptr(),
                    at,
                    0,
                    0,
                    kv_head,
                    split,
                    splits,
                    HEADS // KV_HEADS,
                    low,
                    position + 1,
                    scale,
                    scores.unsafe_ptr(),
                )
        for head in range(HEADS):
            combine_splits[D](
                one.unsafe_ptr().unsafe_offset(head * D),
                partial.unsafe_ptr().unsafe_offset(
                    head * splits * partial_size(D)
                ),
                splits,
            )
            var right = exact[D](q, cache, at, row, head, position, window)
            for i in range(D):
                assert_almost_equal(
                    out[(row * HEADS + head) * D + i].cast[DType.float64](),
                    right[i],
                    atol=2e-6,
                )
                assert_almost_equal(
                    one[head * D + i].cast[DType.float64](),
                    right[i],
                    atol=2e-6,
                )


def test_prompt_from_an_empty_cache() raises:
    for rows in [1, 2, 15, 16, 17, 63, 65, 130]:
        check[16](rows, 0, 0)


def test_prompt_behind_cached_tokens() raises:
    check[20](5, 127, 0)
    check[64](3, 128, 0)
    check[80](17, 250, 0)
    check[128](4, 60, 0)


def test_sliding_window_counts_the_token_itself() raises:
    for window in [1, 2, 16, 64, 129]:
        check[32](40, 111, window)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
