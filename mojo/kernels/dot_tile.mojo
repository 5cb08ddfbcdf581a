"""The inner product every matrix op is made of, on CPU registers.

One output element owns one vector accumulator over K, whatever the tile around
it, and all lanes are folded by one fixed tree. So an element has the same bits
in a GEMV, in a GEMM and in any batch.
"""
from std.math import iota
from std.sys import simd_width_of
from std.sys.info import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic, masked_load
from std.utils import StaticTuple

comptime F32 = DType.float32
comptime BF16 = DType.bfloat16
comptime W = simd_width_of[F32]()
"""Float32 lanes of a vector register."""
comptime OUT = 16
"""Outputs of a full tile: 16 accumulators and their operands fit in 32 vector
registers, and 16 lanes of AVX-512 fold into one store."""
comptime HAS_BF16_DOT = W == 16 and CompilationTarget._has_feature[
    "avx512bf16"
]()


@always_inline
def load_padded[
    t: DType, S: Int
](p: Pointer[Scalar[t], _], valid: Int) -> SIMD[t, S]:
    """Loads the first `valid` of S elements, zeros behind them."""
    return masked_load[S](
        p, iota[DType.int32, S]().lt(Int32(valid)), SIMD[t, S](0)
    )


@always_inline
def store_first[
    t: DType, S: Int
](p: Pointer[mut=True, Scalar[t], _], v: SIMD[t, S], count: Int):
    """Stores the first min(count, S) lanes."""
    if count >= S:
        p.unsafe_store(v)
    else:
        for i in range(count):
            p[unsafe_offset=i] = v[i]


@always_inline
def k_step[xt: DType, wt: DType]() -> Int:
    """Elements of K that one multiply-accumulate instruction takes."""
    comptime if xt == BF16 and wt == BF16 and HAS_BF16_DOT:
        return 2 * W
    return W


@always_inline
def multiply_add[
    xt: DType, wt: DType, S: Int
](x: SIMD[xt, S], w: SIMD[wt, S], acc: SIMD[F32, W]) -> SIMD[F32, W]:
    """Adds x * w to the accumulator, in float32 (S is `k_step`)."""
    comptime if S == 2 * W:
        # VDPBF16PS: two bf16 products a lane, accumulated in float32.
        return llvm_intrinsic["llvm.x86.avx512bf16.dpbf16ps.512", SIMD[F32, W]](
            acc, x, w
        )
    else:
        return rebind[SIMD[F32, W]](x.cast[F32]()).fma(
            rebind[SIMD[F32, W]](w.cast[F32]()), acc
        )


def _halves[L: Int, high: Bool]() -> StaticTuple[SIMDLength, W]:
    """Lanes that hold the low or high half of every L-lane segment of a, b."""
    var lanes = StaticTuple[SIMDLength, W](fill=SIMDLength(0))
    for i in range(W):
        var source = W if i >= W // 2 else 0
        var j = i % (W // 2)
        var lane = source + (j // (L // 2)) * L + j % (L // 2)
        lanes[i] = SIMDLength(lane + (L // 2 if high else 0))
    return lanes


@always_inline
def _fold[L: Int](a: SIMD[F32, W], b: SIMD[F32, W]) -> SIMD[F32, W]:
    """Halves every L-lane segment of a and b by adding its two halves."""
    comptime low = _halves[L, False]()
    comptime high = _halves[L, True]()
    return a._shuffle_list[W, low](b) + a._shuffle_list[W, high](b)


@always_inline
def fold_lanes(mut v: Array[SIMD[F32, W], W]) -> SIMD[F32, W]:
    """Sums the lanes of W vectors at once; lane i of the result is sum(v[i]).

    The tree of each sum (halves, quarters, ...) does not depend on the others.
    """
    comptime levels = 4 if W == 16 else (3 if W == 8 else 2)
    comptime assert W == 1 << levels
    comptime for s in range(levels):
        comptime for i in range(W >> (s + 1)):
            v[i] = _fold[W >> s](v[2 * i], v[2 * i + 1])
    return v[0]


@always_inline
def row_offsets[n: Int](start: Int, last: Int, stride: Int) -> Array[Int, n]:
    """Offsets of rows start .. start + n - 1; rows after `last` repeat it.

    A ragged edge computes its last row more than once rather than read past it.
    """
    var offsets = Array[Int, n](fill=0)
    comptime for i in range(n):
        offsets[i] = min(start + i, last) * stride
    return offsets^


@always_inline
def dot_tile[
    xt: DType,
    wt: DType,
    //,
    MR: Int,
    NR: Int,
    by_row: Bool,
](
    x: Pointer[Scalar[xt], _],
    x_rows: Array[Int, MR],
    w: Pointer[Scalar[wt], _],
    w_rows: Array[Int, NR],
    k: Int,
) -> SIMD[F32, MR * NR]:
    """Computes MR x NR inner products of length k.

    Parameters:
        xt: Activation dtype.
        wt: Weight dtype.
        MR: Rows of x.
        NR: Rows of w; MR * NR is a multiple of W.
        by_row: Walk the rows of w one after the other, which keeps the reads
            of a matrix in address order (decode: memory bound), instead of
            side by side, which reuses the loads of x (prefill: compute bound).

    Args:
        x: Base of the activations.
        x_rows: Element offset of each row of x.
        w: Base of the weights.
        w_rows: Element offset of each row of w.
        k: Length of the rows.

    Returns:
        Lane m * NR + n is the product of x row m and w row n.
    """
    comptime S = k_step[xt, wt]()
    comptime AT_ONCE = 1 if by_row else NR
    var acc = Array[SIMD[F32, W], MR * NR](fill=0)
    comptime for base in range(0, NR, AT_ONCE):
        # Local accumulators: an array indexed across two loops would live in
        # memory.
        var part = Array[SIMD[F32, W], MR * AT_ONCE](fill=0)
        var i = 0
        while i + S <= k:
            var wv = Array[SIMD[wt, S], AT_ONCE](fill=0)
            comptime for n in range(AT_ONCE):
                wv[n] = w.unsafe_load[width=S](w_rows[base + n] + i)
            comptime for m in range(MR):
                var xv = x.unsafe_load[width=S](x_rows[m] + i)
                comptime for n in range(AT_ONCE):
                    part[m * AT_ONCE + n] = multiply_add(
                        xv, wv[n], part[m * AT_ONCE + n]
                    )
            i += S
        if i < k:
            comptime for n in range(AT_ONCE):
                var tail = load_padded[wt, S](
                    w.unsafe_offset(w_rows[base + n] + i), k - i
                )
                comptime for m in range(MR):
                    part[m * AT_ONCE + n] = multiply_add(
                        load_padded[xt, S](
                            x.unsafe_offset(x_rows[m] + i), k - i
                        ),
                        tail,
                        part[m * AT_ONCE + n],
                    )
        comptime for m in range(MR):
            comptime for n in range(AT_ONCE):
                acc[m * NR + base + n] = part[m * AT_ONCE + n]

    var out = SIMD[F32, MR * NR](0)
    comptime for g in range(MR * NR // W):
        var group = Array[SIMD[F32, W], W](fill=0)
        comptime for j in range(W):
            group[j] = acc[g * W + j]
        out = out.insert[offset=g * W](fold_lanes(group))
    return out
