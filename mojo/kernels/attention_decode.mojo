"""Attention of one new token per sequence over the KV cache, split over keys.

Every split of `SPLIT` keys, aligned to the cache's start, leaves its own
maximum, sum and weighted values; `combine_splits` merges them in key order. So
the result depends neither on the number of workers nor on the batch.
"""
from std.math import ceildiv, exp, iota
from std.utils.numerics import neg_inf
from kernels.dot_tile import F32, OUT, W, dot_tile, load_padded, row_offsets
from kernels.kv_cache import KVCache

comptime SPLIT = 64
"""Keys of a split, a divisor of `RUN`: short ones share out evenly."""


@always_inline
def partial_size(head_dim: Int) -> Int:
    """Floats a split leaves per head: values, maximum, sum."""
    return head_dim + 2


@always_inline
def first_key(position: Int, window: Int) -> Int:
    """First key a token at `position` sees; window 0 means all."""
    if window == 0:
        return 0
    return max(0, position + 1 - window)


@always_inline
def load_row[
    t: DType, //, D: Int, vec: Int
](p: Pointer[Scalar[t], _]) -> SIMD[F32, W]:
    """Vector `vec` of a row of D elements as float32, zeros behind its end."""
    comptime if vec * W + W <= D:
        return p.unsafe_load[width=W](vec * W).cast[F32]()
    else:
        return load_padded[t, W](p.unsafe_offset(vec * W), D - vec * W).cast[
            F32
        ]()


@always_inline
def rows_at_once(head_dim: Int) -> Int:
    """Rows of summed values whose accumulators fit in registers."""
    return max(1, min(4, OUT // ceildiv(head_dim, W)))


@always_inline
def add_values[
    t: DType, //, D: Int, ROWS: Int
](
    mut sums: Array[SIMD[F32, W], ROWS * ceildiv(D, W)],
    p: Pointer[Float32, _],
    p_stride: Int,
    values: Pointer[Scalar[t], _],
    stride: Int,
    low: Int,
    high: Int,
):
    """Adds p * value over keys low .. high - 1 to ROWS rows of sums.

    All rows see the same keys: a value outside is never read, so nothing a mask
    hides (NaN included) can leak.
    """
    comptime VECTORS = ceildiv(D, W)
    for j in range(low, high):
        var row = values.unsafe_offset(j * stride)
        comptime for v in range(VECTORS):
            var value = load_row[D, v](row)
            comptime for r in range(ROWS):
                sums[r * VECTORS + v] = value.fma(
                    SIMD[F32, W](p[unsafe_offset=r * p_stride + j]),
                    sums[r * VECTORS + v],
                )


@always_inline
def score_keys[
    t: DType, //, D: Int
](
    scores: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    keys: Pointer[Scalar[t], _],
    stride: Int,
    count: Int,
    scale: Float32,
) -> Float32:
    """Writes q . key * scale for `count` keys, -inf up to the next multiple of
    OUT; returns the maximum."""
    var top = neg_inf[F32]()
    for j in range(0, count, OUT):
        var s = (
            dot_tile[1, OUT, True](
                q,
                row_offsets[1](0, 0, 0),
                keys,
                row_offsets[OUT](j, count - 1, stride),
                D,
            )
            * scale
        )
        if j + OUT > count:
            var inside = iota[DType.int32, OUT]().lt(Int32(count - j))
            s = inside.select(s, SIMD[F32, OUT](neg_inf[F32]()))
        scores.unsafe_store(j, s)
        top = max(top, s.reduce_max())
    return top


@always_inline
def attention_decode_tile[
    t: DType, C: KVCache, //, D: Int
](
    partial: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    at: C,
    b: Int,
    layer: Int,
    kv_head: Int,
    split: Int,
    splits: Int,
    group: Int,
    low: Int,
    high: Int,
    scale: Float32,
    scratch: Pointer[mut=True, Float32, _],
):
    """Attends the query heads of one KV head to one split of keys.

    Parameters:
        t: Dtype of q and of the cache.
        C: Layout of the cache.
        D: The head_dim.

    Args:
        partial: `[heads, splits, D + 2]` of this sequence.
        q: `[heads, D]` of this sequence.
        cache: The KV cache.
        at: Its layout.
        b: The sequence.
        layer: Decoder layer.
        kv_head: The KV head.
        split: Which split, counted from the one that holds key `low`.
        splits: Number of splits.
        group: Query heads per KV head.
        low: First visible key.
        high: One past the last visible key.
        scale: Factor of the scores.
        scratch: `[rows_at_once(D), SPLIT]` float32.
    """
    comptime VECTORS = ceildiv(D, W)
    comptime ROWS = rows_at_once(D)
    var base = (low // SPLIT + split) * SPLIT
    var k0 = max(low, base)
    var count = min(high, base + SPLIT) - k0
    var stride = at.row_stride()
    var keys = cache.unsafe_offset(at.offset(b, layer, 0, k0, kv_head))
    var values = cache.unsafe_offset(at.offset(b, layer, 1, k0, kv_head))
    var last = (kv_head + 1) * group
    for h0 in range(kv_head * group, last, ROWS):
        var rows = min(ROWS, last - h0)
        for h in range(h0, h0 + rows):
            var row = scratch.unsafe_offset((h - h0) * SPLIT)
            var top = score_keys[D](
                row, q.unsafe_offset(h * D), keys, stride, count, scale
            )
            # While every score is -inf, exp(s - top) would be NaN.
            var shift = 0 if top == neg_inf[F32]() else top
            var sum = SIMD[F32, W](0)
            for i in range(0, count, W):
                var p = exp(row.unsafe_load[width=W](i) - shift)
                row.unsafe_store(i, p)
                sum += p
            var to = partial.unsafe_offset(
                (h * splits + split) * partial_size(D)
            )
            to[unsafe_offset=D] = top
            to[unsafe_offset=D + 1] = sum.reduce_add()
        comptime for n in range(1, ROWS + 1):
            if rows == n:
                var sums = Array[SIMD[F32, W], n * VECTORS](fill=0)
                add_values[D, n](sums, scratch, SPLIT, values, stride, 0, count)
                comptime for r in range(n):
                    var to = partial.unsafe_offset(
                        ((h0 + r) * splits + split) * partial_size(D)
                    )
                    comptime for v in range(VECTORS):
                        comptime if v * W + W <= D:
                            to.unsafe_store(v * W, sums[r * VECTORS + v])
                        else:
                            for i in range(D - v * W):
                                to[unsafe_offset=v * W + i] = sums[
                                    r * VECTORS + v
                                ][i]


@always_inline
def combine_splits[
    t: DType, //, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    partial: Pointer[Float32, _],
    splits: Int,
):
    """Merges one head's splits in key order; no visible key gives 0.

    Parameters:
        t: Dtype of the output.
        D: The head_dim.

    Args:
        dst: `[D]`.
        partial: `[splits, D + 2]`.
        splits: Number of splits.
    """
    comptime N = partial_size(D)
    var top = neg_inf[F32]()
    for s in range(splits):
        var m = partial[unsafe_offset=s * N + D]
        top = max(top, m)
    var total = Float32(0)
    var acc = Array[Float32, D](fill=0)
    for s in range(splits):
        var part = partial.unsafe_offset(s * N)
        var m = part[unsafe_offset=D]
        if m == neg_inf[F32]():
            continue
        var weight = exp(m - top)
        total += part[unsafe_offset=D + 1] * weight
        for i in range(D):
            acc[i] += part[unsafe_offset=i] * weight
    for i in range(D):
        var y = acc[i] / total if splits > 0 else 0
        dst[unsafe_offset=i] = y.cast[t]()
