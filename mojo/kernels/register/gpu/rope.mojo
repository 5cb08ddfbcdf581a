"""Op `rope` on GPUs."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.rope import rope
from kernels.gpu.tile_op import F32
from kernels.register.gpu.launch import THREADS, blocks


@extensibility.register("rope", type="gpu")
struct RopeGPU:
    """Rotates x[T, heads, head_dim] by the rows positions[T] of a table."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        x: InputTensor[dtype=t, rank=3, ...],
        table: InputTensor[dtype=F32, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = x.dim_size(0)
        if positions.dim_size(0) != tokens or table.dim_size(1) > x.dim_size(2):
            raise Error(
                "rope: ",
                positions.dim_size(0),
                " positions for ",
                tokens,
                " tokens, rotary_dim ",
                table.dim_size(1),
                " for heads of ",
                x.dim_size(2),
            )
        if tokens == 0:
            return
        ctx.enqueue_function[rope[t]](
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            table.unsafe_ptr(),
            positions.unsafe_ptr(),
            Int32(tokens),
            Int32(x.dim_size(1)),
            Int32(x.dim_size(2)),
            Int32(table.dim_size(1)),
            grid_dim=blocks(tokens),
            block_dim=THREADS,
        )
