"""One kernel per family of intrinsics: each lane writes down what it was given or what it computed."""
from std.atomic import Atomic, Ordering, fence
from std.math import cos, erf, exp, exp2, log, log2, rsqrt, sin, sqrt, tanh
from std.memory import unsafe_stack_allocation
from std.sys.info import _is_amd_rdna, is_nvidia_gpu
from std.sys.intrinsics import llvm_intrinsic
from max.gpu import (
    AddressSpace,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.intrinsics import AMDBufferResource, readfirstlane
from max.gpu.memory import (
    async_copy,
    async_copy_commit_group,
    async_copy_wait_all,
    async_copy_wait_group,
    external_memory,
)
from max.gpu.primitives import warp

comptime F = MutPointer[Float32, MutAnyOrigin]
comptime G = ImmPointer[Float32, ImmutAnyOrigin]
comptime I = MutPointer[Int32, MutAnyOrigin]
comptime U = MutPointer[UInt32, MutAnyOrigin]


def ids(o: I):
    """Grid of three dimensions: [blocks, threads, 12] numbers."""
    var t = Int(thread_idx.x)
    var b = Int(block_idx.x) + Int(grid_dim.x) * (
        Int(block_idx.y) + Int(grid_dim.y) * Int(block_idx.z)
    )
    var p = o.unsafe_offset((b * Int(block_dim.x) + t) * 12)
    p[unsafe_offset=0] = Int32(thread_idx.x)
    p[unsafe_offset=1] = Int32(thread_idx.y)
    p[unsafe_offset=2] = Int32(thread_idx.z)
    p[unsafe_offset=3] = Int32(block_idx.x)
    p[unsafe_offset=4] = Int32(block_idx.y)
    p[unsafe_offset=5] = Int32(block_idx.z)
    p[unsafe_offset=6] = Int32(block_dim.x)
    p[unsafe_offset=7] = Int32(grid_dim.x)
    p[unsafe_offset=8] = Int32(grid_dim.y)
    p[unsafe_offset=9] = Int32(grid_dim.z)
    p[unsafe_offset=10] = Int32(lane_id())
    p[unsafe_offset=11] = Int32(warp_id())


def shuffles[t: DType](o: MutPointer[Scalar[t], MutAnyOrigin], n: Int32):
    """The n values of o, [6, n] results behind them."""
    var i = Int(thread_idx.x)
    var N = Int(n)
    var v = o[unsafe_offset=i]
    o[unsafe_offset=N + i] = warp.shuffle_xor(v, 5)
    o[unsafe_offset=2 * N + i] = warp.shuffle_down(v, 3)
    o[unsafe_offset=3 * N + i] = warp.shuffle_up(v, 2)
    o[unsafe_offset=4 * N + i] = warp.shuffle_idx(v, UInt32(7))
    o[unsafe_offset=5 * N + i] = warp.shuffle_idx(v, UInt32(lane_id() ^ 1))
    o[unsafe_offset=6 * N + i] = warp.broadcast(v)


def reductions[t: DType](o: MutPointer[Scalar[t], MutAnyOrigin], n: Int32):
    """The n values of o, [10, n] results behind them."""
    var i = Int(thread_idx.x)
    var N = Int(n)
    var v = o[unsafe_offset=i]
    o[unsafe_offset=N + i] = warp.sum(v)
    o[unsafe_offset=2 * N + i] = warp.max(v)
    o[unsafe_offset=3 * N + i] = warp.min(v)
    o[unsafe_offset=4 * N + i] = warp.prefix_sum(v)
    o[unsafe_offset=5 * N + i] = warp.lane_group_sum[num_lanes=2](v)
    o[unsafe_offset=6 * N + i] = warp.lane_group_sum[num_lanes=4](v)
    o[unsafe_offset=7 * N + i] = warp.lane_group_sum[num_lanes=8](v)
    o[unsafe_offset=8 * N + i] = warp.lane_group_sum[num_lanes=16](v)
    o[unsafe_offset=9 * N + i] = warp.lane_group_sum[num_lanes=32](v)
    o[unsafe_offset=10 * N + i] = warp.lane_group_max[num_lanes=8](v)


def votes(o: MutPointer[UInt64, MutAnyOrigin], x: I):
    var i = Int(thread_idx.x)
    comptime if WARP_SIZE == 64:
        o[unsafe_offset=i] = warp.vote[DType.uint64](x[unsafe_offset=i] > 0)
    else:
        o[unsafe_offset=i] = UInt64(
            warp.vote[DType.uint32](x[unsafe_offset=i] > 0)
        )


def functions(o: F, x: G, n: Int32):
    """[13, n] functions of the n values of x."""
    var i = Int(thread_idx.x)
    var N = Int(n)
    var v = x[unsafe_offset=i]
    o[unsafe_offset=i] = exp2(v)
    o[unsafe_offset=N + i] = exp(v)
    o[unsafe_offset=2 * N + i] = log(v)
    o[unsafe_offset=3 * N + i] = log2(v)
    o[unsafe_offset=4 * N + i] = sqrt(v)
    o[unsafe_offset=5 * N + i] = rsqrt(v)
    o[unsafe_offset=6 * N + i] = tanh(v)
    o[unsafe_offset=7 * N + i] = 1 / v
    o[unsafe_offset=8 * N + i] = erf(v)
    o[unsafe_offset=9 * N + i] = sin(v)
    o[unsafe_offset=10 * N + i] = cos(v)
    o[unsafe_offset=11 * N + i] = v.cast[DType.bfloat16]().cast[DType.float32]()
    o[unsafe_offset=12 * N + i] = v.cast[DType.float16]().cast[DType.float32]()


@always_inline
def held_a[t: DType]() -> Int:
    comptime if is_nvidia_gpu():
        return 4 if t == DType.float32 else 8
    comptime if _is_amd_rdna():  # on RDNA4 `mma` takes its half of them
        return 16
    return 4


@always_inline
def held_b[t: DType]() -> Int:
    comptime if is_nvidia_gpu():
        return held_a[t]() // 2
    return held_a[t]()


@always_inline
def held_c() -> Int:
    comptime if _is_amd_rdna():
        return 8
    return 4


def product[
    t: DType
](
    o: F,
    a: ImmPointer[Scalar[t], ImmutAnyOrigin],
    b: ImmPointer[Scalar[t], ImmutAnyOrigin],
    c: G,
):
    """One warp, one matrix instruction: the registers of each lane, in order."""
    var l = Int(lane_id())
    var d = SIMD[DType.float32, held_c()](0)
    mma(
        d,
        a.unsafe_load[width=held_a[t]()](l * held_a[t]()),
        b.unsafe_load[width=held_b[t]()](l * held_b[t]()),
        c.unsafe_load[width=held_c()](l * held_c()),
    )
    o.unsafe_store(l * held_c(), d)


def tf32(o: U, x: G):
    """NVIDIA: x rounded to tf32, its bits."""
    var i = Int(thread_idx.x)
    o[unsafe_offset=i] = UInt32(
        llvm_intrinsic["llvm.nvvm.f2tf32.rna", Int32](x[unsafe_offset=i])
    )


def matrix_loads(
    o: MutPointer[BFloat16, MutAnyOrigin],
    a: ImmPointer[BFloat16, ImmutAnyOrigin],
):
    """One warp of NVIDIA: 32 rows of 8 as fragments, x4, x2, x1, x4.trans,
    x2.trans, x1.trans, each [32, 2 x]."""
    var s = unsafe_stack_allocation[
        256, BFloat16, alignment=16, address_space=AddressSpace.SHARED
    ]()
    var t = Int(thread_idx.x)
    for i in range(8):
        s[unsafe_offset=t * 8 + i] = a[unsafe_offset=t * 8 + i]
    barrier()
    var p = s.unsafe_offset(t * 8)
    o.unsafe_store(t * 8, ld_matrix[8](p))
    o.unsafe_store(256 + t * 4, ld_matrix[4](p))
    o.unsafe_store(384 + t * 2, ld_matrix[2](p))
    o.unsafe_store(448 + t * 8, ld_matrix[8, transpose=True](p))
    o.unsafe_store(704 + t * 4, ld_matrix[4, transpose=True](p))
    o.unsafe_store(832 + t * 2, ld_matrix[2, transpose=True](p))


def copies(o: F, x: G, kept: Int32):
    """128 threads of NVIDIA: x copied in pieces of 4, 8 and 16 bytes, then again with all but `kept` bytes of each 0."""
    var s = unsafe_stack_allocation[
        1792, Float32, alignment=16, address_space=AddressSpace.SHARED
    ]()
    var t = Int(thread_idx.x)
    var g = x.unsafe_address_space_cast[AddressSpace.GLOBAL]()
    async_copy[4](g.unsafe_offset(t), s.unsafe_offset(t))
    async_copy[8](g.unsafe_offset(2 * t), s.unsafe_offset(128 + 2 * t))
    async_copy[16](g.unsafe_offset(4 * t), s.unsafe_offset(384 + 4 * t))
    async_copy_commit_group()
    async_copy[4, fill=Float32(0)](
        g.unsafe_offset(t), s.unsafe_offset(896 + t), kept
    )
    async_copy[8, fill=Float32(0)](
        g.unsafe_offset(2 * t), s.unsafe_offset(1024 + 2 * t), kept
    )
    async_copy[16, fill=Float32(0)](
        g.unsafe_offset(4 * t), s.unsafe_offset(1280 + 4 * t), kept
    )
    async_copy_commit_group()
    async_copy_wait_group(1)
    barrier()
    o[unsafe_offset=t] = s[unsafe_offset=895 - t]
    async_copy_wait_all()
    barrier()
    for i in range(t, 1792, 128):
        o[unsafe_offset=128 + i] = s[unsafe_offset=i]


def dynamic(o: F, n: Int32):
    """Shared memory whose size the launch says: n numbers backwards."""
    var s = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var t = Int(thread_idx.x)
    if t < Int(n):
        s[unsafe_offset=t] = Float32(t)
    barrier()
    if t < Int(n):
        o[unsafe_offset=t] = s[unsafe_offset=Int(n) - 1 - t]


@always_inline
def device_scope() -> StaticString:
    comptime if is_nvidia_gpu():
        return "device"
    return "agent"


def atomics(o: U, f: F):
    """Every thread of the grid on the same eight numbers."""
    comptime A = Atomic[UInt32, scope=device_scope()]
    var i = UInt32(block_idx.x * block_dim.x + thread_idx.x)
    _ = A.fetch_add[ordering=Ordering.RELAXED](o, 1)
    _ = Atomic[UInt32].fetch_add(o.unsafe_offset(1), i)
    A.max[ordering=Ordering.RELAXED](o.unsafe_offset(2), i)
    A.min[ordering=Ordering.RELAXED](o.unsafe_offset(3), i + 7)
    var expected = UInt32(0)
    if A.compare_exchange(o.unsafe_offset(4), expected, i + 1):
        _ = A.fetch_add[ordering=Ordering.RELAXED](o.unsafe_offset(5), 1)
    A.store[ordering=Ordering.RELEASE](o.unsafe_offset(6), 9)
    fence[Ordering.ACQUIRE, scope=device_scope()]()
    if A.load[ordering=Ordering.ACQUIRE](o.unsafe_offset(6)) == 9:
        _ = A.fetch_add[ordering=Ordering.RELAXED](o.unsafe_offset(7), 2)
    _ = Atomic[Float32, scope=device_scope()].fetch_add[
        ordering=Ordering.RELAXED
    ](f, 0.5)


def buffers(o: F, x: G, n: Int32):
    """AMD: four numbers a thread through buffer descriptors of n numbers, then one, then the first lane's thread."""
    var t = Int32(thread_idx.x)
    var source = AMDBufferResource(x, Int(n))
    var target = AMDBufferResource(o, Int(n))
    target.store[DType.float32, 4](
        t * 4, source.load[DType.float32, 4](t * 4) * 2
    )
    var whole = o.unsafe_offset(Int(n))
    whole[unsafe_offset=Int(t)] = source.load[DType.float32, 1](t * 8)
    whole[unsafe_offset=Int(block_dim.x) + Int(t)] = Float32(readfirstlane(t))
