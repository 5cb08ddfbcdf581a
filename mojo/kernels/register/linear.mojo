"""Ops `linear` and `linear_residual`."""
from std.sys import size_of
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.linear import LinearTiles, linear_share
from kernels.workers import fork, worker_count


def check_linear(
    op: StaticString, xk: Int, wk: Int, m: Int, n: Int, om: Int, on: Int
) raises:
    """Raises unless x `[m, xk]`, w `[n, wk]` and out `[om, on]` agree."""
    if xk != wk or om != m or on != n:
        raise Error(
            op,
            ": x [",
            m,
            ", ",
            xk,
            "], w [",
            n,
            ", ",
            wk,
            "], out [",
            om,
            ", ",
            on,
            "] do not agree",
        )


@extensibility.register("linear")
struct Linear:
    """Computes out[T, N] = x[T, K] @ w[N, K]^T in float32."""

    @staticmethod
    def execute[
        xt: DType, wt: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        w: InputTensor[dtype=wt, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "linear",
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
        var tiles = LinearTiles(m, n, k, size_of[xt]())
        var workers = worker_count(tiles.count(), m * n * k)

        def share(worker: Int) {imm}:
            var unused = Int32(0)
            linear_share[False, False](
                out, xp, wp, out, Pointer(to=unused), tiles, worker, workers
            )

        fork(share, workers)


@extensibility.register("linear_residual")
struct LinearResidual:
    """Computes out[T, N] = residual[T, N] + x[T, K] @ w[N, K]^T in float32."""

    @staticmethod
    def execute[
        xt: DType, wt: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        w: InputTensor[dtype=wt, rank=2, ...],
        residual: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "linear_residual",
            k,
            w.dim_size(1),
            m,
            n,
            residual.dim_size(0),
            residual.dim_size(1),
        )
        var out = output.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var wp = w.unsafe_ptr()
        var added = residual.unsafe_ptr()
        var tiles = LinearTiles(m, n, k, size_of[xt]())
        var workers = worker_count(tiles.count(), m * n * k)

        def share(worker: Int) {imm}:
            var unused = Int32(0)
            linear_share[True, False](
                out, xp, wp, added, Pointer(to=unused), tiles, worker, workers
            )

        fork(share, workers)
