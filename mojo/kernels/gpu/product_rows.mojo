"""Reductions over the columns of products that a warp holds.

A lane holds `accumulator_size` elements of a product, several rows of them and
several columns of a row; neighbouring `row_lanes` lanes hold the same rows.
"""
from max.gpu.primitives import warp
from kernels.gpu.reduce import halvings
from kernels.gpu.tile_op import (
    F32,
    Accumulator,
    accumulator_size,
    c_row,
    row_lanes,
)


@always_inline
def rows_max(x: Accumulator) -> Accumulator:
    """The maximum of each element's row; NaN counts only where all are."""
    return _reduced[True](x)


@always_inline
def rows_sum(x: Accumulator) -> Accumulator:
    """The sum of each element's row."""
    return _reduced[False](x)


@always_inline
def _reduced[largest: Bool](x: Accumulator) -> Accumulator:
    var out = x
    comptime for i in range(accumulator_size()):
        comptime if _first_of_row[i]() == i:
            var row = x[i]
            comptime for j in range(i + 1, accumulator_size()):
                comptime if _first_of_row[j]() == i:
                    row = max(row, x[j]) if largest else row + x[j]
            comptime for step in range(halvings(row_lanes())):
                var other = warp.shuffle_xor(row, UInt32(1 << step))
                row = max(row, other) if largest else row + other
            out[i] = row
        else:
            out[i] = out[_first_of_row[i]()]
    return out


@always_inline
def _first_of_row[i: Int]() -> Int:
    """First element that is in the row of element i."""
    comptime for j in range(i):
        comptime if c_row[j](0) == c_row[i](0):
            return j
    return i
