"""Op `gate_up_silu`."""
from std.sys import size_of
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gate_up_silu import gate_up_silu_share
from kernels.linear import LinearTiles
from kernels.register.linear import check_linear
from kernels.workers import fork, worker_count


@extensibility.register("gate_up_silu")
struct GateUpSilu:
    """Computes out[T, N] = silu(x @ gate^T) * (x @ up^T)."""

    @staticmethod
    def execute[
        ot: DType, xt: DType, wt: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=ot, rank=2, ...],
        x: InputTensor[dtype=xt, rank=2, ...],
        gate: InputTensor[dtype=wt, rank=2, ...],
        up: InputTensor[dtype=wt, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var n = gate.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "gate_up_silu",
            k,
            gate.dim_size(1),
            m,
            n,
            output.dim_size(0),
            up.dim_size(0),
        )
        if up.dim_size(1) != k:
            raise Error(
                "gate_up_silu: up has ", up.dim_size(1), " columns, not ", k
            )
        var out = output.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var gp = gate.unsafe_ptr()
        var upp = up.unsafe_ptr()
        var tiles = LinearTiles(m, n, k, size_of[xt]())
        var workers = worker_count(tiles.count(), 2 * m * n * k)

        def share(worker: Int) {imm}:
            gate_up_silu_share(out, xp, gp, upp, tiles, worker, workers)

        fork(share, workers)
