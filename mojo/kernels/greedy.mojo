"""Greedy choice of the next token."""
from std.math import iota
from std.utils.numerics import neg_inf
from kernels.dot_tile import F32, W


@always_inline
def greedy_row(logits: Pointer[Float32, _], n: Int) -> Int32:
    """Index of the largest logit.

    NaN counts as -inf; the lowest index wins a tie, and a row without any
    number above -inf gives 0.

    Args:
        logits: `[n]` float32.
        n: Row length.

    Returns:
        The index.
    """
    var best = SIMD[F32, W](neg_inf[F32]())
    var at = SIMD[DType.int32, W](Int32.MAX)
    var lane = iota[DType.int32, W]()
    var i = 0
    while i + W <= n:
        var v = logits.unsafe_load[width=W](i)
        var more = v.gt(best)
        best = more.select(v, best)
        at = more.select(lane + Int32(i), at)
        i += W
    var top = best.reduce_max()
    var index = (
        best.eq(top).select(at, SIMD[DType.int32, W](Int32.MAX)).reduce_min()
    )
    while i < n:
        if logits[unsafe_offset=i] > top:
            top = logits[unsafe_offset=i]
            index = Int32(i)
        i += 1
    return 0 if index == Int32.MAX else index
