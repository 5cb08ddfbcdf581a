"""Op `greedy`."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.greedy import greedy_row


@extensibility.register("greedy")
struct Greedy:
    """Chooses out[R] = index of the largest of logits[R, V]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var n = logits.dim_size(1)
        for r in range(logits.dim_size(0)):
            output.unsafe_ptr()[unsafe_offset=r] = greedy_row(
                logits.unsafe_ptr().unsafe_offset(r * n), n
            )
