"""Op `rms_norm` on GPUs."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.tile_op import F32
from kernels.register.gpu.launch import THREADS, blocks
from kernels.register.rms_norm import check_norm


def launch_rms_norm[
    t: DType, //
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Float32, _],
    weight: Pointer[Float32, _],
    rows: Int,
    k: Int,
    eps: Float32,
) raises:
    """Enqueues out = x / sqrt(mean(x^2) + eps) * weight.

    Parameters:
        t: Output dtype.

    Args:
        ctx: The device.
        dst: `[rows, k]`.
        x: `[rows, k]` float32.
        weight: `[k]` float32.
        rows: Number of rows.
        k: Row length.
        eps: The model's epsilon.
    """
    if rows == 0:
        return
    ctx.enqueue_function[rms_norm[t]](
        dst,
        x,
        weight,
        Int32(rows),
        Int32(k),
        eps,
        grid_dim=blocks(rows),
        block_dim=THREADS,
    )


@extensibility.register("rms_norm", type="gpu")
struct RMSNormGPU:
    """Computes out[T, K] = x / sqrt(mean(x^2) + eps) * weight."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=2, ...],
        x: InputTensor[dtype=F32, rank=2, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        ctx: DeviceContext,
    ) raises:
        check_norm(x.dim_size(1), weight.dim_size(0))
        launch_rms_norm(
            ctx,
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            weight.unsafe_ptr(),
            x.dim_size(0),
            x.dim_size(1),
            eps,
        )
