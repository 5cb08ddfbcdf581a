"""Op `sample`."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.sample import sample_share
from kernels.workers import fork, worker_count

comptime WORK = 64
"""Multiply-adds that a logit's exponential and its passes cost."""


def check_sample(
    numbers: Int,
    rows: Int,
    width: Int,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    vocab: Int32,
) raises:
    """Raises unless there is a number per row and the options are in range."""
    if (
        numbers != rows
        or vocab < 1
        or Int(vocab) > width
        or top_k < 0
        or not temperature > 0
        or not (top_p > 0 and top_p <= 1)
    ):
        raise Error(
            "sample: ",
            numbers,
            " numbers for ",
            rows,
            " rows of ",
            width,
            ", vocabulary ",
            vocab,
            ", temperature ",
            temperature,
            ", top_k ",
            top_k,
            ", top_p ",
            top_p,
        )


@extensibility.register("sample")
struct Sample:
    """Chooses out[R] from logits[R, V] by temperature, top_k and top_p."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[dtype=F32, rank=2, ...],
        uniform: InputTensor[dtype=F32, rank=1, ...],
        temperature: Float32,
        top_k: Int32,
        top_p: Float32,
        vocab: Int32,
        ctx: DeviceContext,
    ) raises:
        var rows = logits.dim_size(0)
        var width = logits.dim_size(1)
        var n = Int(vocab)
        check_sample(
            uniform.dim_size(0), rows, width, temperature, top_k, top_p, vocab
        )
        var workers = max(1, min(rows, worker_count(rows, rows * n * WORK)))
        var keys = List[UInt32](length=workers * n, fill=0)
        var weights = List[Float32](length=workers * n, fill=0)
        var out = output.unsafe_ptr()
        var lp = logits.unsafe_ptr()
        var up = uniform.unsafe_ptr()
        var kp = keys.unsafe_ptr()
        var wp = weights.unsafe_ptr()

        def share(worker: Int) {imm}:
            sample_share(
                out,
                lp,
                up,
                kp,
                wp,
                rows,
                width,
                n,
                temperature,
                Int(top_k),
                top_p,
                worker,
                workers,
            )

        fork(share, workers)
