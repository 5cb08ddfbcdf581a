"""What follows the q, k and v projections: bias, q/k norm, RoPE, and k and v
into the cache. One warp computes one head of one token."""
from std.math import sqrt
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    lane_id,
    warp_id,
)
from kernels.gpu.block import (
    MIN_BLOCKS,
    WARPS,
    quotient,
    size,
    threads_metadata,
)
from kernels.gpu.reduce import lanes_sum
from kernels.gpu.rope import rotate
from kernels.gpu.tile_op import F32
from kernels.kv_cache import (
    CacheShape,
    ContiguousCache,
    KVCache,
    PagedCache,
)


@fieldwise_init
struct ProjectedHead[origin: ImmOrigin](TrivialRegisterPassable):
    """A head's projection, biased and normed as its elements are read."""

    var projection: Pointer[Float32, Self.origin]
    """`[head_dim]`."""
    var bias: Pointer[Float32, Self.origin]
    """`[head_dim]`, read when `has_bias`."""
    var norm: Pointer[Float32, Self.origin]
    """`[head_dim]`, read when `has_norm`."""
    var has_bias: Bool
    var has_norm: Bool
    var scale: Float32
    """1 over the root mean square."""

    @always_inline
    def biased(self, i: Int) -> Float32:
        var y = self.projection[unsafe_offset=i]
        if self.has_bias:
            y += self.bias[unsafe_offset=i]
        return y

    @always_inline
    def at(self, i: Int) -> Float32:
        var y = self.biased(i)
        if self.has_norm:
            y *= self.scale * self.norm[unsafe_offset=i]
        return y


@always_inline
def rope_append_tile[
    t: DType, //
](
    dst: Pointer[mut=True, Scalar[t], _],
    projected: ProjectedHead[_],
    eps: Float32,
    angles: Pointer[Float32, _],
    head_dim: Int,
    rotary_dim: Int,
    lane: Int,
):
    """Computes one head of one token by one warp.

    Parameters:
        t: Dtype of dst.

    Args:
        dst: `[head_dim]`, in q or in the cache.
        projected: The head; its `scale` is computed here.
        eps: Epsilon of the norm.
        angles: The position's cosines, then its sines, `[rotary_dim]`.
        head_dim: Elements of the head.
        rotary_dim: Leading elements that rotate; 0 for v.
        lane: Number of the thread in its warp.
    """
    var head = projected
    if head.has_norm:
        var squares = Float32(0)
        for i in range(lane, head_dim, WARP_SIZE):
            var y = head.biased(i)
            squares = y.fma(y, squares)
        squares = lanes_sum[WARP_SIZE](squares / Float32(head_dim))
        head.scale = 1 / sqrt(squares + eps)
    var half = rotary_dim // 2
    for i in range(lane, half, WARP_SIZE):
        var turned = rotate(
            head.at(i),
            head.at(half + i),
            angles[unsafe_offset=i],
            angles[unsafe_offset=half + i],
        )
        dst[unsafe_offset=i] = turned[0].cast[t]()
        dst[unsafe_offset=half + i] = turned[1].cast[t]()
    for i in range(rotary_dim + lane, head_dim, WARP_SIZE):
        dst[unsafe_offset=i] = head.at(i).cast[t]()


