"""The next token by temperature, top-k and top-p, given one uniform number.

Nothing is sorted. Tokens are ordered by an integer `rank`: an order-preserving
key of the logit, then the lower id. The token at which a running count or mass
reaches its target is found by descending through the bytes of the rank, each
time into the bin of a histogram where the measure is reached. Masses are fixed
point integers, so sums do not depend on their order: a choice has the same bits
in every schedule.
"""
from std.atomic import Atomic, Ordering
from std.math import ceil, exp2
from std.memory import bitcast, unsafe_stack_allocation
from std.sys.info import is_nvidia_gpu
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
from kernels.gpu.block import MIN_BLOCKS, THREADS, WARPS, threads_metadata
from kernels.gpu.reduce import lanes_max
from kernels.gpu.tile_op import F32, Shared

comptime BINS = 256
"""Bins of a histogram, one per value of a byte."""
comptime FINDERS = 32
"""Threads that look for a bin, `BINS // FINDERS` bins each."""
comptime ONE = 1 << 40
"""Mass of the largest logit: 2^23 tokens stay below 2^63, and what rounds to 0
is less than 2^-40 of it."""
comptime LOG2E = Float32(1.4426950408889634)


@always_inline
def _block_scope() -> StaticString:
    """The name of "the threads of a block" in each backend."""
    comptime if is_nvidia_gpu():
        return "block"
    else:
        return "workgroup"


@always_inline
def _key(logit: Float32) -> UInt32:
    """Keys in the order of the numbers; both zeros have one key."""
    var bits = bitcast[DType.uint32, 1](logit + 0)
    return ~bits if bits >> 31 == 1 else bits | 0x80000000


@always_inline
def _logit(key: UInt32) -> Float32:
    """The number of a key."""
    return bitcast[F32, 1](key ^ 0x80000000 if key >> 31 == 1 else ~key)


@always_inline
def _rank(logit: Float32, id: Int) -> UInt64:
    """A token's place from below: by its logit, then by falling id."""
    return UInt64(_key(logit)) << 32 | UInt64(~UInt32(id))


@fieldwise_init
struct Row[origin: ImmOrigin](TrivialRegisterPassable):
    """A row of logits as its kernel sees it."""

    var logits: Pointer[Float32, Self.origin]
    var vocab: Int
    var top: Float32
    """The largest logit."""
    var rate: Float32
    """log2(e) / temperature."""

    @always_inline
    def logit(self, id: Int) -> Float32:
        """The logit, minus infinity for NaN."""
        var v = self.logits[unsafe_offset=id]
        return v if v >= neg_inf[F32]() else neg_inf[F32]()

    @always_inline
    def mass(self, logit: Float32) -> UInt64:
        """The unnormalised probability in units of 1 / ONE."""
        if logit == self.top:
            return ONE
        var share = exp2((logit - self.top) * self.rate)
        return UInt64(share * Float32(ONE))


@fieldwise_init
struct Scratch(TrivialRegisterPassable):
    """Shared memory of a block."""

    var bins: Shared[DType.uint64]
    """`[BINS]`."""
    var sums: Shared[DType.uint64]
    """`[FINDERS]`."""
    var found: Shared[DType.uint64]
    """`[2]`: a rank's leading bytes, and the measure above them."""
    var tops: Shared[F32]
    """`[WARPS]`."""


@always_inline
def _add(to: Shared[DType.uint64], value: UInt64):
    """Adds to a counter of the block."""
    _ = Atomic[UInt64, scope=_block_scope()].fetch_add[
        ordering=Ordering.RELAXED
    ](to, value)


@always_inline
def _largest(row: Row[_], scratch: Scratch, thread: Int) -> Float32:
    """The largest logit, minus infinity when there is none."""
    var own = neg_inf[F32]()
    for id in range(thread, row.vocab, THREADS()):
        own = max(own, row.logit(id))
    own = lanes_max[WARP_SIZE](own)
    if lane_id() == 0:
        scratch.tops[unsafe_offset=Int(warp_id())] = own
    barrier()
    own = neg_inf[F32]()
    comptime for w in range(WARPS):
        own = max(own, scratch.tops[unsafe_offset=w])
    return own


@always_inline
def _mass_above(
    row: Row[_], key: UInt32, scratch: Scratch, thread: Int
) -> UInt64:
    """Mass of the tokens whose key is above `key`."""
    if thread == 0:
        scratch.found[unsafe_offset=0] = 0
    barrier()
    var own = UInt64(0)
    for id in range(thread, row.vocab, THREADS()):
        var logit = row.logit(id)
        if _key(logit) > key:
            own += row.mass(logit)
    _add(scratch.found, own)
    barrier()
    var total = scratch.found[unsafe_offset=0]
    barrier()
    return total


