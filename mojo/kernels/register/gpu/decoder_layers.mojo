"""Ops `decoder_layers` and `decoder_layers_paged` on GPUs: the launches of several
layers."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.gpu.tile_op import F32
from kernels.register.attention import check_attention
from kernels.register.decoder_layers import (
    MATRICES,
    LayerVectors,
    check_layers,
)
from kernels.register.gpu.attention import launch_attention, partials
from kernels.register.gpu.gate_up_silu import launch_gate_up_silu
from kernels.register.gpu.kv_cache import DeviceCache, contiguous, paged
from kernels.register.gpu.linear import launch_linear
from kernels.register.gpu.qkv import launch_qkv
from kernels.register.gpu.qkv_rope_append import launch_rope_append
from kernels.register.gpu.rms_norm import launch_rms_norm
from kernels.register.qkv_rope_append import check_qkv


def _decoder_layers[
    t: DType,
    is_paged: Bool,
    matrix_count: Int,
    //,
    head_dim: Int,
    has_bias: Bool,
    has_norm: Bool,
    tf32: Bool,
](
    ctx: DeviceContext,
    output: OutputTensor[dtype=F32, rank=2, ...],
    normed: OutputTensor[dtype=t, rank=2, ...],
    q: OutputTensor[dtype=t, rank=2, ...],
    attended: OutputTensor[dtype=t, rank=2, ...],
    middle: OutputTensor[dtype=F32, rank=2, ...],
    gated: OutputTensor[dtype=t, rank=2, ...],
    cache: MutableInputTensor[dtype=t, rank=6, ...],
    cached: DeviceCache[is_paged],
    x: InputTensor[dtype=F32, rank=2, ...],
    matrices: InputVariadicTensors[dtype=t, rank=2, size=matrix_count, ...],
    vectors: InputTensor[dtype=F32, rank=1, ...],
    windows: InputTensor[dtype=DType.int32, rank=1, ...],
    first: Int32,
    eps: Float32,
    scale: Float32,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
) raises:
    """Checks a call and enqueues it.

    Nine launches a layer for decode: `rms_norm`, `qkv`, `rope_append`,
    `attention_decode`, `attention_combine`, `linear`, `rms_norm`,
    `gate_up_silu`, `linear`.
    """
    comptime NAME = StaticString("decoder_layers")
    comptime LAYERS = matrix_count // MATRICES
    var m = x.dim_size(0)
    var k = x.dim_size(1)
    var nq = matrices[0].dim_size(0)
    var nk = matrices[1].dim_size(0)
    var n = matrices[4].dim_size(0)
    var batch = start.dim_size(0)
    var heads = nq // head_dim
    var last = first + Int32(LAYERS - 1)
    check_qkv[head_dim](
        NAME,
        cached.shape,
        m,
        k,
        matrices[0],
        matrices[1],
        matrices[2],
        table,
        offsets,
        start,
        last,
    )
    check_attention[head_dim](
        NAME, cached.shape, heads, offsets, start, last, 0
    )
    var at = LayerVectors.of[head_dim, has_bias, has_norm](k, nq, nk)
    check_layers[matrix_count](
        m, k, matrices, vectors.dim_size(0), at.size, windows.dim_size(0)
    )
    if m == 0:
        return
    var projected = ctx.enqueue_create_buffer[F32](m * (nq + 2 * nk))
    var partial = ctx.enqueue_create_buffer[F32](
        partials(batch, heads, cached.shape)
    )
    var out = output.unsafe_ptr()
    var rows = start.unsafe_ptr()  # no op here gathers
    comptime for layer in range(LAYERS):
        comptime W = layer * MATRICES
        var v = vectors.unsafe_ptr().unsafe_offset(layer * at.size)
        var residual = x.unsafe_ptr()
        comptime if layer > 0:
            residual = rebind[type_of(residual)](out)
        launch_rms_norm(ctx, normed.unsafe_ptr(), residual, v, m, k, eps)
        launch_qkv[tf32](
            ctx,
            projected.unsafe_ptr(),
            normed.unsafe_ptr(),
            matrices[W].unsafe_ptr(),
            matrices[W + 1].unsafe_ptr(),
            matrices[W + 2].unsafe_ptr(),
            m,
            nq,
            nk,
            k,
        )
        launch_rope_append[has_bias, has_norm](
            ctx,
            q.unsafe_ptr(),
            cache.unsafe_ptr(),
            cached,
            projected.unsafe_ptr(),
            v.unsafe_offset(at.bias_q),
            v.unsafe_offset(at.bias_k),
            v.unsafe_offset(at.bias_v),
            v.unsafe_offset(at.norm_q),
            v.unsafe_offset(at.norm_k),
            eps,
            table.unsafe_ptr(),
            table.dim_size(1),
            offsets.unsafe_ptr(),
            start.unsafe_ptr(),
            batch,
            m,
            heads,
            Int(first) + layer,
        )
        launch_attention[head_dim](
            ctx,
            attended.unsafe_ptr(),
            partial.unsafe_ptr(),
            q.unsafe_ptr(),
            cache.unsafe_ptr(),
            cached,
            offsets.unsafe_ptr(),
            start.unsafe_ptr(),
            batch,
            m,
            heads,
            Int(first) + layer,
            scale,
            windows.unsafe_ptr()[unsafe_offset=layer],
        )
        launch_linear[True, False, tf32](
            ctx,
            middle.unsafe_ptr(),
            attended.unsafe_ptr(),
            matrices[W + 3].unsafe_ptr(),
            residual,
            rows,
            m,
            k,
            nq,
        )
        launch_rms_norm(
            ctx,
            normed.unsafe_ptr(),
            middle.unsafe_ptr(),
            v.unsafe_offset(k),
            m,
            k,
            eps,
        )
        launch_gate_up_silu[tf32](
            ctx,
            gated.unsafe_ptr(),
            normed.unsafe_ptr(),
            matrices[W + 4].unsafe_ptr(),
            matrices[W + 5].unsafe_ptr(),
            m,
            n,
            k,
        )
        launch_linear[True, False, tf32](
            ctx,
            out,
            gated.unsafe_ptr(),
            matrices[W + 6].unsafe_ptr(),
            middle.unsafe_ptr(),
            rows,
            m,
            k,
            n,
        )
    # Pointers alone would not keep them until here.
    _ = projected^
    _ = partial^


@extensibility.register("decoder_layers", type="gpu")
struct DecoderLayersGPU:
    """Runs T tokens through layers `first`, `first` + 1, ...: each is
    out = m + mlp(norm(m)) with m = x + attention(norm(x))."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        matrix_count: Int,
        target: StaticString,
        tf32: Bool = False,
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=t, rank=2, ...],
        q: OutputTensor[dtype=t, rank=2, ...],
        attended: OutputTensor[dtype=t, rank=2, ...],
        middle: OutputTensor[dtype=F32, rank=2, ...],
        gated: OutputTensor[dtype=t, rank=2, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        matrices: InputVariadicTensors[dtype=t, rank=2, size=matrix_count, ...],
        vectors: InputTensor[dtype=F32, rank=1, ...],
        windows: InputTensor[dtype=DType.int32, rank=1, ...],
        first: Int32,
        eps: Float32,
        scale: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        _decoder_layers[head_dim, has_bias, has_norm, tf32](
            ctx,
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            cache,
            contiguous(cache),
            x,
            matrices,
            vectors,
            windows,
            first,
            eps,
            scale,
            table,
            offsets,
            start,
        )


@extensibility.register("decoder_layers_paged", type="gpu")
struct DecoderLayersPagedGPU:
    """`decoder_layers` over MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        matrix_count: Int,
        target: StaticString,
        tf32: Bool = False,
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=t, rank=2, ...],
        q: OutputTensor[dtype=t, rank=2, ...],
        attended: OutputTensor[dtype=t, rank=2, ...],
        middle: OutputTensor[dtype=F32, rank=2, ...],
        gated: OutputTensor[dtype=t, rank=2, ...],
        blocks: MutableInputTensor[dtype=t, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        matrices: InputVariadicTensors[dtype=t, rank=2, size=matrix_count, ...],
        vectors: InputTensor[dtype=F32, rank=1, ...],
        windows: InputTensor[dtype=DType.int32, rank=1, ...],
        first: Int32,
        eps: Float32,
        scale: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        _decoder_layers[head_dim, has_bias, has_norm, tf32](
            ctx,
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            blocks,
            paged(blocks, lookup, page_stride),
            x,
            matrices,
            vectors,
            windows,
            first,
            eps,
            scale,
            table,
            offsets,
            start,
        )
