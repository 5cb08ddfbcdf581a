"""The next token by temperature, top-k and top-p, given one uniform number.

Nothing is sorted: the kept set, and in it the chosen token, are found by
descending through the bytes of an order-preserving key of the logits, each
time into the byte's bin where a running count or mass reaches its target.
"""
from std.math import ceil, exp, floor
from std.memory import bitcast
from std.utils.numerics import neg_inf
from kernels.dot_tile import F32, W
from kernels.workers import first_tile

comptime BINS = 256
comptime LOWEST = UInt32(0x007FFFFF)
"""The key of minus infinity."""


@always_inline
def sortable[S: Int](x: SIMD[F32, S]) -> SIMD[DType.uint32, S]:
    """Keys in the order of the numbers; both zeros have one key."""
    var bits = bitcast[DType.uint32, S](x + 0)
    var negative = (bits >> 31).eq(1)
    return bits ^ negative.select(
        SIMD[DType.uint32, S](0xFFFFFFFF), SIMD[DType.uint32, S](0x80000000)
    )


@fieldwise_init
struct Kept(ImplicitlyCopyable, Movable):
    """The tokens whose key is above `key`, and of those at `key` the first
    `ties`."""

    var key: UInt32
    var ties: Int
    var mass: Float64
    """Sum of their weights."""


@always_inline
def _ties(
    by_count: Bool, strict: Bool, missing: Float64, weight: Float64, ties: Int
) -> Int:
    """Fewest of `ties` tokens of one weight whose measure reaches `missing`,
    or exceeds it when `strict`."""
    var each = 1.0 if by_count else weight
    var needed = floor(missing / each) + 1 if strict else ceil(missing / each)
    return max(1, min(Int(min(needed, Float64(ties))), ties))


def descend[
    by_count: Bool, strict: Bool
](
    keys: Pointer[UInt32, _],
    weights: Pointer[Float32, _],
    n: Int,
    kept: Kept,
    target: Float64,
) -> Kept:
    """The shortest prefix of the kept tokens, by falling logit, that reaches a
    target.

    Parameters:
        by_count: Whether tokens are counted; else their weights are summed, and
            tokens of weight 0 do not exist.
        strict: Whether the target must be exceeded.

    Args:
        keys: `[n]` sortable keys.
        weights: `[n]` unnormalised probabilities.
        n: Vocabulary.
        kept: The tokens to choose from.
        target: Count or mass.

    Returns:
        The prefix; all that is kept if rounding leaves the target unreached.
    """
    var above = Float64(0)
    var mass_above = Float64(0)
    var prefix = UInt32(0)
    var ties = 0
    for level in range(4):
        var shift = UInt32(24 - 8 * level)
        var counts = Array[Int, BINS](fill=0)
        var masses = Array[Float64, BINS](fill=0)
        for i in range(n):
            var key = keys[unsafe_offset=i]
            if key < kept.key or (
                level > 0 and (key ^ prefix) >> (shift + 8) != 0
            ):
                continue
            var weight = weights[unsafe_offset=i]
            comptime if not by_count:
                if weight == 0:
                    continue
            var bin = Int((key >> shift) & 255)
            counts[bin] += 1
            masses[bin] += Float64(weight)
        var into = -1
        for down in range(BINS):
            var bin = BINS - 1 - down
            if counts[bin] == 0:
                continue
            if into >= 0:
                above += Float64(counts[into]) if by_count else masses[into]
                mass_above += masses[into]
            into = bin
            var reached = above + (
                Float64(counts[bin]) if by_count else masses[bin]
            )
            if reached > target or (not strict and reached == target):
                break
        if into < 0:  # nothing has any weight
            return kept
        prefix |= UInt32(into) << shift
        ties = counts[into]
        if level == 3:
            if prefix == kept.key:
                ties = min(ties, kept.ties)
            var weight = masses[into] / Float64(counts[into])
            ties = _ties(by_count, strict, target - above, weight, ties)
            mass_above += weight * Float64(ties)
    return Kept(prefix, ties, mass_above)


def sample_row(
    logits: Pointer[Float32, _],
    keys: Pointer[mut=True, UInt32, _],
    weights: Pointer[mut=True, Float32, _],
    vocab: Int,
    uniform: Float32,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
) -> Int32:
    """Chooses one token.

    NaN counts as -inf; a row of nothing else gives 0.

    Args:
        logits: `[vocab]` float32.
        keys: `[vocab]` scratch.
        weights: `[vocab]` scratch.
        vocab: Ids that may be chosen.
        uniform: In [0, 1).
        temperature: Above 0.
        top_k: Tokens kept, 0 for all.
        top_p: Mass kept of what top_k keeps, in (0, 1].

    Returns:
        The id.
    """
    var lowest = neg_inf[F32]()
    var largest = SIMD[F32, W](lowest)
    var i = 0
    while i + W <= vocab:
        var v = logits.unsafe_load[width=W](i)
        largest = v.gt(largest).select(v, largest)
        i += W
    var top = largest.reduce_max()
    while i < vocab:
        if logits[unsafe_offset=i] > top:
            top = logits[unsafe_offset=i]
        i += 1
    if top == lowest:
        return 0

    var total = SIMD[DType.float64, W](0)
    i = 0
    while i + W <= vocab:
        var v = logits.unsafe_load[width=W](i)
        v = v.ge(lowest).select(v, SIMD[F32, W](lowest))
        var weight = exp((v - top) / temperature)
        keys.unsafe_store(i, sortable(v))
        weights.unsafe_store(i, weight)
        total += weight.cast[DType.float64]()
        i += W
    var mass = total.reduce_add()
    while i < vocab:
        var v = logits[unsafe_offset=i]
        v = v if v >= lowest else lowest
        var weight = exp((v - top) / temperature)
        keys[unsafe_offset=i] = sortable[1](v)
        weights[unsafe_offset=i] = weight
        mass += Float64(weight)
        i += 1

    var kept = Kept(LOWEST, vocab, mass)
    if 0 < top_k and top_k < vocab:
        kept = descend[True, False](keys, weights, vocab, kept, Float64(top_k))
    if top_p < 1:
        var enough = Float64(top_p) * kept.mass
        kept = descend[False, False](keys, weights, vocab, kept, enough)
    var drawn = Float64(uniform) * kept.mass
    var chosen = descend[False, True](keys, weights, vocab, kept, drawn)
    var left = chosen.ties
    for id in range(vocab):
        if keys[unsafe_offset=id] == chosen.key:
            left -= 1
            if left == 0:
                return Int32(id)
    return 0


def sample_share(
    dst: Pointer[mut=True, Int32, _],
    logits: Pointer[Float32, _],
    uniform: Pointer[Float32, _],
    keys: Pointer[mut=True, UInt32, _],
    weights: Pointer[mut=True, Float32, _],
    rows: Int,
    width: Int,
    vocab: Int,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
    worker: Int,
    workers: Int,
):
    """One worker's rows of dst `[rows]`; logits are `[rows, width]`, keys and
    weights `[workers, vocab]`."""
    for r in range(
        first_tile(worker, workers, rows), first_tile(worker + 1, workers, rows)
    ):
        dst[unsafe_offset=r] = sample_row(
            logits.unsafe_offset(r * width),
            keys.unsafe_offset(worker * vocab),
            weights.unsafe_offset(worker * vocab),
            vocab,
            uniform[unsafe_offset=r],
            temperature,
            top_k,
            top_p,
        )
