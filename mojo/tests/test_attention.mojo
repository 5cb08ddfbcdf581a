"""Prefill and decode attention against the definition, in float64."""
from std.math import exp, sqrt
from std.random import rand, seed
from std.testing import TestSuite, assert_almost_equal, assert_equal
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
from kernels.kv_cache import CacheShape, ContiguousCache, KVCache, PagedCache

comptime HEADS = 4
comptime KV_HEADS = 2
comptime LAYER = 1
comptime PAGE = 128


def exact[
    C: KVCache, //, D: Int
](
    q: List[Float32],
    cache: List[Float32],
    at: C,
    row: Int,
    head: Int,
    position: Int,
    window: Int,
) -> List[Float64]:
    """The definition: softmax(q.k / sqrt(D)) of the visible keys, times v."""
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
                    * cache[at.offset(0, LAYER, 0, key, kv) + i].cast[
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
                    * cache[at.offset(0, LAYER, 1, key, kv) + i].cast[
                        DType.float64
                    ]()
                )
    return out^


def check[D: Int](rows: Int, start: Int, window: Int) raises:
    var capacity = start + rows + 9
    var shape = CacheShape(1, 2, capacity, KV_HEADS, D)
    var size = 2 * 2 * capacity * KV_HEADS * D
    var out = check_layout[D](ContiguousCache(shape), size, rows, start, window)

    # Pages out of order and with a gap between them; the layout changes
    # nothing, not a bit.
    var pages = (capacity - 1) // PAGE + 1
    shape.capacity = pages * PAGE
    var stride = 2 * 2 * PAGE * KV_HEADS * D + 24
    var lookup = List[UInt32](length=pages, fill=0)
    for i in range(pages):
        lookup[i] = UInt32((i + 1) % pages)
    var paged = check_layout[D](
        PagedCache(shape, PAGE, stride, lookup.unsafe_ptr()),
        pages * stride,
        rows,
        start,
        window,
    )
    for i in range(len(out)):
        assert_equal(out[i], paged[i])


def check_layout[
    C: KVCache, //, D: Int
](at: C, size: Int, rows: Int, start: Int, window: Int) raises -> List[Float32]:
    """Checks both kernels against the definition; returns their output."""
    seed(rows * 1000 + start)
    var q = List[Float32](length=rows * HEADS * D, fill=0)
    rand(q.unsafe_ptr(), len(q), min=-2, max=2)
    var cache = List[Float32](length=size, fill=nan[F32]())
    var row = List[Float32](length=KV_HEADS * D, fill=0)
    for value in range(2):
        for position in range(start + rows):
            rand(row.unsafe_ptr(), len(row), min=-1, max=1)
            for i in range(len(row)):
                cache[at.offset(0, LAYER, value, position, 0) + i] = row[i]
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
                LAYER,
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
                    LAYER,
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
        out.extend(one^)
    return out^


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
