"""Op `sample` on GPUs."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.sample import sample
from kernels.gpu.tile_op import F32
from kernels.register.gpu.launch import THREADS, blocks
from kernels.register.sample import check_sample


@extensibility.register("sample", type="gpu")
struct SampleGPU:
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
        var v = logits.dim_size(1)
        check_sample(
            uniform.dim_size(0), rows, v, temperature, top_k, top_p, vocab
        )
        if rows == 0:
            return
        ctx.enqueue_function[sample](
            output.unsafe_ptr(),
            logits.unsafe_ptr(),
            uniform.unsafe_ptr(),
            Int32(rows),
            Int32(v),
            vocab,
            temperature,
            top_k,
            top_p,
            grid_dim=blocks(rows),
            block_dim=THREADS,
        )
