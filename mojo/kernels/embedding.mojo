"""Token ids to rows of the embedding table."""
from kernels.dot_tile import F32, W


@always_inline
def embedding_row[
    wt: DType, //
](
    dst: Pointer[mut=True, Float32, _],
    table: Pointer[Scalar[wt], _],
    row: Int,
    n: Int,
):
    """Copies one row of table `[V, n]` to out `[n]`, float32."""
    var source = table.unsafe_offset(row * n)
    var i = 0
    while i + W <= n:
        dst.unsafe_store(i, source.unsafe_load[width=W](i).cast[F32]())
        i += W
    while i < n:
        dst[unsafe_offset=i] = source[unsafe_offset=i].cast[F32]()
        i += 1