@always_inline
def _rope_append[
    t: DType, C: KVCache, //
](
    q_out: MutPointer[Scalar[t], MutAnyOrigin],
    cache: MutPointer[Scalar[t], MutAnyOrigin],
    at: C,
    projected: ImmPointer[Float32, ImmutAnyOrigin],
    bias_q: ImmPointer[Float32, ImmutAnyOrigin],
    bias_k: ImmPointer[Float32, ImmutAnyOrigin],
    bias_v: ImmPointer[Float32, ImmutAnyOrigin],
    norm_q: ImmPointer[Float32, ImmutAnyOrigin],
    norm_k: ImmPointer[Float32, ImmutAnyOrigin],
    eps: Float32,
    table: ImmPointer[Float32, ImmutAnyOrigin],
    offsets: ImmPointer[Int32, ImmutAnyOrigin],
    start: ImmPointer[Int32, ImmutAnyOrigin],
    tokens: Int,
    heads: Int,
    layer: Int,
    rotary_dim: Int,
    has_bias: Bool,
    has_norm: Bool,
):
    """Shares the heads of all tokens out to the warps of the grid."""
    var kv_heads = at.extent().kv_heads
    var d = at.extent().head_dim
    var per_token = heads + 2 * kv_heads
    var b = 0
    for item in range(
        Int(block_idx.x) * WARPS + Int(warp_id()),
        tokens * per_token,
        Int(grid_dim.x) * WARPS,
    ):
        var token = quotient(item, per_token)
        var head = item - token * per_token
        # Items rise, so the search for the sequence goes on where it was.
        while token >= size(offsets[unsafe_offset=b + 1]):
            b += 1
        var position = (
            Int(start[unsafe_offset=b]) + token - size(offsets[unsafe_offset=b])
        )
        var is_q = head < heads
        var is_k = not is_q and head < heads + kv_heads
        var own = head
        if not is_q:
            own -= heads if is_k else heads + kv_heads
        var bias = bias_q if is_q else (bias_k if is_k else bias_v)
        var to = q_out.unsafe_offset((token * heads + own) * d)
        if not is_q:
            to = cache.unsafe_offset(
                at.offset(b, layer, 0 if is_k else 1, position, own)
            )
        rope_append_tile(
            to,
            ProjectedHead(
                projected.unsafe_offset(item * d),
                bias.unsafe_offset(own * d),
                norm_q if is_q else norm_k,
                has_bias,
                has_norm and (is_q or is_k),
                1,
            ),
            eps,
            table.unsafe_offset(position * rotary_dim),
            d,
            rotary_dim if is_q or is_k else 0,
            Int(lane_id()),
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=threads_metadata(),
    `nvvm.minctasm`=MIN_BLOCKS,
)
def rope_append[
    t: DType, paged: Bool
](
    q_out: MutPointer[Scalar[t], MutAnyOrigin],
    cache: MutPointer[Scalar[t], MutAnyOrigin],
    lookup: ImmPointer[UInt32, ImmutAnyOrigin],
    projected: ImmPointer[Float32, ImmutAnyOrigin],
    bias_q: ImmPointer[Float32, ImmutAnyOrigin],
    bias_k: ImmPointer[Float32, ImmutAnyOrigin],
    bias_v: ImmPointer[Float32, ImmutAnyOrigin],
    norm_q: ImmPointer[Float32, ImmutAnyOrigin],
    norm_k: ImmPointer[Float32, ImmutAnyOrigin],
    eps: Float32,
    table: ImmPointer[Float32, ImmutAnyOrigin],
    offsets: ImmPointer[Int32, ImmutAnyOrigin],
    start: ImmPointer[Int32, ImmutAnyOrigin],
    tokens: Int32,
    batch: Int32,
    heads: Int32,
    kv_heads: Int32,
    head_dim: Int32,
    rotary_dim: Int32,
    layers: Int32,
    layer: Int32,
    capacity: Int32,
    page_size: Int32,
    page_stride: Int64,
    has_bias: Int32,
    has_norm: Int32,
):
    """Finishes q and appends k and v to the cache.

    Parameters:
        t: Dtype of q and of the cache.
        paged: Whether the cache is MAX's pages (`PagedCache`), else
            `ContiguousCache`.

    Args:
        q_out: `[tokens, heads, head_dim]`.
        cache: The KV cache, written at each token's position.
        lookup: `[batch, capacity / page_size]`, read when `paged`.
        projected: `[tokens, heads + 2 * kv_heads, head_dim]` float32, q then k
            then v of a token.
        bias_q: `[heads, head_dim]`, read when `has_bias`.
        bias_k: `[kv_heads, head_dim]`, read when `has_bias`.
        bias_v: `[kv_heads, head_dim]`, read when `has_bias`.
        norm_q: `[head_dim]`, read when `has_norm`.
        norm_k: `[head_dim]`, read when `has_norm`.
        eps: Epsilon of the q/k norm.
        table: Cosines and sines `[positions, rotary_dim]`.
        offsets: `[batch + 1]` first token of each sequence.
        start: `[batch]` tokens already in the cache.
        tokens: Number of tokens.
        batch: Number of sequences.
        heads: Query heads.
        kv_heads: Heads of the cache.
        head_dim: Elements of a head.
        rotary_dim: Leading elements of a head that rotate, even.
        layers: Layers of the cache.
        layer: Decoder layer.
        capacity: Positions of a sequence.
        page_size: Positions of a page, used when `paged`.
        page_stride: Elements from a page to the next, used when `paged`.
        has_bias: Whether the projections have biases.
        has_norm: Whether q and k heads are RMS-normed before RoPE.
    """
    var shape = CacheShape(
        size(batch),
        size(layers),
        size(capacity),
        size(kv_heads),
        size(head_dim),
    )

    @always_inline
    def append[C: KVCache](at: C) {imm}:
        _rope_append(
            q_out,
            cache,
            at,
            projected,
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            eps,
            table,
            offsets,
            start,
            size(tokens),
            size(heads),
            size(layer),
            size(rotary_dim),
            has_bias != 0,
            has_norm != 0,
        )

    comptime if paged:
        append(PagedCache(shape, size(page_size), Int(page_stride), lookup))
    else:
        append(ContiguousCache(shape))
