"""Ops `decoder_layer` and `decoder_layer_paged`, one body for both cache
layouts: the phases of a layer by one team of workers.
"""
from std.sys import size_of
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.attention import attention_share, combine_share
from kernels.dot_tile import F32
from kernels.gate_up_silu import gate_up_silu_share
from kernels.kv_cache import KVCache
from kernels.linear import LinearTiles, linear_share
from kernels.qkv_rope_append import qkv_rope_append_share
from kernels.register.attention import attention_tiles
from kernels.register.kv_cache import contiguous, paged
from kernels.register.linear import check_linear
from kernels.register.qkv_rope_append import qkv_tiles
from kernels.rms_norm import rms_norm_share
from kernels.team import Team
from kernels.workers import worker_count


def decoder_layer[
    act: DType,
    wt: DType,
    C: KVCache,
    //,
    D: Int,
    has_bias: Bool,
    has_norm: Bool,
](
    output: OutputTensor[dtype=F32, rank=2, ...],
    normed: OutputTensor[dtype=act, rank=2, ...],
    q: OutputTensor[dtype=act, rank=2, ...],
    attended: OutputTensor[dtype=act, rank=2, ...],
    middle: OutputTensor[dtype=F32, rank=2, ...],
    gated: OutputTensor[dtype=act, rank=2, ...],
    cache: Pointer[mut=True, Scalar[act], _],
    at: C,
    x: InputTensor[dtype=F32, rank=2, ...],
    norm_in: InputTensor[dtype=F32, rank=1, ...],
    wq: InputTensor[dtype=wt, rank=2, ...],
    wk: InputTensor[dtype=wt, rank=2, ...],
    wv: InputTensor[dtype=wt, rank=2, ...],
    bias_q: InputTensor[dtype=F32, rank=1, ...],
    bias_k: InputTensor[dtype=F32, rank=1, ...],
    bias_v: InputTensor[dtype=F32, rank=1, ...],
    norm_q: InputTensor[dtype=F32, rank=1, ...],
    norm_k: InputTensor[dtype=F32, rank=1, ...],
    wo: InputTensor[dtype=wt, rank=2, ...],
    norm_mlp: InputTensor[dtype=F32, rank=1, ...],
    gate: InputTensor[dtype=wt, rank=2, ...],
    up: InputTensor[dtype=wt, rank=2, ...],
    down: InputTensor[dtype=wt, rank=2, ...],
    eps: Float32,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
    scale: Float32,
    window: Int32,
) raises:
    """One layer of T tokens: out = m + mlp(norm(m)), m = x + attention(norm(x)).

    Every phase is the op of its name (`rms_norm`, `qkv_rope_append`,
    `attention`, `linear_residual`, `rms_norm`, `gate_up_silu`,
    `linear_residual`), tile by tile, with a barrier between two phases. What
    one phase hands to the next is an output, so that the graph owns its memory:
    `normed` `[T, K]` (both norms), `q` and `attended` `[T, heads * D]`,
    `middle` `[T, K]`, `gated` `[T, N]`.

    Parameters:
        act: Dtype of activations and cache.
        wt: Dtype of the matrices.
        C: Layout of the cache.
        D: The head_dim.
        has_bias: Whether q, k and v have biases.
        has_norm: Whether q and k heads are RMS-normed.
    """
    var m = x.dim_size(0)
    var k = x.dim_size(1)
    var n = gate.dim_size(0)
    var q_size = wq.dim_size(0)
    comptime NAME = StaticString("decoder_layer")
    var qkv = qkv_tiles[D, has_bias, has_norm](
        NAME,
        at.extent(),
        m,
        k,
        wq,
        wk,
        wv,
        bias_q,
        bias_k,
        bias_v,
        norm_q,
        norm_k,
        table,
        offsets,
        start,
        layer,
    )
    var heads = attention_tiles[D](
        NAME, at.extent(), m, q_size // D, offsets, start, layer, window
    )
    check_linear(NAME, q_size, wo.dim_size(1), m, k, m, wo.dim_size(0))
    check_linear(NAME, k, gate.dim_size(1), m, n, m, up.dim_size(0))
    check_linear(NAME, k, up.dim_size(1), m, k, m, down.dim_size(0))
    check_linear(NAME, n, down.dim_size(1), m, k, m, output.dim_size(1))
    if norm_in.dim_size(0) != k or norm_mlp.dim_size(0) != k:
        raise Error(NAME, ": norms do not have the ", k, " elements of a row")

    var out_tiles = LinearTiles(m, k, q_size, size_of[act]())
    var gate_tiles = LinearTiles(m, n, k, size_of[act]())
    var down_tiles = LinearTiles(m, k, n, size_of[act]())
    var work = qkv.work() + heads.work + m * k * (q_size + 3 * n)
    var workers = worker_count(gate_tiles.count(), work)
    var partial = List[Float32](length=heads.partials, fill=0)
    var team = Team(workers)

    var out = output.unsafe_ptr()
    var normed_ = normed.unsafe_ptr()
    var q_ = q.unsafe_ptr()
    var attended_ = attended.unsafe_ptr()
    var middle_ = middle.unsafe_ptr()
    var gated_ = gated.unsafe_ptr()
    var partial_ = partial.unsafe_ptr()
    var x_ = x.unsafe_ptr()
    var norm_in_ = norm_in.unsafe_ptr()
    var wq_ = wq.unsafe_ptr()
    var wk_ = wk.unsafe_ptr()
    var wv_ = wv.unsafe_ptr()
    var bias_q_ = bias_q.unsafe_ptr()
    var bias_k_ = bias_k.unsafe_ptr()
    var bias_v_ = bias_v.unsafe_ptr()
    var norm_q_ = norm_q.unsafe_ptr()
    var norm_k_ = norm_k.unsafe_ptr()
    var wo_ = wo.unsafe_ptr()
    var norm_mlp_ = norm_mlp.unsafe_ptr()
    var gate_ = gate.unsafe_ptr()
    var up_ = up.unsafe_ptr()
    var down_ = down.unsafe_ptr()
    var table_ = table.unsafe_ptr()
    var offsets_ = offsets.unsafe_ptr()
    var start_ = start.unsafe_ptr()

    def share(_worker: Int) {mut team, imm}:
        var worker = team.join()
        if worker < 0:
            return
        var members = team.size()
        var phase = 0
        var unused = Int32(0)
        rms_norm_share(normed_, x_, norm_in_, m, k, eps, worker, members)
        team.wait(phase)
        qkv_rope_append_share[D, has_bias, has_norm](
            q_,
            cache,
            normed_,
            wq_,
            wk_,
            wv_,
            bias_q_,
            bias_k_,
            bias_v_,
            norm_q_,
            norm_k_,
            eps,
            table_,
            offsets_,
            start_,
            at,
            Int(layer),
            qkv,
            worker,
            members,
        )
        team.wait(phase)
        attention_share[D](
            attended_,
            partial_,
            q_,
            cache,
            at,
            Int(layer),
            scale,
            heads,
            worker,
            members,
        )
        team.wait(phase)
        combine_share[D](attended_, partial_, heads, worker, members)
        team.wait(phase)
        linear_share[True, False](
            middle_,
            attended_,
            wo_,
            x_,
            Pointer(to=unused),
            out_tiles,
            worker,
            members,
        )
        team.wait(phase)
        rms_norm_share(normed_, middle_, norm_mlp_, m, k, eps, worker, members)
        team.wait(phase)
        gate_up_silu_share(
            gated_, normed_, gate_, up_, gate_tiles, worker, members
        )
        team.wait(phase)
        linear_share[True, False](
            out,
            gated_,
            down_,
            middle_,
            Pointer(to=unused),
            down_tiles,
            worker,
            members,
        )

    if workers == 1:
        share(0)
    else:
        sync_parallelize(share, workers)


