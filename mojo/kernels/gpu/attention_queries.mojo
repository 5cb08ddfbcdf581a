"""Tiles of query rows of attention over a prompt: which ones a block attends,
how they come to shared memory and how their outputs leave it."""
from std.math import ceildiv
from max.gpu import block_idx, grid_dim
from kernels.gpu.attention_step import TileLayout
from kernels.gpu.block import THREADS, quotient, size
from kernels.gpu.staging import chunk
from kernels.gpu.tile_op import Shared


@fieldwise_init
struct QueryTile(TrivialRegisterPassable):
    """Up to as many rows as a tile has, of one head of one sequence."""

    var b: Int
    """The sequence."""
    var head: Int
    """The query head."""
    var row: Int32
    """First row, counted from the sequence's first."""
    var first: Int32
    """The same, counted from the batch's first."""
    var rows: Int32
    """Rows from the tile's first to the sequence's last, from 1."""


@always_inline
def each_query_tile[
    F: def(QueryTile) -> None, //, ROWS: Int
](
    offsets: Pointer[Int32, _],
    batch: Int32,
    heads: Int32,
    shortest: Int32,
    attend: F,
):
    """Calls attend with the tiles that are the block's, grid-stride; of a
    sequence the last rows, which see most keys, come first.

    Parameters:
        F: Type of attend.
        ROWS: Rows of a tile.

    Args:
        offsets: `[batch + 1]` first row of each sequence.
        batch: Number of sequences.
        heads: Query heads.
        shortest: Sequences of fewer rows are passed over.
        attend: What is done with a tile.
    """
    # In 32 bits what lives as long as the loop: scalar registers are short on
    # AMD.
    var step = Int32(grid_dim.x)
    var b = Int32(0)
    var next = Int32(block_idx.x)  # tile of the block, counted from b's first
    while b < batch:
        var row = offsets[unsafe_offset=size(b)]
        var rows = offsets[unsafe_offset=size(b) + 1] - row
        var blocks = ceildiv(UInt32(rows), UInt32(ROWS))
        if rows < shortest:
            blocks = 0
        var count = Int32(blocks) * heads
        if next >= count:
            next -= count
            b += 1
            continue
        var block = quotient(size(next), size(heads))
        var head = size(next) - block * size(heads)
        var row0 = (Int32(blocks) - 1 - Int32(block)) * Int32(ROWS)
        attend(QueryTile(size(b), head, row0, row + row0, rows - row0))
        next += step


@always_inline
def load_queries[
    t: DType, //, L: TileLayout, ROWS: Int, D: Int
](
    q: Pointer[Scalar[t], _],
    to: Shared[t],
    rows: Int32,
    stride: UInt32,
    thread: Int,
):
    """Copies a tile's rows to shared memory, zeros for those that are missing.

    Parameters:
        t: Dtype.
        L: Layout of the tile in shared memory.
        ROWS: Rows of a tile.
        D: The head_dim, a multiple of 16.

    Args:
        q: The tile's first row, 16-byte aligned.
        to: The tile in shared memory.
        rows: Rows that there are.
        stride: Elements from row to row of q.
        thread: Number of the thread in its block.
    """
    comptime V = chunk[t]()
    comptime PER_ROW = UInt32(D // V)
    for piece in range(
        UInt32(thread), UInt32(ROWS) * PER_ROW, UInt32(THREADS())
    ):
        var row = piece // PER_ROW
        var c = Int(piece % PER_ROW * UInt32(V))
        var query = SIMD[t, V](0)
        if row < UInt32(rows):
            query = q.unsafe_offset(Int(row * stride) + c).unsafe_load[
                width=V, alignment=16
            ]()
        to.unsafe_offset(L.at(Int(row), c)).unsafe_store[alignment=16](0, query)


@always_inline
def write_outputs[
    t: DType, //, L: TileLayout, ROWS: Int, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    source: Shared[t],
    rows: Int32,
    stride: UInt32,
    start: Int32,
    thread: Int,
):
    """Copies a tile's rows from shared memory, zeros where no key is seen.

    Parameters and arguments as those of `load_queries`, but `start`, the
    position of the tile's first row: one below 0 sees no key.
    """
    comptime V = chunk[t]()
    comptime PER_ROW = UInt32(D // V)
    for piece in range(
        UInt32(thread), UInt32(ROWS) * PER_ROW, UInt32(THREADS())
    ):
        var row = piece // PER_ROW
        var c = Int(piece % PER_ROW * UInt32(V))
        if row < UInt32(rows):
            var y = source.unsafe_offset(L.at(Int(row), c)).unsafe_load[
                width=V, alignment=16
            ]()
            if start + Int32(row) < 0:
                y = 0
            dst.unsafe_offset(Int(row * stride) + c).unsafe_store[alignment=16](
                0, y
            )
