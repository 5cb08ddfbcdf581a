"""Op `lm_head` on GPUs."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.tile_op import F32
from kernels.register.gpu.linear import launch_linear
from kernels.register.linear import check_linear


@extensibility.register("lm_head", type="gpu")
struct LMHeadGPU:
    """Computes logits[R, V] = x[rows[R], K] @ w[V, K]^T in float32."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString, tf32: Bool = False
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        w: InputTensor[dtype=t, rank=2, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var m = rows.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "lm_head",
            k,
            w.dim_size(1),
            m,
            n,
            output.dim_size(0),
            output.dim_size(1),
        )
        var out = output.unsafe_ptr()
        launch_linear[False, True, tf32](
            ctx,
            out,
            x.unsafe_ptr(),
            w.unsafe_ptr(),
            out,
            rows.unsafe_ptr(),
            m,
            n,
            k,
        )