@always_inline
def _descend[
    by_count: Bool
](
    row: Row[_], target: UInt64, levels: Int, scratch: Scratch, thread: Int
) -> Tuple[UInt64, UInt64]:
    """Finds where the tokens by falling rank reach a target.

    Parameters:
        by_count: Whether tokens are counted; else their masses are summed.

    Args:
        row: The logits.
        target: Count or mass, from 1 to that of all tokens.
        levels: Leading bytes of the rank to find.
        scratch: Shared memory, free again on return.
        thread: Number of the thread in its block.

    Returns:
        The leading bytes of the rank at which the target is reached, and the
        measure of the tokens above all that share them.
    """
    comptime EACH = BINS // FINDERS
    var prefix = UInt64(0)
    var above = UInt64(0)
    for level in range(levels):
        var shift = UInt64(56 - 8 * level)
        for bin in range(thread, BINS, THREADS()):
            scratch.bins[unsafe_offset=bin] = 0
        barrier()
        for id in range(thread, row.vocab, THREADS()):
            var logit = row.logit(id)
            var rank = _rank(logit, id)
            # Two shifts: one by 64 would not be defined.
            if (rank ^ prefix) >> shift >> 8 == 0:
                var measure = UInt64(1)
                comptime if not by_count:
                    measure = row.mass(logit)
                _add(
                    scratch.bins.unsafe_offset(Int(rank >> shift & 255)),
                    measure,
                )
        barrier()
        var first = BINS - 1 - thread * EACH
        if thread < FINDERS:
            var sum = UInt64(0)
            comptime for i in range(EACH):
                sum += scratch.bins[unsafe_offset=first - i]
            scratch.sums[unsafe_offset=thread] = sum
        barrier()
        if thread < FINDERS:
            var reached = above
            for finder in range(thread):
                reached += scratch.sums[unsafe_offset=finder]
            comptime for i in range(EACH):
                var before = reached
                reached += scratch.bins[unsafe_offset=first - i]
                if before < target and target <= reached:
                    scratch.found[unsafe_offset=0] = (
                        prefix | UInt64(first - i) << shift
                    )
                    scratch.found[unsafe_offset=1] = before
        barrier()
        prefix = scratch.found[unsafe_offset=0]
        above = scratch.found[unsafe_offset=1]
        barrier()
    return (prefix, above)


@always_inline
def sample_tile(
    logits: Pointer[mut=False, Float32, _],
    vocab: Int,
    uniform: Float32,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
    scratch: Scratch,
    thread: Int,
) -> Int32:
    """Chooses one row's token, for every thread.

    NaN counts as minus infinity; a row of nothing else gives 0.

    Args:
        logits: `[vocab]` float32.
        vocab: Ids that may be chosen.
        uniform: In [0, 1).
        temperature: Above 0.
        top_k: Tokens kept, 0 for all.
        top_p: Mass kept of what top_k keeps, in (0, 1].
        scratch: Shared memory, free again on return.
        thread: Number of the thread in its block.

    Returns:
        The id.
    """
    var row = Row(logits, vocab, 0, LOG2E / temperature)
    row.top = _largest(row, scratch, thread)
    if row.top == neg_inf[F32]():
        return 0

    var mass: UInt64
    if 0 < top_k and top_k < vocab:
        var kept = UInt64(top_k)
        var last = _descend[True](row, kept, 4, scratch, thread)
        var key = UInt32(last[0] >> 32)
        mass = _mass_above(row, key, scratch, thread)
        mass += (kept - last[1]) * row.mass(_logit(key))
    else:
        mass = _mass_above(row, 0, scratch, thread)
    if top_p < 1:
        var enough = UInt64(ceil(Float64(top_p) * Float64(mass)))
        enough = max(UInt64(1), min(enough, mass))
        var last = _descend[False](row, enough, 4, scratch, thread)
        var each = row.mass(_logit(UInt32(last[0] >> 32)))
        mass = last[1] + (enough - last[1] + each - 1) // each * each
    var drawn = min(UInt64(Float64(uniform) * Float64(mass)), mass - 1)
    var chosen = _descend[False](row, drawn + 1, 8, scratch, thread)
    return Int32(~UInt32(chosen[0] & 0xFFFFFFFF))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def sample(
    dst: MutPointer[Int32, MutAnyOrigin],
    logits: ImmPointer[Float32, ImmutAnyOrigin],
    uniform: ImmPointer[Float32, ImmutAnyOrigin],
    rows: Int32,
    v: Int32,
    vocab: Int32,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
):
    """Chooses dst `[rows]` from logits `[rows, v]`, one block per row.

    Args:
        dst: `[rows]`.
        logits: `[rows, v]` float32.
        uniform: `[rows]` in [0, 1).
        rows: Number of rows.
        v: Length of a row.
        vocab: Ids that may be chosen, at most 2^23.
        temperature: Above 0.
        top_k: Tokens kept, 0 for all.
        top_p: Mass kept of what top_k keeps, in (0, 1].
    """
    var bins = unsafe_stack_allocation[
        BINS, UInt64, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var sums = unsafe_stack_allocation[
        FINDERS, UInt64, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var found = unsafe_stack_allocation[
        2, UInt64, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var tops = unsafe_stack_allocation[
        WARPS, Float32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var scratch = Scratch(bins, sums, found, tops)
    for r in range(Int(block_idx.x), Int(rows), Int(grid_dim.x)):
        var id = sample_tile(
            logits.unsafe_offset(r * Int(v)),
            Int(vocab),
            uniform[unsafe_offset=r],
            temperature,
            Int(top_k),
            top_p,
            scratch,
            Int(thread_idx.x),
        )
        if thread_idx.x == 0:
            dst[unsafe_offset=r] = id
        barrier()
