"""Ops `qkv_rope_append` and `qkv_rope_append_paged`, one body for both cache
layouts."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.dot_tile import F32
from kernels.kv_cache import CacheShape, KVCache
from kernels.qkv_rope_append import QKVTiles, qkv_rope_append_share
from kernels.register.kv_cache import check_sequences, contiguous, paged
from kernels.workers import fork, worker_count


def check_qkv[
    head_dim: Int
](
    op: StaticString,
    cached: CacheShape,
    tokens: Int,
    k: Int,
    wq: InputTensor[rank=2, ...],
    wk: InputTensor[rank=2, ...],
    wv: InputTensor[rank=2, ...],
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
) raises:
    """Raises unless the shapes of weights and of a batch of `tokens` rows of k
    elements agree with the cache."""
    if wq.dim_size(1) != k or wk.dim_size(1) != k or wv.dim_size(1) != k:
        raise Error(
            op,
            ": x [",
            tokens,
            ", ",
            k,
            "], wq [",
            wq.dim_size(0),
            ", ",
            wq.dim_size(1),
            "], wk and wv do not agree",
        )
    check_heads[head_dim](
        op,
        cached,
        wq.dim_size(0),
        wk.dim_size(0),
        wv.dim_size(0),
        table,
        offsets,
        start,
        layer,
    )


def check_heads[
    head_dim: Int
](
    op: StaticString,
    cached: CacheShape,
    q_rows: Int,
    k_rows: Int,
    v_rows: Int,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
) raises:
    """Raises unless rows of weights and the shapes of a batch agree with the
    cache."""
    var kv_rows = cached.kv_heads * head_dim
    if (
        cached.head_dim != head_dim
        or q_rows % head_dim != 0
        or k_rows != kv_rows
        or v_rows != kv_rows
        or table.dim_size(1) > head_dim
        or offsets.dim_size(0) != start.dim_size(0) + 1
        or start.dim_size(0) > cached.sequences
        or layer < 0
        or Int(layer) >= cached.layers
    ):
        raise Error(
            op,
            ": wq, wk and wv of ",
            q_rows,
            ", ",
            k_rows,
            " and ",
            v_rows,
            " rows, the batch or the layer and the cache's ",
            cached.kv_heads,
            " heads of ",
            cached.head_dim,
            " do not agree",
        )


def check_vectors[
    head_dim: Int, has_bias: Bool, has_norm: Bool
](
    q_rows: Int,
    kv_rows: Int,
    bias_q: InputTensor[dtype=F32, rank=1, ...],
    bias_k: InputTensor[dtype=F32, rank=1, ...],
    bias_v: InputTensor[dtype=F32, rank=1, ...],
    norm_q: InputTensor[dtype=F32, rank=1, ...],
    norm_k: InputTensor[dtype=F32, rank=1, ...],
) raises:
    """Raises unless the biases and norms that are used have their lengths."""
    comptime if has_bias:
        if (
            bias_q.dim_size(0) != q_rows
            or bias_k.dim_size(0) != kv_rows
            or bias_v.dim_size(0) != kv_rows
        ):
            raise Error(
                "qkv_rope_append: biases do not have the rows of wq, wk and wv"
            )
    comptime if has_norm:
        if norm_q.dim_size(0) != head_dim or norm_k.dim_size(0) != head_dim:
            raise Error(
                "qkv_rope_append: q and k norms do not have head_dim ", head_dim
            )


def qkv_tiles[
    head_dim: Int
](
    op: StaticString,
    cached: CacheShape,
    tokens: Int,
    k: Int,
    wq: InputTensor[rank=2, ...],
    wk: InputTensor[rank=2, ...],
    wv: InputTensor[rank=2, ...],
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
) raises -> QKVTiles:
    """Checks weights and a batch of `tokens` rows of k elements against the
    cache; returns the tiles."""
    check_qkv[head_dim](
        op, cached, tokens, k, wq, wk, wv, table, offsets, start, layer
    )
    check_sequences(
        op,
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        start.dim_size(0),
        tokens,
        cached.capacity,
        table.dim_size(0),
        0,
    )
    return QKVTiles(
        tokens,
        wq.dim_size(0) // head_dim,
        cached.kv_heads,
        head_dim,
        table.dim_size(1),
        k,
    )


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
    var tiles = qkv_tiles[head_dim](
        "qkv_rope_append",
        at.extent(),
        x.dim_size(0),
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
    var workers = worker_count(tiles.count(), tiles.work())

    def share(worker: Int) {imm}:
        qkv_rope_append_share[head_dim, has_bias, has_norm](
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
            worker,
            workers,
        )

    fork(share, workers)


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
