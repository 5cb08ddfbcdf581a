"""Ops `attention` and `attention_paged` on GPUs: sequences of one new token by
`attention_decode` and `attention_combine`, longer ones by `attention_prefill`,
on Hopper by `attention_prefill_wgmma`."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.gpu.attention_decode import (
    SPLIT,
    attention_combine,
    attention_decode,
    partial_size,
)
from kernels.gpu.attention_prefill import attention_prefill
from kernels.gpu.attention_prefill_wgmma import attention_prefill_wgmma
from kernels.gpu.tile_op import F32
from kernels.kv_cache import CacheShape
from kernels.register.attention import check_attention
from kernels.register.gpu.kv_cache import DeviceCache, contiguous, paged
from kernels.register.gpu.launch import THREADS, blocks, by_wgmma

comptime QUERIES = 64
"""Rows of a query tile, to count blocks: the kernel walks whatever there is."""


def partials(batch: Int, heads: Int, cached: CacheShape) -> Int:
    """Floats of scratch that `launch_attention` needs."""
    return (
        batch
        * heads
        * ceildiv(cached.capacity, SPLIT)
        * partial_size(cached.head_dim)
    )


def _decode[
    t: DType, is_paged: Bool, //, D: Int, ROWS: Int
](
    ctx: DeviceContext,
    partial: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    cached: DeviceCache[is_paged],
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    batch: Int,
    heads: Int,
    layer: Int,
    splits: Int,
    scale: Float32,
    window: Int32,
) raises:
    """Enqueues the splits; `ROWS` query heads of a KV head share its keys."""
    ctx.enqueue_function[attention_decode[t, D, is_paged, ROWS]](
        partial,
        q,
        cache,
        cached.lookup,
        offsets,
        start,
        Int32(batch),
        Int32(heads),
        Int32(cached.shape.kv_heads),
        Int32(cached.shape.layers),
        Int32(layer),
        Int32(cached.shape.capacity),
        cached.page_size,
        cached.page_stride,
        Int32(splits),
        scale,
        window,
        grid_dim=blocks(batch * cached.shape.kv_heads * splits),
        block_dim=THREADS,
    )


def launch_attention[
    t: DType, is_paged: Bool, //, D: Int
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    partial: Pointer[mut=True, Float32, _],
    q: Pointer[Scalar[t], _],
    cache: Pointer[Scalar[t], _],
    cached: DeviceCache[is_paged],
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    batch: Int,
    tokens: Int,
    heads: Int,
    layer: Int,
    scale: Float32,
    window: Int32,
) raises:
    """Enqueues causal attention of a ragged batch.

    How long each sequence is stands on the device: both kinds of kernels are
    enqueued, and each leaves the other's sequences alone, unless there is one
    sequence only.

    Parameters:
        t: Dtype of q, of the cache and of the output.
        is_paged: Whether the cache is MAX's pages.
        D: The head_dim.

    Args:
        ctx: The device.
        dst: `[T, heads, D]`.
        partial: `[partials(...)]` float32.
        q: `[T, heads, D]`.
        cache: The KV cache.
        cached: Its shape and layout.
        offsets: `[batch + 1]`.
        start: `[batch]`.
        batch: Sequences.
        tokens: T, from 1.
        heads: Query heads.
        layer: Decoder layer.
        scale: Factor of the scores.
        window: Last keys a row sees, itself included; 0 for all.
    """
    var splits = ceildiv(cached.shape.capacity, SPLIT)
    if batch > 1 or tokens == 1:
        if heads > cached.shape.kv_heads:
            _decode[D, 4](
                ctx,
                partial,
                q,
                cache,
                cached,
                offsets,
                start,
                batch,
                heads,
                layer,
                splits,
                scale,
                window,
            )
        else:
            _decode[D, 1](
                ctx,
                partial,
                q,
                cache,
                cached,
                offsets,
                start,
                batch,
                heads,
                layer,
                splits,
                scale,
                window,
            )
        ctx.enqueue_function[attention_combine[t, D]](
            dst,
            partial,
            offsets,
            start,
            Int32(batch),
            Int32(heads),
            Int32(splits),
            window,
            grid_dim=blocks(batch * heads),
            block_dim=THREADS,
        )
    if tokens > 1:
        comptime prefill = (
            attention_prefill_wgmma[t, D, is_paged] if by_wgmma[t]() else (
                attention_prefill[t, D, is_paged]
            )
        )
        ctx.enqueue_function[prefill](
            dst,
            q,
            cache,
            cached.lookup,
            offsets,
            start,
            Int32(batch),
            Int32(heads),
            Int32(cached.shape.kv_heads),
            Int32(cached.shape.layers),
            Int32(layer),
            Int32(cached.shape.capacity),
            cached.page_size,
            cached.page_stride,
            scale,
            window,
            Int32(2),
            grid_dim=blocks(heads * (ceildiv(tokens, QUERIES) + batch - 1)),
            block_dim=THREADS,
        )


def _attention[
    t: DType, is_paged: Bool, //, head_dim: Int
](
    ctx: DeviceContext,
    output: OutputTensor[dtype=t, rank=3, ...],
    cache: MutableInputTensor[dtype=t, rank=6, ...],
    cached: DeviceCache[is_paged],
    q: InputTensor[dtype=t, rank=3, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
    scale: Float32,
    window: Int32,
) raises:
    """Checks a call and enqueues it."""
    var tokens = q.dim_size(0)
    var heads = q.dim_size(1)
    check_attention[head_dim](
        "attention", cached.shape, heads, offsets, start, layer, window
    )
    if tokens == 0:
        return
    var batch = start.dim_size(0)
    var partial = ctx.enqueue_create_buffer[F32](
        partials(batch, heads, cached.shape)
    )
    launch_attention[head_dim](
        ctx,
        output.unsafe_ptr(),
        partial.unsafe_ptr(),
        q.unsafe_ptr(),
        cache.unsafe_ptr(),
        cached,
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        batch,
        tokens,
        heads,
        Int(layer),
        scale,
        window,
    )
    # Pointers alone would not keep it until here.
    _ = partial^


@extensibility.register("attention", type="gpu")
struct AttentionGPU:
    """Causal attention of q[T, heads, head_dim] over the KV cache
    `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        t: DType, //, head_dim: Int, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        q: InputTensor[dtype=t, rank=3, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        _attention[head_dim](
            ctx,
            output,
            cache,
            contiguous(cache),
            q,
            offsets,
            start,
            layer,
            scale,
            window,
        )


@extensibility.register("attention_paged", type="gpu")
struct AttentionPagedGPU:
    """`attention` over MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        t: DType, //, head_dim: Int, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        blocks: MutableInputTensor[dtype=t, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        q: InputTensor[dtype=t, rank=3, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        _attention[head_dim](
            ctx,
            output,
            blocks,
            paged(blocks, lookup, page_stride),
            q,
            offsets,
            start,
            layer,
            scale,
            window,
        )
