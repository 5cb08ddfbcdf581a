"""Q, K and V projections with bias, q/k norm and RoPE, K and V into the cache.
"""
from std.math import ceildiv, sqrt
from kernels.dot_tile import F32, OUT, W, dot_tile, row_offsets, store_first
from kernels.kv_cache import KVCache
from kernels.linear import MAX_GEMV_ROWS
from kernels.rms_norm import mean_square
from kernels.rope import rope_rotate
from kernels.workers import first_tile

comptime TOKENS = 64
"""Tokens of a tile: their projections wait in scratch for bias, norm, RoPE."""


@always_inline
def store_row[
    t: DType, //
](dst: Pointer[mut=True, Scalar[t], _], row: Pointer[Float32, _], n: Int):
    """Rounds a float32 row of n elements to dst."""
    var i = 0
    while i + W <= n:
        dst.unsafe_store(i, row.unsafe_load[width=W](i).cast[t]())
        i += W
    while i < n:
        dst[unsafe_offset=i] = row[unsafe_offset=i].cast[t]()
        i += 1


@always_inline
def _project[
    xt: DType, wt: DType, //, MR: Int, by_row: Bool
](
    scratch: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[xt], _],
    w: Pointer[Scalar[wt], _],
    m0: Int,
    m1: Int,
    d: Int,
    k: Int,
):
    """Scratch `[m1 - m0, d]` = x rows m0 .. m1 - 1 by one head's `[d, k]`."""
    comptime NR = OUT // MR
    for j in range(0, d, NR):
        var w_rows = row_offsets[NR](j, d - 1, k)
        for i in range(m0, m1, MR):
            var x_rows = row_offsets[MR](i, m1 - 1, k)
            var y = dot_tile[MR, NR, by_row](x, x_rows, w, w_rows, k)
            comptime for r in range(MR):
                if i + r < m1:
                    store_first(
                        scratch.unsafe_offset((i + r - m0) * d + j),
                        y.slice[NR, offset=r * NR](),
                        d - j,
                    )


@fieldwise_init
struct QKVTiles(ImplicitlyCopyable, Movable):
    """Tiles: blocks of tokens, each over all q, k and v heads."""

    var tokens: Int
    var heads: Int
    var kv_heads: Int
    var head_dim: Int
    var rotary_dim: Int
    var k: Int

    def per_block(self) -> Int:
        return self.heads + 2 * self.kv_heads

    def count(self) -> Int:
        return ceildiv(self.tokens, TOKENS) * self.per_block()

    def work(self) -> Int:
        """Multiply-adds of the projections."""
        return self.tokens * self.per_block() * self.head_dim * self.k


