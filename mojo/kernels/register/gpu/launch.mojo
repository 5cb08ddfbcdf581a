"""How many threads and blocks a kernel is launched with, and which of the
matrix kernels."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
from kernels.gpu.block import WARPS
from kernels.gpu.gemv_rows import STREAMS

comptime DEVICE = DeviceContext.default_device_info
"""The GPU that is compiled for."""
comptime THREADS = WARPS * DEVICE.warp_size
"""Threads of a block, as `kernels.gpu.block` has them on the device."""
comptime BLOCKS_PER_MULTIPROCESSOR = 8
"""Blocks of more tiles than that walk through them: 8 blocks of 128 threads at
64 registers fill NVIDIA's register file."""
comptime GEMV_BATCHES = [1, 4, 8]
"""Activation rows for which the weights stream past once, by GEMV; more rows
take a GEMM, which alone has tf32: a GEMV waits for the weights, however exact
its multiply-adds are."""
comptime SHORT_TILE = 16
"""Rows of a GEMM tile up to `SHORT_ROWS` activation rows."""
comptime SHORT_ROWS = 32
comptime TALL_TILE = 64
"""Rows of a GEMM tile above."""


@always_inline
def by_wgmma[t: DType]() -> Bool:
    """Whether a GEMM above `SHORT_ROWS` and attention over a prompt are
    Hopper's own, of tiles of as many rows."""
    return DEVICE.arch_name == "hopper" and t.is_half_float()


@always_inline
def blocks(tiles: Int) -> Int:
    """Blocks for a number of tiles, at least one."""
    comptime most = BLOCKS_PER_MULTIPROCESSOR * DEVICE.sm_count
    return max(1, min(tiles, most))


@always_inline
def gemv_tiles[count: Int](m: Int, batch: Int, n: Int) -> Int:
    """Tiles of m rows, `batch` at a time, over `count` matrices of n rows that
    are read together."""
    return ceildiv(m, batch) * ceildiv(n, WARPS * (STREAMS // count))


@always_inline
def unread[
    t: DType
](data: ImmPointer[_, _]) -> ImmPointer[Scalar[t], UntrackedOrigin[mut=False]]:
    """A pointer for an argument that the launched variant does not read."""
    return data.unsafe_bitcast[Scalar[t]]().unsafe_origin_cast[
        UntrackedOrigin[mut=False]
    ]()
