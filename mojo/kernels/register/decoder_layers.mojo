"""Ops `decoder_layers` and `decoder_layers_paged`, one body for both cache
layouts: the phases of several layers by one team of workers.
"""
from std.sys import size_of
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.attention import AttentionTiles, attention_share, combine_share
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
from kernels.workers import fork, worker_count

comptime MATRICES = 7
"""Matrices of a layer: wq, wk, wv, wo, gate, up, down."""


@fieldwise_init
struct LayerVectors(ImplicitlyCopyable, Movable):
    """Where a layer's vectors lie in the list of all: both norms of K, biases
    of q, k, v, norms of q and k."""

    var bias_q: Int
    var bias_k: Int
    var bias_v: Int
    var norm_q: Int
    var norm_k: Int
    var size: Int

    @staticmethod
    def of[
        D: Int, has_bias: Bool, has_norm: Bool
    ](k: Int, q_size: Int, kv_size: Int) -> Self:
        """The layout for hidden size k and q and kv projections' rows."""
        var bias_q = 2 * k
        var bias_k = bias_q + (q_size if has_bias else 0)
        var bias_v = bias_k + (kv_size if has_bias else 0)
        var norm_q = bias_v + (kv_size if has_bias else 0)
        var norm_k = norm_q + (D if has_norm else 0)
        return {
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            norm_k + (D if has_norm else 0),
        }


def check_layers[
    matrix_count: Int
](
    m: Int,
    k: Int,
    matrices: InputVariadicTensors[rank=2, size=matrix_count, ...],
    vectors: Int,
    vector_size: Int,
    windows: Int,
) raises:
    """Raises unless every layer has its matrices, vectors and window."""
    comptime NAME = StaticString("decoder_layers")
    comptime LAYERS = matrix_count // MATRICES
    comptime assert LAYERS > 0 and matrix_count == LAYERS * MATRICES
    if vectors != LAYERS * vector_size:
        raise Error(
            NAME,
            ": ",
            LAYERS,
            " layers have vectors of ",
            vector_size,
            " elements, not ",
            vectors,
            " in all",
        )
    if windows != LAYERS:
        raise Error(NAME, ": ", windows, " windows for ", LAYERS)
    var q_size = matrices[0].dim_size(0)
    var kv_size = matrices[1].dim_size(0)
    var n = matrices[4].dim_size(0)
    comptime for i in range(matrix_count):
        comptime j = i % MATRICES
        check_linear(
            NAME,
            q_size if j == 3 else (n if j == 6 else k),
            matrices[i].dim_size(1),
            m,
            matrices[i].dim_size(0),
            m,
            q_size if j
            == 0 else (kv_size if j < 3 else (n if j == 4 or j == 5 else k)),
        )


