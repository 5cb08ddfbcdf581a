"""Op `greedy` on GPUs."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.greedy import SPAN, greedy, greedy_spans
from kernels.gpu.tile_op import F32
from kernels.register.gpu.launch import THREADS, blocks


@extensibility.register("greedy", type="gpu")
struct GreedyGPU:
    """Chooses out[R] = index of the largest of logits[R, V]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var rows = logits.dim_size(0)
        var v = logits.dim_size(1)
        if rows == 0:
            return
        var spans = rows * ceildiv(v, SPAN)
        var best = ctx.enqueue_create_buffer[F32](spans)
        var ids = ctx.enqueue_create_buffer[DType.int32](spans)
        ctx.enqueue_function[greedy_spans](
            best,
            ids,
            logits.unsafe_ptr(),
            Int32(rows),
            Int32(v),
            grid_dim=blocks(spans),
            block_dim=THREADS,
        )
        ctx.enqueue_function[greedy](
            output.unsafe_ptr(),
            best,
            ids,
            Int32(rows),
            Int32(v),
            grid_dim=blocks(ceildiv(rows, THREADS)),
            block_dim=THREADS,
        )
        # Pointers alone would not keep them until here.
        _ = best^
        _ = ids^
