"""Tiles of a matrix from global to shared memory, ahead of their use.

`start` begins the copy of a tile and `finish` ends it: on NVIDIA by `cp.async`
(PTX ISA, "cp.async": a source size of 0 fills with zeros), elsewhere through
registers, loaded before the current tile is used and stored after. Elements
outside the matrix are 0 in the tile and never read.

    var held = Tile.start(...)      # of tile 0
    commit()
    Tile.finish(held, ...)
    for step in range(steps):
        arrive()                    # tile `step` is there, its predecessor free
        held = Tile.start(...)      # of tile step + 1, into the other stage
        commit()
        ...                         # use tile `step`
        Tile.finish(held, ...)
"""
from std.math import ceildiv
from std.sys import size_of
from std.sys.info import is_nvidia_gpu
from max.gpu import AddressSpace, barrier
from max.gpu.memory import (
    async_copy,
    async_copy_commit_group,
    async_copy_wait_group,
)
from kernels.gpu.block import THREADS
from kernels.gpu.tile_op import Shared, row_stride
from kernels.gpu.wgmma_op import Panel


trait RowOffsets(TrivialRegisterPassable):
    """Where the rows of a matrix begin."""

    def at(self, row: Int) -> Int:
        """Elements from the matrix' pointer to the row's first one."""
        ...


@fieldwise_init
struct DenseRows(RowOffsets):
    """Rows one after another."""

    var columns: Int
    """Elements from row to row."""

    @always_inline
    def at(self, row: Int) -> Int:
        return row * self.columns


@always_inline
def chunk[t: DType]() -> Int:
    """Elements of a 16-byte load."""
    return 16 // size_of[t]()


@always_inline
def loads_in_chunks[
    t: DType
](data: Pointer[Scalar[t], _, address_space=_], columns: Int) -> Bool:
    """Whether rows one after another can be read by aligned 16-byte loads."""
    return columns % chunk[t]() == 0 and Int(data) % 16 == 0


@always_inline
def commit():
    """Ends the group of copies that the next `arrive` waits for."""
    comptime if is_nvidia_gpu():
        async_copy_commit_group()


@always_inline
def arrive():
    """Waits until the tiles begun are in shared memory, for the whole block."""
    comptime if is_nvidia_gpu():
        async_copy_wait_group(0)
    barrier()


struct Staged[
    t: DType, ROWS: Int, COLUMNS: Int, in_chunks: Bool, swizzled: Bool = False
](TrivialRegisterPassable):
    """Copies of tiles `[ROWS, COLUMNS]`.

    Parameters:
        t: Dtype.
        ROWS: Rows of a tile.
        COLUMNS: Columns of a tile, a multiple of 16.
        in_chunks: Whether rows begin 16-byte aligned and hold a multiple of 16
            bytes; otherwise elements are read one by one.
        swizzled: Whether a tile is a `Panel` of `wgmma_op`, else it has rows
            `row_stride[t](COLUMNS)` apart.
    """

    comptime CHUNK = chunk[Self.t]()
    comptime STRIDE = row_stride[Self.t](Self.COLUMNS)
    comptime PER_ROW = Self.COLUMNS // Self.CHUNK
    comptime PIECES = Self.ROWS * Self.PER_ROW

    @staticmethod
    @always_inline
    def _count() -> Int:
        """Chunks of a thread."""
        return ceildiv(Self.PIECES, THREADS())

    @staticmethod
    @always_inline
    def _asynchronous() -> Bool:
        return is_nvidia_gpu() and Self.in_chunks

    @staticmethod
    @always_inline
    def _place(row: Int, column: Int) -> Int:
        """Elements from the tile's start to a chunk."""
        comptime if Self.swizzled:
            return Panel[Self.t, Self.COLUMNS].at(row, column // Self.CHUNK)
        else:
            return row * Self.STRIDE + column

    comptime Held = Array[
        SIMD[Self.t, Self.CHUNK], ceildiv(Self.PIECES, THREADS())
    ]
    """What a thread holds of a tile between `start` and `finish`."""

    @staticmethod
    @always_inline
    def start[
        R: RowOffsets, //
    ](
        source: Pointer[Scalar[Self.t], _, address_space=_],
        rows: R,
        row: Int,
        row_end: Int,
        column: Int,
        column_end: Int,
        to: Shared[Self.t],
        thread: Int,
    ) -> Self.Held:
        """Begins to copy the tile at `row`, `column`; all threads call it.

        Args:
            source: The matrix.
            rows: Where its rows begin.
            row: First row of the tile.
            row_end: Rows from here on are zeros.
            column: First column of the tile, a multiple of 16.
            column_end: Columns from here on are zeros.
            to: The tile in shared memory.
            thread: Number of the thread in its block.
        """
        var held = Self.Held(fill=SIMD[Self.t, Self.CHUNK](0))
        comptime for i in range(Self._count()):
            var piece = UInt32(thread + i * THREADS())
            var r = Int(piece // UInt32(Self.PER_ROW))
            var c = Int(piece % UInt32(Self.PER_ROW)) * Self.CHUNK
            if Self._whole() or piece < UInt32(Self.PIECES):
                # Said as a number of columns, which waits in a vector register
                # from step to step; a mask would take scalar ones on AMD.
                var end = column_end if row + r < row_end else 0
                var there = column + c < end
                comptime if Self._asynchronous():
                    var at = 0
                    if there:
                        at = rows.at(row + r) + column + c
                    async_copy[16, fill=Scalar[Self.t](0)](
                        source.unsafe_offset(at).unsafe_address_space_cast[
                            AddressSpace.GLOBAL
                        ](),
                        to.unsafe_offset(Self._place(r, c)),
                        Int32(16) * Int32(there),
                    )
                elif Self.in_chunks:
                    if there:
                        held[i] = source.unsafe_offset(
                            rows.at(row + r) + column + c
                        ).unsafe_load[width=Self.CHUNK, alignment=16]()
                else:
                    if there:
                        var at = rows.at(row + r) + column + c
                        comptime for j in range(Self.CHUNK):
                            if column + c + j < end:
                                held[i][j] = source[unsafe_offset=at + j]
        return held^

    @staticmethod
    @always_inline
    def finish(held: Self.Held, to: Shared[Self.t], thread: Int):
        """Ends the copy that `start` began, arguments as there."""
        comptime if not Self._asynchronous():
            comptime for i in range(Self._count()):
                var piece = UInt32(thread + i * THREADS())
                var r = Int(piece // UInt32(Self.PER_ROW))
                var c = Int(piece % UInt32(Self.PER_ROW)) * Self.CHUNK
                if Self._whole() or piece < UInt32(Self.PIECES):
                    to.unsafe_offset(Self._place(r, c)).unsafe_store[
                        alignment=16
                    ](0, held[i])

    @staticmethod
    @always_inline
    def _whole() -> Bool:
        """Whether all threads have the same number of chunks."""
        return Self.PIECES % THREADS() == 0
