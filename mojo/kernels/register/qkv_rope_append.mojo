"""Op `qkv_rope_append`."""
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.dot_tile import F32
from kernels.kv_cache import ContiguousCache
from kernels.qkv_rope_append import QKVTiles, TOKENS, qkv_rope_append_tile
from kernels.workers import first_tile, worker_count


def check_sequences(
    op: StaticString,
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    b: Int,
    tokens: Int,
    capacity: Int,
    positions: Int,
) raises:
    """Raises unless the ragged rows cover `tokens` and end inside the cache."""
    if (
        Int(offsets[unsafe_offset=0]) != 0
        or Int(offsets[unsafe_offset=b]) != tokens
    ):
        raise Error(op, ": offsets do not cover ", tokens, " tokens")
    for i in range(b):
        var new = Int(offsets[unsafe_offset=i + 1] - offsets[unsafe_offset=i])
        var end = Int(start[unsafe_offset=i]) + new
        if (
            new < 0
            or start[unsafe_offset=i] < 0
            or end > capacity
            or end > positions
        ):
            raise Error(
                op,
                ": sequence ",
                i,
                " goes from position ",
                start[unsafe_offset=i],
                " to ",
                end,
                ", the cache holds ",
                min(capacity, positions),
            )


@extensibility.register("qkv_rope_append")
struct QKVRopeAppend:
    """Projects, norms and rotates q, k, v; k and v go into the cache.

    Parameters `has_bias` and `has_norm` say whether the bias and q/k norm
    inputs are used; unused ones may have any length.
    """

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
        var at = ContiguousCache(
            cache.dim_size(1),
            cache.dim_size(3),
            cache.dim_size(4),
            cache.dim_size(5),
        )
        var tiles = QKVTiles(
            x.dim_size(0),
            wq.dim_size(0) // head_dim,
            at.kv_heads,
            head_dim,
            table.dim_size(1),
            x.dim_size(1),
        )
        var b = start.dim_size(0)
        if (
            at.head_dim != head_dim
            or wq.dim_size(0) % head_dim != 0
            or wk.dim_size(0) != at.kv_heads * head_dim
            or wv.dim_size(0) != at.kv_heads * head_dim
            or wq.dim_size(1) != tiles.k
            or wk.dim_size(1) != tiles.k
            or wv.dim_size(1) != tiles.k
            or tiles.rotary_dim > head_dim
            or offsets.dim_size(0) != b + 1
            or b > cache.dim_size(0)
            or layer < 0
            or Int(layer) >= at.layers
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
                at.kv_heads,
                " heads of ",
                at.head_dim,
                " do not agree",
            )
        check_sequences(
            "qkv_rope_append",
            offsets.unsafe_ptr(),
            start.unsafe_ptr(),
            b,
            tiles.tokens,
            at.capacity,
            table.dim_size(0),
        )
        var out = output.unsafe_ptr()
        var cp = cache.unsafe_ptr()
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
                    cp,
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