def decoder_layers[
    act: DType,
    wt: DType,
    C: KVCache,
    matrix_count: Int,
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
    matrices: InputVariadicTensors[dtype=wt, rank=2, size=matrix_count, ...],
    vectors: InputTensor[dtype=F32, rank=1, ...],
    windows: InputTensor[dtype=DType.int32, rank=1, ...],
    first: Int32,
    eps: Float32,
    scale: Float32,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
) raises:
    """Runs T tokens through layers `first`, `first` + 1, ...: each is
    out = m + mlp(norm(m)) with m = x + attention(norm(x)).

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
        matrix_count: `MATRICES` per layer.
        D: The head_dim.
        has_bias: Whether q, k and v have biases.
        has_norm: Whether q and k heads are RMS-normed.
    """
    comptime NAME = StaticString("decoder_layers")
    comptime LAYERS = matrix_count // MATRICES
    var m = x.dim_size(0)
    var k = x.dim_size(1)
    var q_size = matrices[0].dim_size(0)
    var n = matrices[4].dim_size(0)
    var qkv = qkv_tiles[D](
        NAME,
        at.extent(),
        m,
        k,
        matrices[0],
        matrices[1],
        matrices[2],
        table,
        offsets,
        start,
        first + Int32(LAYERS - 1),
    )
    var at_vector = LayerVectors.of[D, has_bias, has_norm](
        k, q_size, matrices[1].dim_size(0)
    )
    check_layers[matrix_count](
        m, k, matrices, vectors.dim_size(0), at_vector.size, windows.dim_size(0)
    )
    var heads = List[AttentionTiles](capacity=LAYERS)
    var partials = 0
    for layer in range(LAYERS):
        heads.append(
            attention_tiles[D](
                NAME,
                at.extent(),
                m,
                q_size // D,
                offsets,
                start,
                first + Int32(layer),
                windows.unsafe_ptr()[unsafe_offset=layer],
            )
        )
        partials = max(partials, heads[layer].partials)
    var matrix = List[Pointer[Scalar[wt], ImmUnsafeAnyOrigin]](
        capacity=matrix_count
    )
    comptime for i in range(matrix_count):
        matrix.append(matrices[i].unsafe_ptr())

    var out_tiles = LinearTiles(m, k, q_size, size_of[act]())
    var gate_tiles = LinearTiles(m, n, k, size_of[act]())
    var down_tiles = LinearTiles(m, k, n, size_of[act]())
    var work = qkv.work() + heads[0].work + m * k * (q_size + 3 * n)
    var workers = worker_count(gate_tiles.count(), LAYERS * work)
    var partial = List[Float32](length=partials, fill=0)
    var team = Team(workers)

    var out = output.unsafe_ptr()
    var normed_ = normed.unsafe_ptr()
    var q_ = q.unsafe_ptr()
    var attended_ = attended.unsafe_ptr()
    var middle_ = middle.unsafe_ptr()
    var gated_ = gated.unsafe_ptr()
    var partial_ = partial.unsafe_ptr()
    var x_ = x.unsafe_ptr()
    var table_ = table.unsafe_ptr()
    var offsets_ = offsets.unsafe_ptr()
    var start_ = start.unsafe_ptr()
    var vectors_ = vectors.unsafe_ptr()

    def share(_worker: Int) {mut team, imm}:
        var worker = team.join()
        if worker < 0:
            return
        var members = team.size()
        var phase = 0
        var unused = Int32(0)
        for layer in range(LAYERS):
            var w = matrix.unsafe_ptr().unsafe_offset(layer * MATRICES)
            var v = vectors_.unsafe_offset(layer * at_vector.size)
            var from_ = x_ if layer == 0 else out
            if layer > 0:
                team.wait(phase)
            rms_norm_share(normed_, from_, v, m, k, eps, worker, members)
            team.wait(phase)
            qkv_rope_append_share[D, has_bias, has_norm](
                q_,
                cache,
                normed_,
                w[unsafe_offset=0],
                w[unsafe_offset=1],
                w[unsafe_offset=2],
                v.unsafe_offset(at_vector.bias_q),
                v.unsafe_offset(at_vector.bias_k),
                v.unsafe_offset(at_vector.bias_v),
                v.unsafe_offset(at_vector.norm_q),
                v.unsafe_offset(at_vector.norm_k),
                eps,
                table_,
                offsets_,
                start_,
                at,
                Int(first) + layer,
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
                Int(first) + layer,
                scale,
                heads[layer],
                worker,
                members,
            )
            team.wait(phase)
            if partials > 0:
                combine_share[D](
                    attended_, partial_, heads[layer], worker, members
                )
                team.wait(phase)
            linear_share[True, False](
                middle_,
                attended_,
                w[unsafe_offset=3],
                from_,
                Pointer(to=unused),
                out_tiles,
                worker,
                members,
            )
            team.wait(phase)
            rms_norm_share(
                normed_, middle_, v.unsafe_offset(k), m, k, eps, worker, members
            )
            team.wait(phase)
            gate_up_silu_share(
                gated_,
                normed_,
                w[unsafe_offset=4],
                w[unsafe_offset=5],
                gate_tiles,
                worker,
                members,
            )
            team.wait(phase)
            linear_share[True, False](
                out,
                gated_,
                w[unsafe_offset=6],
                middle_,
                Pointer(to=unused),
                down_tiles,
                worker,
                members,
            )

    fork(share, workers)


@extensibility.register("decoder_layers")
struct DecoderLayers:
    """`decoder_layers` over `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        act: DType,
        wt: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        matrix_count: Int,
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
        matrices: InputVariadicTensors[
            dtype=wt, rank=2, size=matrix_count, ...
        ],
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
        decoder_layers[head_dim, has_bias, has_norm](
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            cache.unsafe_ptr(),
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


@extensibility.register("decoder_layers_paged")
struct DecoderLayersPaged:
    """`decoder_layers` over MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        act: DType,
        wt: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        matrix_count: Int,
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
        matrices: InputVariadicTensors[
            dtype=wt, rank=2, size=matrix_count, ...
        ],
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
        decoder_layers[head_dim, has_bias, has_norm](
            output,
            normed,
            q,
            attended,
            middle,
            gated,
            blocks.unsafe_ptr(),
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
