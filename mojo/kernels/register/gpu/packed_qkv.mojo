"""Ops `qkv_rope_append_int8` and `qkv_rope_append_int4` on GPUs: projections by
GEMV, however many rows of x there are."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.gpu.qkv import qkv_gemv
from kernels.gpu.tile_op import F32
from kernels.register.gpu.kv_cache import contiguous
from kernels.register.gpu.launch import THREADS, blocks, gemv_tiles
from kernels.register.gpu.packed import BATCH, PackedMatrix
from kernels.register.gpu.qkv_rope_append import launch_rope_append
from kernels.register.qkv_rope_append import check_heads, check_vectors


def _qkv_rope_append[
    t: DType, w: DType, //, head_dim: Int, has_bias: Bool, has_norm: Bool
](
    ctx: DeviceContext,
    op: StaticString,
    output: OutputTensor[dtype=t, rank=3, ...],
    cache: MutableInputTensor[dtype=t, rank=6, ...],
    x: InputTensor[dtype=t, rank=2, ...],
    wq: PackedMatrix[w],
    wk: PackedMatrix[w],
    wv: PackedMatrix[w],
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
    var k = x.dim_size(1)
    var cached = contiguous(cache)
    check_heads[head_dim](
        op, cached.shape, wq.n, wk.n, wv.n, table, offsets, start, layer
    )
    check_vectors[head_dim, has_bias, has_norm](
        wq.n, wk.n, bias_q, bias_k, bias_v, norm_q, norm_k
    )
    if tokens == 0:
        return
    var projected = ctx.enqueue_create_buffer[F32](tokens * (wq.n + 2 * wk.n))
    var dst = projected.unsafe_ptr()

    @always_inline
    def launch[batch: Int]() raises {imm}:
        ctx.enqueue_function[qkv_gemv[w, t, batch]](
            dst,
            x.unsafe_ptr(),
            wq.data,
            wq.scales,
            wq.zeros,
            wk.data,
            wk.scales,
            wk.zeros,
            wv.data,
            wv.scales,
            wv.zeros,
            Int32(tokens),
            Int32(wq.n),
            Int32(wk.n),
            Int32(k),
            grid_dim=blocks(
                gemv_tiles[1](tokens, batch, wq.n)
                + 2 * gemv_tiles[1](tokens, batch, wk.n)
            ),
            block_dim=THREADS,
        )

    # Of int4, one with the offsets of several rows of x would need more scalar
    # registers than CDNA has.
    comptime several = 1 if w == DType.uint8 else BATCH
    if tokens == 1:
        launch[1]()
    else:
        launch[several]()
    launch_rope_append[has_bias, has_norm](
        ctx,
        output.unsafe_ptr(),
        cache.unsafe_ptr(),
        cached,
        dst,
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
        wq.n // head_dim,
        Int(layer),
    )
    # Pointers alone would not keep it until here.
    _ = projected^


@extensibility.register("qkv_rope_append_int8", type="gpu")
struct QKVRopeAppendInt8GPU:
    """Op `qkv_rope_append` of matrices in int8."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=DType.int8, rank=2, ...],
        wq_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wk: InputTensor[dtype=DType.int8, rank=2, ...],
        wk_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wv: InputTensor[dtype=DType.int8, rank=2, ...],
        wv_scales: InputTensor[dtype=DType.float16, rank=2, ...],
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
        comptime op = "qkv_rope_append_int8"
        comptime Matrix = PackedMatrix[DType.int8]
        var k = x.dim_size(1)
        _qkv_rope_append[head_dim, has_bias, has_norm](
            ctx,
            op,
            output,
            cache,
            x,
            Matrix(op, k, wq, wq_scales),
            Matrix(op, k, wk, wk_scales),
            Matrix(op, k, wv, wv_scales),
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


@extensibility.register("qkv_rope_append_int4", type="gpu")
struct QKVRopeAppendInt4GPU:
    """Op `qkv_rope_append` of matrices in int4."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=DType.uint8, rank=2, ...],
        wq_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wq_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        wk: InputTensor[dtype=DType.uint8, rank=2, ...],
        wk_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wk_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        wv: InputTensor[dtype=DType.uint8, rank=2, ...],
        wv_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wv_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
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
        comptime op = "qkv_rope_append_int4"
        comptime Matrix = PackedMatrix[DType.uint8]
        var k = x.dim_size(1)
        _qkv_rope_append[head_dim, has_bias, has_norm](
            ctx,
            op,
            output,
            cache,
            x,
            Matrix(op, k, wq, wq_scales, wq_zeros),
            Matrix(op, k, wk, wk_scales, wk_zeros),
            Matrix(op, k, wv, wv_scales, wv_zeros),
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
