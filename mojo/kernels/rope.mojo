"""RoPE of whole heads: the rotation of `qkv_rope_append`, on its own."""
from kernels.dot_tile import W
from kernels.workers import first_tile


@always_inline
def rope_rotate(
    x: Pointer[mut=True, Float32, _],
    table: Pointer[Float32, _],
    rotary_dim: Int,
):
    """Rotates pairs (i, i + rotary_dim / 2) of one head's row in place.

    Args:
        x: The row, float32.
        table: The position's cosines, then its sines, `[rotary_dim]`.
        rotary_dim: Leading elements that rotate; the rest pass through.
    """
    var half = rotary_dim // 2
    var i = 0
    while i + W <= half:
        var c = table.unsafe_load[width=W](i)
        var s = table.unsafe_load[width=W](half + i)
        var a = x.unsafe_load[width=W](i)
        var b = x.unsafe_load[width=W](half + i)
        x.unsafe_store(i, a * c - b * s)
        x.unsafe_store(half + i, b * c + a * s)
        i += W
    while i < half:
        var c = table[unsafe_offset=i]
        var s = table[unsafe_offset=half + i]
        var a = x[unsafe_offset=i]
        var b = x[unsafe_offset=half + i]
        x[unsafe_offset=i] = a * c - b * s
        x[unsafe_offset=half + i] = b * c + a * s
        i += 1


def rope_share[
    t: DType, //
](
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    table: Pointer[Float32, _],
    positions: Pointer[Int32, _],
    scratch: Pointer[mut=True, Float32, _],
    tokens: Int,
    heads: Int,
    head_dim: Int,
    rotary_dim: Int,
    worker: Int,
    workers: Int,
):
    """One worker's tokens of dst `[T, heads, head_dim]`.

    Parameters:
        t: Dtype of x and dst.

    Args:
        dst: As x.
        x: `[T, heads, head_dim]`.
        table: Cosines and sines `[positions, rotary_dim]`.
        positions: `[T]` rows of the table.
        scratch: `[workers, head_dim]` float32.
        tokens: T.
        heads: Heads of a token.
        head_dim: Elements of a head.
        rotary_dim: Leading elements that rotate.
        worker: Which worker.
        workers: How many there are.
    """
    var row = scratch.unsafe_offset(worker * head_dim)
    for token in range(
        first_tile(worker, workers, tokens),
        first_tile(worker + 1, workers, tokens),
    ):
        var angles = table.unsafe_offset(
            Int(positions[unsafe_offset=token]) * rotary_dim
        )
        for head in range(heads):
            var at = (token * heads + head) * head_dim
            for i in range(head_dim):
                row[unsafe_offset=i] = x[unsafe_offset=at + i].cast[
                    DType.float32
                ]()
            rope_rotate(row, angles, rotary_dim)
            for i in range(head_dim):
                dst[unsafe_offset=at + i] = row[unsafe_offset=i].cast[t]()
