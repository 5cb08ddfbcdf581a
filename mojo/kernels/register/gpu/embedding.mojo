"""Op `embedding` on GPUs."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.embedding import embedding
from kernels.gpu.tile_op import F32
from kernels.register.gpu.launch import THREADS, blocks


@extensibility.register("embedding", type="gpu")
struct EmbeddingGPU:
    """Copies out[T, K] = table[ids[T], K], float32."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=1, ...],
        table: InputTensor[dtype=t, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = ids.dim_size(0)
        if tokens == 0:
            return
        ctx.enqueue_function[embedding[t]](
            output.unsafe_ptr(),
            ids.unsafe_ptr(),
            table.unsafe_ptr(),
            Int32(tokens),
            Int32(table.dim_size(1)),
            grid_dim=blocks(tokens),
            block_dim=THREADS,
        )
