"""Ops `qkv_rope_append` and `qkv_rope_append_paged`, one body for both cache
layouts."""
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.dot_tile import F32
from kernels.kv_cache import KVCache
from kernels.qkv_rope_append import QKVTiles, TOKENS, qkv_rope_append_tile
from kernels.register.kv_cache import check_sequences, contiguous, paged
from kernels.workers import first_tile, worker_count


def qkv_rope_append[
    xt: DType,
    wt: DType,
    ct: DType,
    C: KVCache,
    //,
    head_dim: Int,
    has_bias: Bool,
    has_norm: Bool,
](
    output: OutputTensor[dtype=ct, rank=3, ...],
    cache: Pointer[mut=True, Scalar[ct], _],
    at: C,
    x: InputTensor[dtype=xt, rank=2, ...],
    wq: InputTensor[dtype=wt, rank=2, ...],
    wk: InputTensor[dtype=wt, rank=2, ...],
    wv: InputTensor[dtype=wt, rank=2, ...],
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
    """Projects, norms and rotates q, k, v; k and v go into the cache.

    Parameters `has_bias` and `has_norm` say whether the bias and q/k norm
    inputs are used; unused ones may have any length.
    """
    var cached = at.extent()
    var tiles = QKVTiles(
        x.dim_size(0),
        wq.dim_size(0) // head_dim,
        cached.kv_heads,
        head_dim,
        table.dim_size(1),
        x.dim_size(1),
    )
    var b = start.dim_size(0)
    if (
        cached.head_dim != head_dim
        or wq.dim_size(0) % head_dim != 0
        or wk.dim_size(0) != cached.kv_heads * head_dim
        or wv.dim_size(0) != cached.kv_heads * head_dim
        or wq.dim_size(1) != tiles.k
        or wk.dim_size(1) != tiles.k
        or wv.dim_size(1) != tiles.k
        or tiles.rotary_dim > head_dim
        or offsets.dim_size(0) != b + 1
        or b > cached.sequences
        or layer < 0
        or Int(layer) >= cached.layers
    ):
        raise Error(
            "qkv_rope_append: x [",
            tiles.tokens,
            ", ",
            tiles.k,
            "], wq [",
            wq.dim_size(0),
            ", ",
            wq.dim_size(1),
            "] and the cache's ",
            cached.kv_heads,
            " heads of ",
            cached.head_dim,
            " do not agree",
        )
    check_sequences(
        "qkv_rope_append",
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        b,
        tiles.tokens,
        cached.capacity,
        table.dim_size(0),
        0,
    )
    var out = output.unsafe_ptr()
    var xp = x.unsafe_ptr()
    var wqp = wq.unsafe_ptr()
    var wkp = wk.unsafe_ptr()
    var wvp = wv.unsafe_ptr()
    var bq = bias_q.unsafe_ptr()
    var bk = bias_k.unsafe_ptr()
    var bv = bias_v.unsafe_ptr()
    var nq = norm_q.unsafe_ptr()
    var nk = norm_k.unsafe_ptr()
    var tp = table.unsafe_ptr()
    var op = offsets.unsafe_ptr()
    var sp = start.unsafe_ptr()
    var count = tiles.count()
    var workers = worker_count(
        count, tiles.tokens * tiles.per_block() * head_dim * tiles.k
    )

    def share(worker: Int) {imm}:
        var scratch = Array[Float32, TOKENS * head_dim](fill=0)
        for tile in range(
            first_tile(worker, workers, count),
            first_tile(worker + 1, workers, count),
        ):
            qkv_rope_append_tile[has_bias, has_norm](
                out,
                cache,
                xp,
                wqp,
                wkp,
                wvp,
                bq,
                bk,
                bv,
                nq,
                nk,
                eps,
                tp,
                op,
                sp,
                at,
                Int(layer),
                tiles,
                tile,
                scratch.unsafe_ptr(),
            )

    if workers == 1:
        share(0)
    else:
        sync_parallelize(share, workers)


@extensibility.register("qkv_rope_append")
struct QKVRopeAppend:
    """`qkv_rope_append` into `[B, layers, 2, S, kv_heads, head_dim]`."""

    @staticmethod
    def execute[
        xt: DType,
        wt: DType,
        ct: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=ct, rank=3, ...],
        cache: MutableInputTensor[dtype=ct, rank=6, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        wq: InputTensor[dtype=wt, rank=2, ...],
        wk: InputTensor[dtype=wt, rank=2, ...],
        wv: InputTensor[dtype=wt, rank=2, ...],
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
        qkv_rope_append[head_dim, has_bias, has_norm](
            output,
            cache.unsafe_ptr(),
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


@extensibility.register("qkv_rope_append_paged")
struct QKVRopeAppendPaged:
    """`qkv_rope_append` into MAX's pages, found by `lookup` [B, pages]."""

    @staticmethod
    def execute[
        xt: DType,
        wt: DType,
        ct: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=ct, rank=3, ...],
        blocks: MutableInputTensor[dtype=ct, rank=6, ...],
        lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        wq: InputTensor[dtype=wt, rank=2, ...],
        wk: InputTensor[dtype=wt, rank=2, ...],
        wv: InputTensor[dtype=wt, rank=2, ...],
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
        qkv_rope_append[head_dim, has_bias, has_norm](
            output,
            blocks.unsafe_ptr(),
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
