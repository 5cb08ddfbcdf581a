"""Reductions over the lanes of a warp and the threads of a block.

All of them fold lanes by one fixed tree, then warps in their order, so that a
result depends neither on the schedule nor on the grid.
"""
from max.gpu import AddressSpace, WARP_SIZE, barrier, lane_id, warp_id
from max.gpu.primitives import warp
from kernels.gpu.block import WARPS
from kernels.gpu.tile_op import F32, Shared


@always_inline
def lanes_sum[LANES: Int](x: Float32) -> Float32:
    """Sum over groups of LANES neighbouring lanes, a power of two."""
    var total = x
    comptime for i in range(halvings(LANES)):
        total += warp.shuffle_xor(total, UInt32(LANES >> (i + 1)))
    return total


@always_inline
def lanes_max[LANES: Int](x: Float32) -> Float32:
    """Maximum over groups of LANES neighbouring lanes; NaN counts only where
    every lane has it."""
    var top = x
    comptime for i in range(halvings(LANES)):
        top = max(top, warp.shuffle_xor(top, UInt32(LANES >> (i + 1))))
    return top


def halvings(n: Int) -> Int:
    """Base-2 logarithm of a power of two."""
    var steps = 0
    while (1 << steps) < n:
        steps += 1
    return steps


@always_inline
def block_sum(x: Float32, scratch: Shared[F32]) -> Float32:
    """Sum over the block, for every thread.

    Args:
        x: The thread's share.
        scratch: `[WARPS]`; free again after the next barrier.
    """
    var total = lanes_sum[WARP_SIZE](x)
    if lane_id() == 0:
        scratch[unsafe_offset=Int(warp_id())] = total
    barrier()
    total = 0
    comptime for w in range(WARPS):
        total += scratch[unsafe_offset=w]
    return total
