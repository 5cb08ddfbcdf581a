"""RMSNorm of the float32 residual stream."""
from std.math import sqrt
from kernels.dot_tile import F32, W, load_padded
from kernels.workers import first_tile


@always_inline
def mean_square(x: Pointer[Float32, _], n: Int) -> Float32:
    """Mean of x^2. Lanes are divided before they are summed, so that |x| up
    to 1e18 does not overflow."""
    var acc = SIMD[F32, W](0)
    var i = 0
    while i + W <= n:
        var v = x.unsafe_load[width=W](i)
        acc = v.fma(v, acc)
        i += W
    if i < n:
        var v = load_padded[F32, W](x.unsafe_offset(i), n - i)
        acc = v.fma(v, acc)
    return (acc / Float32(n)).reduce_add()


@always_inline
def rms_norm_row[
    ot: DType, //
](
    dst: Pointer[mut=True, Scalar[ot], _],
    x: Pointer[Float32, _],
    weight: Pointer[Float32, _],
    n: Int,
    eps: Float32,
):
    """Computes out = x / sqrt(mean(x^2) + eps) * weight for one row.

    Parameters:
        ot: Output dtype.

    Args:
        dst: `[n]`.
        x: `[n]` float32.
        weight: `[n]` float32.
        n: Row length.
        eps: The model's epsilon.
    """
    var scale = 1 / sqrt(mean_square(x, n) + eps)
    var i = 0
    while i + W <= n:
        var v = x.unsafe_load[width=W](i) * scale
        dst.unsafe_store(i, (v * weight.unsafe_load[width=W](i)).cast[ot]())
        i += W
    while i < n:
        var v = x[unsafe_offset=i] * scale
        dst[unsafe_offset=i] = (v * weight[unsafe_offset=i]).cast[ot]()
        i += 1


@always_inline
def rms_norm_share[
    ot: DType, //
](
    dst: Pointer[mut=True, Scalar[ot], _],
    x: Pointer[Float32, _],
    weight: Pointer[Float32, _],
    rows: Int,
    n: Int,
    eps: Float32,
    worker: Int,
    workers: Int,
):
    """One worker's rows of out `[rows, n]`."""
    for r in range(
        first_tile(worker, workers, rows),
        first_tile(worker + 1, workers, rows),
    ):
        rms_norm_row(
            dst.unsafe_offset(r * n), x.unsafe_offset(r * n), weight, n, eps
        )
