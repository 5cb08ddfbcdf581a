"""Ops `qkv_rope_append` and `qkv_rope_append_paged` on GPUs: one launch projects,
one finishes heads."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.gpu.rope_append import rope_append
from kernels.gpu.tile_op import F32
from kernels.register.gpu.kv_cache import DeviceCache, contiguous, paged
from kernels.register.gpu.launch import THREADS, blocks
from kernels.register.gpu.qkv import launch_qkv
from kernels.register.qkv_rope_append import check_qkv, check_vectors


def launch_rope_append[
    t: DType, is_paged: Bool, //, has_bias: Bool, has_norm: Bool
](
    ctx: DeviceContext,
    q: Pointer[mut=True, Scalar[t], _],
    cache: Pointer[mut=True, Scalar[t], _],
    cached: DeviceCache[is_paged],
    projected: Pointer[Float32, _],
    bias_q: Pointer[Float32, _],
    bias_k: Pointer[Float32, _],
    bias_v: Pointer[Float32, _],
    norm_q: Pointer[Float32, _],
    norm_k: Pointer[Float32, _],
    eps: Float32,
    table: Pointer[Float32, _],
    rotary_dim: Int,
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    batch: Int,
    tokens: Int,
    heads: Int,
    layer: Int,
) raises:
    """Enqueues what `rope_append` does to projected heads.

    Parameters:
        t: Dtype of q and of the cache.
        is_paged: Whether the cache is MAX's pages.
        has_bias: Whether q, k and v have biases.
        has_norm: Whether q and k heads are RMS-normed.

    Args:
        ctx: The device.
        q: `[T, heads, head_dim]`.
        cache: The KV cache.
        cached: Its shape and layout.
        projected: `[T, heads + 2 kv_heads, head_dim]` float32.
        bias_q: `[heads * head_dim]`.
        bias_k: `[kv_heads * head_dim]`.
        bias_v: `[kv_heads * head_dim]`.
        norm_q: `[head_dim]`.
        norm_k: `[head_dim]`.
        eps: Epsilon of the norms.
        table: `[positions, rotary_dim]`.
        rotary_dim: Leading elements of a head that rotate.
        offsets: `[batch + 1]`.
        start: `[batch]`.
        batch: Sequences.
        tokens: T, from 1.
        heads: Query heads.
        layer: Decoder layer.
    """
    ctx.enqueue_function[rope_append[t, is_paged]](
        q,
        cache,
        cached.lookup,
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
        Int32(tokens),
        Int32(batch),
        Int32(heads),
        Int32(cached.shape.kv_heads),
        Int32(cached.shape.head_dim),
        Int32(rotary_dim),
        Int32(cached.shape.layers),
        Int32(layer),
        Int32(cached.shape.capacity),
        cached.page_size,
        cached.page_stride,
        Int32(1 if has_bias else 0),
        Int32(1 if has_norm else 0),
        grid_dim=blocks(tokens),
        block_dim=THREADS,
    )


def _qkv_rope_append[
    t: DType,
    is_paged: Bool,
    //,
    head_dim: Int,
    has_bias: Bool,
    has_norm: Bool,
    tf32: Bool,
](
    ctx: DeviceContext,
    output: OutputTensor[dtype=t, rank=3, ...],
    cache: MutableInputTensor[dtype=t, rank=6, ...],
    cached: DeviceCache[is_paged],
    x: InputTensor[dtype=t, rank=2, ...],
    wq: InputTensor[dtype=t, rank=2, ...],
    wk: InputTensor[dtype=t, rank=2, ...],
    wv: InputTensor[dtype=t, rank=2, ...],
    bias_q: InputTensor[dtype=F32, rank=1, ...],
    bias_k: InputTensor[dtype=F32, rank=1, ...],
    bias_v: InputTensor[dtype=F32, rank=1, ...],
    norm_q: InputTensor[dtype=F32, rank=1, ...],
    norm_k: InputTensor[dtype=F32, rank=1, ...],
    eps: Float32,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
) raises:
    """Checks a call and enqueues it."""
    var tokens = x.dim_size(0)
    check_qkv[head_dim](
        "qkv_rope_append",
        cached.shape,
        tokens,
        x.dim_size(1),
        wq,
        wk,
        wv,
        table,
        offsets,
        start,
        layer,
    )
    check_vectors[head_dim, has_bias, has_norm](
        wq.dim_size(0), wk.dim_size(0), bias_q, bias_k, bias_v, norm_q, norm_k
    )
    if tokens == 0:
        return
    var nq = wq.dim_size(0)
    var nk = wk.dim_size(0)
    var projected = ctx.enqueue_create_buffer[F32](tokens * (nq + 2 * nk))
    launch_qkv[tf32](
        ctx,
        projected.unsafe_ptr(),
        x.unsafe_ptr(),
        wq.unsafe_ptr(),
        wk.unsafe_ptr(),
        wv.unsafe_ptr(),
        tokens,
        nq,
        nk,
        x.dim_size(1),
    )
    launch_rope_append[has_bias, has_norm](
        ctx,
        output.unsafe_ptr(),
        cache.unsafe_ptr(),
        cached,
        projected.unsafe_ptr(),
        bias_q.unsafe_ptr(),
        bias_k.unsafe_ptr(),
        bias_v.unsafe_ptr(),
        norm_q.unsafe_ptr(),
        norm_k.unsafe_ptr(),
        eps,
        table.unsafe_ptr(),
        table.dim_size(1),
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        start.dim_size(0),
        tokens,
        nq // head_dim,
        Int(layer),
    )
    # Pointers alone would not keep it until here.
    _ = projected^


@extensibility.register("qkv_rope_append", type="gpu")
struct QKVRopeAppendGPU:
    """Projects, norms and rotates q, k, v; k and v go into the cache
    `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
        tf32: Bool = False,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=t, rank=2, ...],
        wk: InputTensor[dtype=t, rank=2, ...],
        wv: InputTensor[dtype=t, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        ctx: DeviceContext,
    ) raises:
        _qkv_rope_append[head_dim, has_bias, has_norm, tf32](
            ctx,
            output,
            cache,
            contiguous(cache),
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
            layer,
        )


@extensibility.register("qkv_rope_append_paged", type="gpu")
struct QKVRopeAppendPagedGPU:
    """`qkv_rope_append` into MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
        tf32: Bool = False,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        blocks: MutableInputTensor[dtype=t, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=t, rank=2, ...],
        wk: InputTensor[dtype=t, rank=2, ...],
        wv: InputTensor[dtype=t, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        ctx: DeviceContext,
    ) raises:
        _qkv_rope_append[head_dim, has_bias, has_norm, tf32](
            ctx,
            output,
            blocks,
            paged(blocks, lookup, page_stride),
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
            layer,
        )
