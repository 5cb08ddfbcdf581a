"""The one block size of all GPU kernels.

Kernels that share a block size and a cap on registers can be phases of one
persistent kernel.
"""
from std.utils import StaticTuple
from max.gpu import WARP_SIZE, AddressSpace

comptime WARPS = 4
"""Warps of a block: what one multiprocessor issues from in a cycle (four
schedulers on NVIDIA, four SIMDs on CDNA)."""

comptime Global[t: DType] = ImmPointer[
    Scalar[t], UntrackedOrigin[mut=False], address_space=AddressSpace.GLOBAL
]
"""What a kernel reads, as structs hold it. The address space is said, since
AMD compilers lose it where a pointer is chosen among several."""


@always_inline
def THREADS() -> Int:
    """Threads of a block: 128 where a warp has 32 lanes, 256 on CDNA.

    A function, since a constant of a module would be the compiling machine's.
    """
    return WARPS * WARP_SIZE


@always_inline
def threads_metadata() -> StaticTuple[Int32, 1]:
    """What `MAX_THREADS_PER_BLOCK_METADATA` of every entry is set to.

    Without it the AMD compiler plans for 1024 threads and spills by the
    hundred.
    """
    return StaticTuple[Int32, 1](Int32(THREADS()))


@always_inline
def untracked[
    t: DType, //
](data: ImmPointer[Scalar[t], ImmutAnyOrigin]) -> Global[t]:
    """An argument of an entry as structs hold it."""
    return data.unsafe_origin_cast[
        UntrackedOrigin[mut=False]
    ]().unsafe_address_space_cast[AddressSpace.GLOBAL]()


comptime MIN_BLOCKS = __mlir_attr.`3 : i32`
"""What `nvvm.minctasm` of a GEMV is set to: blocks that must fit on a
multiprocessor of NVIDIA, 170 registers a thread. Without it the assembler
aims at a number of its own, and spills to reach it.
"""


@always_inline
def divide(tile: Int, by: Int) -> Tuple[Int, Int]:
    """Quotient and remainder of the number of a tile, which 32 bits hold: a
    division of 64 bits is dozens of instructions on a GPU."""
    var quotient = Int(UInt32(tile) // UInt32(by))
    return (quotient, tile - quotient * by)


@always_inline
def size(x: Int32) -> Int:
    """An argument that is not negative. Extended by zeros: an upper half of
    signs would take a scalar register of its own on AMD."""
    return Int(UInt32(x))


@always_inline
def quotient(x: Int, y: Int) -> Int:
    """x // y of numbers from 0 and below 2^32, y not 0. 64 bits would take
    dozens of instructions, and a test of y registers."""
    return Int(UInt32(x) // max(UInt32(y), 1))
