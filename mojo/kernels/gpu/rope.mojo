"""RoPE of whole heads: the rotation of `rope_append`, on its own."""
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from kernels.gpu.block import MIN_BLOCKS, THREADS, threads_metadata
from kernels.gpu.tile_op import F32


@always_inline
def rotate(
    low: Float32, high: Float32, cos: Float32, sin: Float32
) -> Tuple[Float32, Float32]:
    """The pair (i, i + rotary_dim / 2) of a head, rotated."""
    return (low * cos - high * sin, high * cos + low * sin)


@always_inline
def rope_tile[
    t: DType, //
](
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    angles: Pointer[Float32, _],
    heads: Int,
    head_dim: Int,
    rotary_dim: Int,
    thread: Int,
):
    """Rotates all heads of one token.

    Parameters:
        t: Dtype of x and dst.

    Args:
        dst: `[heads, head_dim]`; may be x.
        x: `[heads, head_dim]`.
        angles: The position's cosines, then its sines, `[rotary_dim]`.
        heads: Heads of the token.
        head_dim: Elements of a head.
        rotary_dim: Leading elements that rotate; the rest pass through.
        thread: Number of the thread in its block.
    """
    var half = rotary_dim // 2
    var items = head_dim - half  # pairs, then single elements
    for i in range(thread, heads * items, THREADS()):
        var item = i % items
        var at = i // items * head_dim
        if item < half:
            at += item
            var turned = rotate(
                x[unsafe_offset=at].cast[F32](),
                x[unsafe_offset=at + half].cast[F32](),
                angles[unsafe_offset=item],
                angles[unsafe_offset=half + item],
            )
            dst[unsafe_offset=at] = turned[0].cast[t]()
            dst[unsafe_offset=at + half] = turned[1].cast[t]()
        else:
            at += half + item
            dst[unsafe_offset=at] = x[unsafe_offset=at]


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def rope[
    t: DType
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: ImmPointer[Scalar[t], ImmutAnyOrigin],
    table: ImmPointer[Float32, ImmutAnyOrigin],
    positions: ImmPointer[Int32, ImmutAnyOrigin],
    tokens: Int32,
    heads: Int32,
    head_dim: Int32,
    rotary_dim: Int32,
):
    """Rotates dst `[tokens, heads, head_dim]` from x.

    Parameters:
        t: Dtype of x and dst.

    Args:
        dst: `[tokens, heads, head_dim]`.
        x: `[tokens, heads, head_dim]`.
        table: Cosines and sines `[positions, rotary_dim]`.
        positions: `[tokens]` rows of the table.
        tokens: Number of tokens.
        heads: Heads of a token.
        head_dim: Elements of a head.
        rotary_dim: Leading elements that rotate, even.
    """
    var width = Int(heads) * Int(head_dim)
    for token in range(Int(block_idx.x), Int(tokens), Int(grid_dim.x)):
        rope_tile(
            dst.unsafe_offset(token * width),
            x.unsafe_offset(token * width),
            table.unsafe_offset(
                Int(positions[unsafe_offset=token]) * Int(rotary_dim)
            ),
            Int(heads),
            Int(head_dim),
            Int(rotary_dim),
            Int(thread_idx.x),
        )