@always_inline
def qkv_rope_append_tile[
    xt: DType,
    wt: DType,
    ct: DType,
    C: KVCache,
    //,
    has_bias: Bool,
    has_norm: Bool,
](
    q_out: Pointer[mut=True, Scalar[ct], _],
    cache: Pointer[mut=True, Scalar[ct], _],
    x: Pointer[Scalar[xt], _],
    wq: Pointer[Scalar[wt], _],
    wk: Pointer[Scalar[wt], _],
    wv: Pointer[Scalar[wt], _],
    bias_q: Pointer[Float32, _],
    bias_k: Pointer[Float32, _],
    bias_v: Pointer[Float32, _],
    norm_q: Pointer[Float32, _],
    norm_k: Pointer[Float32, _],
    eps: Float32,
    table: Pointer[Float32, _],
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    at: C,
    layer: Int,
    tiles: QKVTiles,
    tile: Int,
    scratch: Pointer[mut=True, Float32, _],
):
    """Computes one head of one block of tokens.

    Parameters:
        xt: Activation dtype.
        wt: Weight dtype.
        ct: Dtype of q and of the cache.
        C: Layout of the cache.
        has_bias: Whether the projections have biases.
        has_norm: Whether q and k heads are RMS-normed before RoPE.

    Args:
        q_out: `[T, heads, head_dim]`.
        cache: The KV cache, written at each token's position.
        x: `[T, K]`.
        wq: `[heads * head_dim, K]`.
        wk: `[kv_heads * head_dim, K]`.
        wv: `[kv_heads * head_dim, K]`.
        bias_q: `[heads * head_dim]`, read when `has_bias`.
        bias_k: `[kv_heads * head_dim]`, read when `has_bias`.
        bias_v: `[kv_heads * head_dim]`, read when `has_bias`.
        norm_q: `[head_dim]`, read when `has_norm`.
        norm_k: `[head_dim]`, read when `has_norm`.
        eps: Epsilon of the q/k norm.
        table: Cosines and sines `[positions, rotary_dim]`.
        offsets: `[B + 1]` first token of each sequence.
        start: `[B]` tokens already in the cache.
        at: Layout of the cache.
        layer: Decoder layer.
        tiles: The tiling.
        tile: Which tile.
        scratch: `[TOKENS, head_dim]` float32.
    """
    var d = tiles.head_dim
    var m0 = tile // tiles.per_block() * TOKENS
    var m1 = min(m0 + TOKENS, tiles.tokens)
    var head = tile % tiles.per_block()
    var is_q = head < tiles.heads
    var is_k = not is_q and head < tiles.heads + tiles.kv_heads
    if not is_q:
        head -= tiles.heads if is_k else tiles.heads + tiles.kv_heads

    var w = wq if is_q else (wk if is_k else wv)
    var rows = w.unsafe_offset(head * d * tiles.k)
    if tiles.tokens == 1:
        _project[1, True](scratch, x, rows, m0, m1, d, tiles.k)
    elif tiles.tokens <= MAX_GEMV_ROWS:
        _project[4, True](scratch, x, rows, m0, m1, d, tiles.k)
    else:
        _project[4, False](scratch, x, rows, m0, m1, d, tiles.k)

    var b = 0
    for t in range(m0, m1):
        while t >= Int(offsets[unsafe_offset=b + 1]):
            b += 1
        var position = (
            Int(start[unsafe_offset=b]) + t - Int(offsets[unsafe_offset=b])
        )
        var row = scratch.unsafe_offset((t - m0) * d)
        comptime if has_bias:
            var bias = bias_q if is_q else (bias_k if is_k else bias_v)
            for i in range(d):
                row[unsafe_offset=i] += bias[unsafe_offset=head * d + i]
        if is_q or is_k:
            comptime if has_norm:
                var weight = norm_q if is_q else norm_k
                var scale = 1 / sqrt(mean_square(row, d) + eps)
                for i in range(d):
                    row[unsafe_offset=i] *= scale * weight[unsafe_offset=i]
            rope_rotate(
                row,
                table.unsafe_offset(position * tiles.rotary_dim),
                tiles.rotary_dim,
            )
        if is_q:
            store_row(q_out.unsafe_offset((t * tiles.heads + head) * d), row, d)
        else:
            store_row(
                cache.unsafe_offset(
                    at.offset(b, layer, 0 if is_k else 1, position, head)
                ),
                row,
                d,
            )


@always_inline
def qkv_rope_append_share[
    xt: DType,
    wt: DType,
    ct: DType,
    C: KVCache,
    //,
    D: Int,
    has_bias: Bool,
    has_norm: Bool,
](
    q_out: Pointer[mut=True, Scalar[ct], _],
    cache: Pointer[mut=True, Scalar[ct], _],
    x: Pointer[Scalar[xt], _],
    wq: Pointer[Scalar[wt], _],
    wk: Pointer[Scalar[wt], _],
    wv: Pointer[Scalar[wt], _],
    bias_q: Pointer[Float32, _],
    bias_k: Pointer[Float32, _],
    bias_v: Pointer[Float32, _],
    norm_q: Pointer[Float32, _],
    norm_k: Pointer[Float32, _],
    eps: Float32,
    table: Pointer[Float32, _],
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    at: C,
    layer: Int,
    tiles: QKVTiles,
    worker: Int,
    workers: Int,
):
    """One worker's tiles; arguments as of `qkv_rope_append_tile`."""
    var scratch = Array[Float32, TOKENS * D](uninitialized=True)
    for tile in range(
        first_tile(worker, workers, tiles.count()),
        first_tile(worker + 1, workers, tiles.count()),
    ):
        qkv_rope_append_tile[has_bias, has_norm](
            q_out,
            cache,
            x,
            wq,
            wk,
            wv,
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            eps,
            table,
            offsets,
            start,
            at,
            layer,
            tiles,
            tile,
            scratch.unsafe_ptr(),
        )
