"""Op `rms_norm`."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.rms_norm import rms_norm_share
from kernels.workers import fork, worker_count


def check_norm(n: Int, weights: Int) raises:
    """Raises unless rows of n elements have a weight each."""
    if weights != n:
        raise Error(
            "rms_norm: weight has ", weights, " elements, rows have ", n
        )


@extensibility.register("rms_norm")
struct RMSNorm:
    """Computes out[T, K] = x / sqrt(mean(x^2) + eps) * weight."""

    @staticmethod
    def execute[
        ot: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=ot, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        ctx: DeviceContext,
    ) raises:
        var rows = x.dim_size(0)
        var n = x.dim_size(1)
        check_norm(n, weight.dim_size(0))
        var out = output.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var wp = weight.unsafe_ptr()
        var workers = worker_count(rows, rows * n)

        def share(worker: Int) {imm}:
            rms_norm_share(out, xp, wp, rows, n, eps, worker, workers)

        fork(share, workers)
