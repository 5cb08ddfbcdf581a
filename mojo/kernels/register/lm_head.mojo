"""Op `lm_head`."""
from std.sys import size_of
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.linear import LinearTiles, linear_share
from kernels.register.linear import check_linear
from kernels.workers import fork, worker_count


@extensibility.register("lm_head")
struct LMHead:
    """Computes logits[R, V] = x[rows[R], K] @ w[V, K]^T in float32."""

    @staticmethod
    def execute[
        xt: DType, wt: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        w: InputTensor[dtype=wt, rank=2, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var m = rows.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "lm_head",
            k,
            w.dim_size(1),
            m,
            n,
            output.dim_size(0),
            output.dim_size(1),
        )
        var out = output.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var rp = rows.unsafe_ptr()
        for i in range(m):
            var row = Int(rp[unsafe_offset=i])
            if row < 0 or row >= x.dim_size(0):
                raise Error(
                    "lm_head: row ",
                    row,
                    " of ",
                    x.dim_size(0),
                )
        var tiles = LinearTiles(m, n, k, size_of[xt]())
        var workers = worker_count(tiles.count(), m * n * k)

        def share(worker: Int) {imm}:
            linear_share[False, True](
                out, xp, wp, out, rp, tiles, worker, workers
            )

        fork(share, workers)
