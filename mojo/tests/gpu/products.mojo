"""Hopper's asynchronous products of a warpgroup, whole and broken in one place."""
from std.memory import unsafe_stack_allocation
from std.sys import inlined_assembly
from max.gpu import AddressSpace, barrier, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.memory import fence_async_view_proxy

comptime F = MutPointer[Float32, MutAnyOrigin]


@always_inline
def settle[n: Int](mut sums: SIMD[DType.float32, n]):
    """`wgmma_op.settle`, of a vector."""
    comptime for i in range(n):
        sums[i] = inlined_assembly["", Float32, constraints="=f,0"](sums[i])


def from_shared[
    t: DType, N: Int, SWIZZLED: Bool, defect: StaticString
](
    o: F,
    a: ImmPointer[Scalar[t], ImmutAnyOrigin],
    b: ImmPointer[Scalar[t], ImmutAnyOrigin],
):
    """128 threads: out [128, N / 2] of A [64, 64] and B [N, 64], as they lie in shared memory, in four steps of 16.

    Without swizzle units of 8 rows and 16 bytes lie one after the other, down the rows first; with that of 128 bytes
    rows do, and the caller has exchanged their 16-byte units.
    """
    var sa = unsafe_stack_allocation[
        64 * 64, Scalar[t], alignment=1024, address_space=AddressSpace.SHARED
    ]()
    var sb = unsafe_stack_allocation[
        N * 64, Scalar[t], alignment=1024, address_space=AddressSpace.SHARED
    ]()
    var i = Int(thread_idx.x)
    for j in range(i, 64 * 64, 128):
        sa[unsafe_offset=j] = a[unsafe_offset=j]
    for j in range(i, N * 64, 128):
        sb[unsafe_offset=j] = b[unsafe_offset=j]
    comptime if defect != "no proxy fence":
        fence_async_view_proxy()
    comptime if defect != "no barrier":
        barrier()
    var c = SIMD[DType.float32, N // 2](0)
    comptime if defect != "no fence":
        wgmma_fence_aligned()
    comptime if defect == "descriptors differ":
        sa = sa.unsafe_offset(8 * 64 if i == 77 else 0)
    comptime for step in range(4):
        comptime if SWIZZLED:
            var da = WGMMADescriptor[t].create[
                64, 1, TensorMapSwizzle.SWIZZLE_128B
            ](sa.unsafe_offset(16 * step))
            var db = WGMMADescriptor[t].create[
                64, 1, TensorMapSwizzle.SWIZZLE_128B
            ](sb.unsafe_offset(16 * step))
            c = wgmma_async[
                64, N, 16, DType.float32, N // 2, a_type=t, b_type=t
            ](da, db, c)
        else:
            var da = WGMMADescriptor[t].create[8, 64](
                sa.unsafe_offset(2 * 64 * 8 * step)
            )
            var db = WGMMADescriptor[t].create[8, N](
                sb.unsafe_offset(2 * N * 8 * step)
            )
            c = wgmma_async[
                64, N, 16, DType.float32, N // 2, a_type=t, b_type=t
            ](da, db, c)
    wgmma_commit_group_sync()
    comptime if defect == "written before the wait":
        sa[unsafe_offset=i] = 0
    comptime if defect == "read and written before the wait":
        o[unsafe_offset=i] = sa[unsafe_offset=i].cast[DType.float32]()
        barrier()
        sa[unsafe_offset=i] = 0
    comptime if defect == "written before the wait of another group":
        var d = SIMD[DType.float32, N // 2](0)
        d = wgmma_async[64, N, 16, DType.float32, N // 2, a_type=t, b_type=t](
            WGMMADescriptor[t].create[8, 64](sa),
            WGMMADescriptor[t].create[8, N](sb),
            d,
        )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        barrier()
        sa[unsafe_offset=i] = 0
        barrier()
        o[unsafe_offset=i] = d[0]
    comptime if defect != "no wait":
        wgmma_wait_group_sync()
    comptime if defect != "not settled":
        settle[N // 2](c)
    comptime for j in range(N // 2):
        o[unsafe_offset=i * (N // 2) + j] = c[j]


def from_registers[
    t: DType
](
    o: F,
    a: ImmPointer[Scalar[t], ImmutAnyOrigin],
    b: ImmPointer[Scalar[t], ImmutAnyOrigin],
):
    """128 threads: out [128, 32] of A's eight elements of each thread and B [16, 64], along its rows, swizzled."""
    var sb = unsafe_stack_allocation[
        16 * 64, Scalar[t], alignment=1024, address_space=AddressSpace.SHARED
    ]()
    var i = Int(thread_idx.x)
    for j in range(i, 16 * 64, 128):
        sb[unsafe_offset=j] = b[unsafe_offset=j]
    fence_async_view_proxy()
    barrier()
    var c = SIMD[DType.float32, 32](0)
    wgmma_fence_aligned()
    var db = WGMMADescriptor[t].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](sb)
    c = wgmma_async[
        64, 64, 16, t, DType.float32, 8, 32, a_type=t, b_type=t, layout_b="row"
    ](a.unsafe_load[width=8](8 * i), db, c)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync()
    settle[32](c)
    comptime for j in range(32):
        o[unsafe_offset=i * 32 + j] = c[j]
