"""Causal attention of a prompt's tokens over the KV cache, online softmax."""
from std.math import ceildiv, exp, iota
from std.utils.numerics import neg_inf
from kernels.attention_decode import add_values, first_key, rows_at_once
from kernels.dot_tile import F32, W, dot_tile, row_offsets, store_first
from kernels.kv_cache import KVCache

comptime QUERIES = 16
"""Query rows of a tile."""
comptime KEYS = 64
"""Keys of a block; divides `RUN`."""


@always_inline
def values_size(head_dim: Int) -> Int:
    """Floats of the summed values `[QUERIES, head_dim]`, rows padded to
    vectors."""
    return QUERIES * ceildiv(head_dim, W) * W


@always_inline
def _add_block[
    t: DType, //, D: Int, ROWS: Int
](
    acc: Pointer[mut=True, Float32, _],
    p: Pointer[Float32, _],
    values: Pointer[Scalar[t], _],
    stride: Int,
    low: Int,
    high: Int,
):
    """`add_values` of one block to ROWS rows of acc."""
    comptime SUMS = ROWS * ceildiv(D, W)
    var sums = Array[SIMD[F32, W], SUMS](fill=0)
    comptime for i in range(SUMS):
        sums[i] = acc.unsafe_load[width=W](i * W)
    add_values[D, ROWS](sums, p, KEYS, values, stride, low, high)
    comptime for i in range(SUMS):
        acc.unsafe_store(i * W, sums[i])


@always_inline
def attention_prefill_tile[
    t: DType, C: KVCache, //, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    at: C,
    b: Int,
    layer: Int,
    head: Int,
    heads: Int,
    kv_head: Int,
    r0: Int,
    r1: Int,
    start: Int,
    window: Int,
    scale: Float32,
    scores: Pointer[mut=True, Float32, _],
    acc: Pointer[mut=True, Float32, _],
):
    """Attends query rows r0 .. r1 - 1 of one head of one sequence.

    Row r stands at position start + r and sees the keys up to its own
    (bottom-right causal), the last `window` of them when window > 0. A row that
    sees no key (start < 0) is 0.

    Parameters:
        t: Dtype of q, of the cache and of the output.
        C: Layout of the cache.
        D: The head_dim.

    Args:
        dst: `[rows, heads, D]` of this sequence.
        q: `[rows, heads, D]` of this sequence.
        cache: The KV cache.
        at: Its layout.
        b: The sequence.
        layer: Decoder layer.
        head: Query head.
        heads: Query heads.
        kv_head: Its KV head.
        r0: First row.
        r1: One past the last row, at most r0 + QUERIES.
        start: Position of row 0.
        window: Sliding window, 0 for none.
        scale: Factor of the scores.
        scores: Scratch `[QUERIES, KEYS]` float32.
        acc: Scratch `[values_size(D)]` float32.
    """
    comptime VECTORS = ceildiv(D, W)
    comptime WIDE = VECTORS * W
    comptime ROWS = rows_at_once(D)
    var rows = r1 - r0
    for i in range(0, QUERIES * WIDE, W):
        acc.unsafe_store(i, SIMD[F32, W](0))
    var top = Array[Float32, QUERIES](fill=neg_inf[F32]())
    var total = Array[Float32, QUERIES](fill=0)
    var stride = at.row_stride()
    var q_rows = q.unsafe_offset((r0 * heads + head) * D)

    var first = first_key(start + r0, window) // KEYS * KEYS
    for base in range(first, start + r1, KEYS):
        var keys = cache.unsafe_offset(at.offset(b, layer, 0, base, kv_head))
        var values = cache.unsafe_offset(at.offset(b, layer, 1, base, kv_head))
        var count = min(KEYS, start + r1 - base)
        for j in range(0, count, 4):
            var key_rows = row_offsets[4](j, count - 1, stride)
            for i in range(0, rows, 4):
                var s = (
                    dot_tile[4, 4, False](
                        q_rows,
                        row_offsets[4](i, rows - 1, heads * D),
                        keys,
                        key_rows,
                        D,
                    )
                    * scale
                )
                comptime for r in range(4):
                    scores.unsafe_store(
                        (i + r) * KEYS + j, s.slice[4, offset=r * 4]()
                    )

        for i in range(0, rows, ROWS):
            # The keys of this block that all rows of the group see.
            var group = min(ROWS, rows - i)
            var together = group == ROWS
            for r in range(i, i + group):
                var position = start + r0 + r
                var low = max(0, first_key(position, window) - base)
                var high = min(KEYS, position + 1 - base)
                together = together and low == 0 and high >= count
                if low >= high:
                    continue
                _softmax_block[WIDE](
                    scores.unsafe_offset(r * KEYS),
                    acc.unsafe_offset(r * WIDE),
                    top[r],
                    total[r],
                    low,
                    high,
                )
            if together:
                _add_block[D, ROWS](
                    acc.unsafe_offset(i * WIDE),
                    scores.unsafe_offset(i * KEYS),
                    values,
                    stride,
                    0,
                    count,
                )
            else:
                for r in range(i, i + group):
                    var position = start + r0 + r
                    _add_block[D, 1](
                        acc.unsafe_offset(r * WIDE),
                        scores.unsafe_offset(r * KEYS),
                        values,
                        stride,
                        max(0, first_key(position, window) - base),
                        min(KEYS, position + 1 - base),
                    )

    for r in range(rows):
        var row = dst.unsafe_offset(((r0 + r) * heads + head) * D)
        var sees = start + r0 + r >= 0
        comptime for v in range(VECTORS):
            var y = acc.unsafe_load[width=W](r * WIDE + v * W) / total[r]
            if not sees:
                y = 0
            store_first(row.unsafe_offset(v * W), y.cast[t](), D - v * W)


@always_inline
def _softmax_block[
    WIDE: Int
](
    scores: Pointer[mut=True, Float32, _],
    acc: Pointer[mut=True, Float32, _],
    mut top: Float32,
    mut total: Float32,
    low: Int,
    high: Int,
):
    """Turns a row's scores low .. high - 1 into weights against the running
    maximum, and rescales what was summed before."""
    var lane = iota[DType.int32, W]()
    var highest = SIMD[F32, W](neg_inf[F32]())
    for j in range(0, KEYS, W):
        var key = lane + Int32(j)
        var seen = key.ge(Int32(low)) & key.lt(Int32(high))
        var s = seen.select(
            scores.unsafe_load[width=W](j), SIMD[F32, W](neg_inf[F32]())
        )
        scores.unsafe_store(j, s)
        highest = max(highest, s)
    var m = max(top, highest.reduce_max())
    # While every score is -inf there is nothing to rescale, and exp(s - m)
    # would be NaN.
    var finite = m > neg_inf[F32]()
    var shift = m if finite else 0
    var factor = exp(top - m) if finite else 1
    top = m
    var sum = SIMD[F32, W](0)
    for j in range(0, KEYS, W):
        var p = exp(scores.unsafe_load[width=W](j) - shift)
        scores.unsafe_store(j, p)
        sum += p
    total = total * factor + sum.reduce_add()
    for i in range(0, WIDE, W):
        acc.unsafe_store(i, acc.unsafe_load[width=W](i) * factor)
