"""RMSNorm of the float32 residual stream, one block per row."""
from std.math import sqrt
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    AddressSpace,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from kernels.gpu.block import MIN_BLOCKS, THREADS, WARPS, threads_metadata
from kernels.gpu.reduce import block_sum
from kernels.gpu.staging import loads_in_chunks
from kernels.gpu.tile_op import F32, Shared


@always_inline
def rms_norm_tile[
    t: DType, //, V: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Float32, _],
    weight: Pointer[Float32, _],
    k: Int,
    eps: Float32,
    scratch: Shared[F32],
    thread: Int,
):
    """Computes out = x / sqrt(mean(x^2) + eps) * weight for one row.

    Squares are divided by k before threads are summed, so that |x| up to 1e18
    does not overflow.

    Parameters:
        t: Output dtype.
        V: Elements of a load, a divisor of k; 4 needs 16-byte aligned rows.

    Args:
        dst: `[k]`.
        x: `[k]` float32.
        weight: `[k]` float32.
        k: Row length.
        eps: The model's epsilon.
        scratch: `[WARPS]`.
        thread: Number of the thread in its block.
    """
    var squares = SIMD[F32, V](0)
    for i in range(thread * V, k, THREADS() * V):
        var v = x.unsafe_load[width=V, alignment=4 * V](i)
        squares = v.fma(v, squares)
    var share = (squares / Float32(k)).reduce_add()
    var scale = 1 / sqrt(block_sum(share, scratch) + eps)
    for i in range(thread * V, k, THREADS() * V):
        var v = x.unsafe_load[width=V, alignment=4 * V](i) * scale
        var w = weight.unsafe_load[width=V, alignment=4 * V](i)
        dst.unsafe_store[alignment=V * size_of[t]()](i, (v * w).cast[t]())


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def rms_norm[
    t: DType
](
    dst: MutPointer[Scalar[t], MutAnyOrigin],
    x: ImmPointer[Float32, ImmutAnyOrigin],
    weight: ImmPointer[Float32, ImmutAnyOrigin],
    rows: Int32,
    k: Int32,
    eps: Float32,
):
    """Normalises dst `[rows, k]` from x `[rows, k]` float32 and weight `[k]`.

    Parameters:
        t: Output dtype.

    Args:
        dst: `[rows, k]`.
        x: `[rows, k]` float32.
        weight: `[k]` float32.
        rows: Number of rows.
        k: Row length.
        eps: The model's epsilon.
    """
    var scratch = unsafe_stack_allocation[
        WARPS, Float32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var n = Int(k)
    var in_chunks = (
        loads_in_chunks(x, n)
        and loads_in_chunks(weight, n)
        and Int(dst) % 16 == 0
    )
    for row in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var to = dst.unsafe_offset(row * n)
        var source = x.unsafe_offset(row * n)
        if in_chunks:
            rms_norm_tile[4](
                to, source, weight, n, eps, scratch, Int(thread_idx.x)
            )
        else:
            rms_norm_tile[1](
                to, source, weight, n, eps, scratch, Int(thread_idx.x)
            )
        barrier()
