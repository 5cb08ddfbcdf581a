"""Greedy choice of the next token: spans of the logits, then their best.

`greedy_spans` leaves the best of every `SPAN` logits, `greedy` the best of a
row's spans, so that one row keeps many blocks busy.
"""
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.numerics import neg_inf
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    AddressSpace,
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.primitives import warp
from kernels.gpu.block import MIN_BLOCKS, THREADS, WARPS, threads_metadata
from kernels.gpu.reduce import halvings
from kernels.gpu.tile_op import F32, Shared

comptime SPAN = 4096
"""Logits of a span: 32 for each of 128 threads, 32 spans of a vocabulary of
128 Ki."""


@fieldwise_init
struct Choice(TrivialRegisterPassable):
    """A logit and its id; before any, minus infinity and the largest id."""

    var logit: Float32
    var id: Int32

    @staticmethod
    @always_inline
    def none() -> Self:
        return {neg_inf[F32](), Int32.MAX}

    @always_inline
    def best(self, other: Self) -> Self:
        """The larger logit, the lower id on a tie; NaN never wins."""
        if other.logit > self.logit or (
            other.logit == self.logit and other.id < self.id
        ):
            return other
        return self


@always_inline
def _block_best(
    own: Choice, logits: Shared[F32], ids: Shared[DType.int32]
) -> Choice:
    """The best of the block's threads, for every thread.

    Args:
        own: The thread's.
        logits: Scratch `[WARPS]`; free again after the next barrier.
        ids: The same.
    """
    var best = own
    comptime for i in range(halvings(WARP_SIZE)):
        comptime STEP = UInt32(WARP_SIZE >> (i + 1))
        best = best.best(
            {
                warp.shuffle_xor(best.logit, STEP),
                warp.shuffle_xor(best.id, STEP),
            }
        )
    if lane_id() == 0:
        logits[unsafe_offset=Int(warp_id())] = best.logit
        ids[unsafe_offset=Int(warp_id())] = best.id
    barrier()
    best = Choice.none()
    comptime for w in range(WARPS):
        best = best.best({logits[unsafe_offset=w], ids[unsafe_offset=w]})
    return best


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def greedy_spans(
    best_logits: MutPointer[Float32, MutAnyOrigin],
    best_ids: MutPointer[Int32, MutAnyOrigin],
    logits: ImmPointer[Float32, ImmutAnyOrigin],
    rows: Int32,
    v: Int32,
):
    """Leaves the best of every span.

    A logit that is NaN or minus infinity is never best; a span of nothing else
    leaves minus infinity and the largest Int32.

    Args:
        best_logits: `[rows, ceildiv(v, SPAN)]` float32.
        best_ids: `[rows, ceildiv(v, SPAN)]`.
        logits: `[rows, v]` float32.
        rows: Number of rows.
        v: Row length.
    """
    var warp_logits = unsafe_stack_allocation[
        WARPS, Float32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var warp_ids = unsafe_stack_allocation[
        WARPS, Int32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var spans = ceildiv(Int(v), SPAN)
    for tile in range(Int(block_idx.x), Int(rows) * spans, Int(grid_dim.x)):
        var row = logits.unsafe_offset(tile // spans * Int(v))
        var first = tile % spans * SPAN
        var own = Choice.none()
        for i in range(
            first + Int(thread_idx.x), min(first + SPAN, Int(v)), THREADS()
        ):
            # Ids rise, so a thread's first largest logit has the lowest.
            var logit = row[unsafe_offset=i]
            if logit > own.logit:
                own = {logit, Int32(i)}
        var best = _block_best(own, warp_logits, warp_ids)
        if thread_idx.x == 0:
            best_logits[unsafe_offset=tile] = best.logit
            best_ids[unsafe_offset=tile] = best.id
        barrier()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def greedy(
    dst: MutPointer[Int32, MutAnyOrigin],
    best_logits: ImmPointer[Float32, ImmutAnyOrigin],
    best_ids: ImmPointer[Int32, ImmutAnyOrigin],
    rows: Int32,
    v: Int32,
):
    """Chooses dst `[rows]` from what `greedy_spans` left.

    The lowest id wins a tie, and a row without any number above minus infinity
    gives 0.

    Args:
        dst: `[rows]`.
        best_logits: `[rows, ceildiv(v, SPAN)]` float32.
        best_ids: `[rows, ceildiv(v, SPAN)]`.
        rows: Number of rows.
        v: Length of a row of logits.
    """
    var spans = ceildiv(Int(v), SPAN)
    for row in range(
        Int(block_idx.x) * THREADS() + Int(thread_idx.x),
        Int(rows),
        Int(grid_dim.x) * THREADS(),
    ):
        var best = Choice.none()
        for i in range(row * spans, (row + 1) * spans):
            best = best.best(
                {best_logits[unsafe_offset=i], best_ids[unsafe_offset=i]}
            )
        dst[unsafe_offset=row] = 0 if best.id == Int32.MAX else best.id
