"""Attention of a ragged batch: which tiles there are, and who computes them.

Sequences with one new token take `attention_decode_tile`, longer ones
`attention_prefill_tile`; decode leaves splits that `combine_share` merges once
all shares of `attention_share` are done.
"""
from std.math import ceildiv
from kernels.attention_decode import (
    SPLIT,
    attention_decode_tile,
    combine_splits,
    first_key,
    partial_size,
)
from kernels.attention_prefill import (
    KEYS,
    QUERIES,
    attention_prefill_tile,
    values_size,
)
from kernels.kv_cache import KVCache
from kernels.workers import first_tile


@fieldwise_init
struct Sequence(ImplicitlyCopyable, Movable):
    """One sequence's rows, visible keys and tiles."""

    var row: Int
    var rows: Int
    var start: Int
    var low: Int
    var splits: Int
    var tile: Int
    var tiles: Int
    var partial: Int


struct AttentionTiles(Copyable, Movable):
    """Tiles of a batch: per sequence and head, a block of rows or of keys."""

    var heads: Int
    var kv_heads: Int
    var window: Int
    var sequences: List[Sequence]
    var count: Int
    var work: Int
    """Multiply-adds of the scores."""
    var partials: Int
    """Floats of scratch that the splits of decode need."""

    def __init__(
        out self,
        offsets: Pointer[Int32, _],
        start: Pointer[Int32, _],
        b: Int,
        heads: Int,
        kv_heads: Int,
        head_dim: Int,
        window: Int,
    ):
        """Lays out the tiles of b sequences, `offsets` `[b + 1]` and `start`
        `[b]`."""
        self.heads = heads
        self.kv_heads = kv_heads
        self.window = window
        self.sequences = List[Sequence](capacity=b)
        self.count = 0
        self.work = 0
        self.partials = 0
        for i in range(b):
            var row = Int(offsets[unsafe_offset=i])
            var rows = Int(offsets[unsafe_offset=i + 1]) - row
            var s = Int(start[unsafe_offset=i])
            var low = first_key(s, window)
            var splits = ceildiv(max(0, s + 1 - low // SPLIT * SPLIT), SPLIT)
            var tiles = heads * ceildiv(rows, QUERIES)
            if rows == 1:
                tiles = kv_heads * splits
            self.sequences.append(
                Sequence(
                    row, rows, s, low, splits, self.count, tiles, self.partials
                )
            )
            self.count += tiles
            self.work += rows * heads * max(0, s + rows) * head_dim
            if rows == 1:
                self.partials += heads * splits * partial_size(head_dim)


@always_inline
def attention_share[
    t: DType, C: KVCache, //, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    partial: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    at: C,
    layer: Int,
    scale: Float32,
    tiles: AttentionTiles,
    worker: Int,
    workers: Int,
):
    """One worker's tiles.

    Parameters:
        t: Dtype of q, of the cache and of the output.
        C: Layout of the cache.
        D: The head_dim.

    Args:
        dst: `[T, heads, D]`; decode's rows are left to `combine_share`.
        partial: `[tiles.partials]` float32.
        q: `[T, heads, D]`.
        cache: The KV cache.
        at: Its layout.
        layer: Decoder layer.
        scale: Factor of the scores.
        tiles: The tiles.
        worker: Which worker.
        workers: How many there are.
    """
    var heads = tiles.heads
    var group = heads // tiles.kv_heads
    var scores = Array[Float32, QUERIES * KEYS](uninitialized=True)
    var acc = Array[Float32, values_size(D)](uninitialized=True)
    # Round robin: causal tiles grow along a prompt, and a sequence's last split
    # is short.
    var i = 0
    for tile in range(worker, tiles.count, workers):
        while tile >= tiles.sequences[i].tile + tiles.sequences[i].tiles:
            i += 1
        var s = tiles.sequences[i]
        var local = tile - s.tile
        var q_rows = q.unsafe_offset(s.row * heads * D)
        if s.rows == 1:
            attention_decode_tile[D](
                partial.unsafe_offset(s.partial),
                q_rows,
                cache,
                at,
                i,
                layer,
                local % tiles.kv_heads,
                local // tiles.kv_heads,
                s.splits,
                group,
                s.low,
                s.start + 1,
                scale,
                scores.unsafe_ptr(),
            )
        else:
            var r0 = local // heads * QUERIES
            var head = local % heads
            attention_prefill_tile[D](
                dst.unsafe_offset(s.row * heads * D),
                q_rows,
                cache,
                at,
                i,
                layer,
                head,
                heads,
                head // group,
                r0,
                min(r0 + QUERIES, s.rows),
                s.start,
                tiles.window,
                scale,
                scores.unsafe_ptr(),
                acc.unsafe_ptr(),
            )


@always_inline
def combine_share[
    t: DType, //, D: Int
](
    dst: Pointer[mut=True, Scalar[t], _],
    partial: Pointer[Float32, _],
    tiles: AttentionTiles,
    worker: Int,
    workers: Int,
):
    """One worker's heads of the rows that `attention_share` left in splits.

    Parameters:
        t: Dtype of the output.
        D: The head_dim.

    Args:
        dst: `[T, heads, D]`.
        partial: `[tiles.partials]` float32.
        tiles: The tiles.
        worker: Which worker.
        workers: How many there are.
    """
    for s in tiles.sequences:
        if s.rows != 1:
            continue
        for h in range(
            first_tile(worker, workers, tiles.heads),
            first_tile(worker + 1, workers, tiles.heads),
        ):
            combine_splits[D](
                dst.unsafe_offset((s.row * tiles.heads + h) * D),
                partial.unsafe_offset(
                    s.partial + h * s.splits * partial_size(D)
                ),
                s.splits,
            )
