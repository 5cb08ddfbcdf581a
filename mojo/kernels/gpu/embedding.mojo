"""Token ids to rows of the embedding table."""
from std.sys import size_of
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from kernels.gpu.block import MIN_BLOCKS, THREADS, threads_metadata
from kernels.gpu.staging import chunk, loads_in_chunks
from kernels.gpu.tile_op import F32


@always_inline
def embedding_tile[
    t: DType, //, V: Int
](
    dst: Pointer[mut=True, Float32, _],
    source: Pointer[Scalar[t], _],
    k: Int,
    thread: Int,
):
    """Copies one row of k elements, float32.

    Parameters:
        t: Dtype of the table.
        V: Elements of a load, a divisor of k; above 1, rows are 16-byte
            aligned.

    Args:
        dst: `[k]`.
        source: `[k]`.
        k: Row length.
        thread: Number of the thread in its block.
    """
    for i in range(thread * V, k, THREADS() * V):
        var v = source.unsafe_load[width=V, alignment=V * size_of[t]()](i)
        dst.unsafe_store[alignment=min(16, 4 * V)](i, v.cast[F32]())


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def embedding[
    t: DType
](
    dst: MutPointer[Float32, MutAnyOrigin],
    ids: ImmPointer[Int32, ImmutAnyOrigin],
    table: ImmPointer[Scalar[t], ImmutAnyOrigin],
    tokens: Int32,
    k: Int32,
):
    """Copies dst `[tokens, k]` = table[ids], float32.

    Parameters:
        t: Dtype of the table.

    Args:
        dst: `[tokens, k]` float32.
        ids: `[tokens]` rows of the table.
        table: `[V, k]`.
        tokens: Number of tokens.
        k: Row length.
    """
    var n = Int(k)
    var in_chunks = loads_in_chunks(table, n) and loads_in_chunks(dst, n)
    for token in range(Int(block_idx.x), Int(tokens), Int(grid_dim.x)):
        var to = dst.unsafe_offset(token * n)
        var row = table.unsafe_offset(Int(ids[unsafe_offset=token]) * n)
        if in_chunks:
            embedding_tile[chunk[t]()](to, row, n, Int(thread_idx.x))
        else:
            embedding_tile[1](to, row, n, Int(thread_idx.x))