@extensibility.register("decoder_layer")
struct DecoderLayer:
    """`decoder_layer` over `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        act: DType,
        wt: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=act, rank=2, ...],
        q: OutputTensor[dtype=act, rank=2, ...],
        attended: OutputTensor[dtype=act, rank=2, ...],
        middle: OutputTensor[dtype=F32, rank=2, ...],
        gated: OutputTensor[dtype=act, rank=2, ...],
        cache: MutableInputTensor[dtype=act, rank=6, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        norm_in: InputTensor[dtype=F32, rank=1, ...],
        wq: InputTensor[dtype=wt, rank=2, ...],
        wk: InputTensor[dtype=wt, rank=2, ...],
        wv: InputTensor[dtype=wt, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        wo: InputTensor[dtype=wt, rank=2, ...],
        norm_mlp: InputTensor[dtype=F32, rank=1, ...],
        gate: InputTensor[dtype=wt, rank=2, ...],
        up: InputTensor[dtype=wt, rank=2, ...],
        down: InputTensor[dtype=wt, rank=2, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        decoder_layer[head_dim, has_bias, has_norm](
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            cache.unsafe_ptr(),
            contiguous(cache),
            x,
            norm_in,
            wq,
            wk,
            wv,
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            wo,
            norm_mlp,
            gate,
            up,
            down,
            eps,
            table,
            offsets,
            start,
            layer,
            scale,
            window,
        )


@extensibility.register("decoder_layer_paged")
struct DecoderLayerPaged:
    """`decoder_layer` over MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        act: DType,
        wt: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        normed: OutputTensor[dtype=act, rank=2, ...],
        q: OutputTensor[dtype=act, rank=2, ...],
        attended: OutputTensor[dtype=act, rank=2, ...],
        middle: OutputTensor[dtype=F32, rank=2, ...],
        gated: OutputTensor[dtype=act, rank=2, ...],
        blocks: MutableInputTensor[dtype=act, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        norm_in: InputTensor[dtype=F32, rank=1, ...],
        wq: InputTensor[dtype=wt, rank=2, ...],
        wk: InputTensor[dtype=wt, rank=2, ...],
        wv: InputTensor[dtype=wt, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        wo: InputTensor[dtype=wt, rank=2, ...],
        norm_mlp: InputTensor[dtype=F32, rank=1, ...],
        gate: InputTensor[dtype=wt, rank=2, ...],
        up: InputTensor[dtype=wt, rank=2, ...],
        down: InputTensor[dtype=wt, rank=2, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        scale: Float32,
        window: Int32,
        ctx: DeviceContext,
    ) raises:
        decoder_layer[head_dim, has_bias, has_norm](
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            blocks.unsafe_ptr(),
            paged(blocks, lookup, page_stride),
            x,
            norm_in,
            wq,
            wk,
            wv,
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            wo,
            norm_mlp,
            gate,
            up,
            down,
            eps,
            table,
            offsets,
            start,
            layer,
            scale,
            window,
        )
