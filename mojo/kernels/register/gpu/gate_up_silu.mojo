"""Op `gate_up_silu` on GPUs."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.gate_up_silu import (
    NT,
    gate_up_silu_gemm,
    gate_up_silu_gemv,
    gate_up_silu_wgmma,
)
from kernels.register.gpu.launch import (
    GEMV_BATCHES,
    SHORT_ROWS,
    SHORT_TILE,
    TALL_TILE,
    THREADS,
    blocks,
    by_wgmma,
    gemv_tiles,
    unread,
)
from kernels.register.linear import check_linear


def _gemv[
    t: DType, //, BATCH: Int
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    gate: Pointer[Scalar[t], _],
    up: Pointer[Scalar[t], _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[gate_up_silu_gemv[t, t, BATCH]](
        dst,
        x,
        gate,
        unread[DType.float16](gate),
        unread[DType.uint8](gate),
        up,
        unread[DType.float16](up),
        unread[DType.uint8](up),
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(gemv_tiles[2](m, BATCH, n)),
        block_dim=THREADS,
    )


def _gemm[
    t: DType, //, MT: Int, tf32: Bool
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    gate: Pointer[Scalar[t], _],
    up: Pointer[Scalar[t], _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[gate_up_silu_gemm[t, MT, tf32]](
        dst,
        x,
        gate,
        up,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(ceildiv(m, MT) * ceildiv(n, NT)),
        block_dim=THREADS,
    )


def _wgmma[
    t: DType, //
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    gate: Pointer[Scalar[t], _],
    up: Pointer[Scalar[t], _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[gate_up_silu_wgmma[t]](
        dst,
        x,
        gate,
        up,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(ceildiv(m, TALL_TILE) * ceildiv(n, NT)),
        block_dim=THREADS,
    )


def launch_gate_up_silu[
    t: DType, //, tf32: Bool = False
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Scalar[t], _],
    x: Pointer[Scalar[t], _],
    gate: Pointer[Scalar[t], _],
    up: Pointer[Scalar[t], _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    """Enqueues out = silu(x @ gate^T) * (x @ up^T).

    Parameters:
        t: Dtype of all arrays.
        tf32: Whether more rows than a GEMV takes are multiplied as tf32.

    Args:
        ctx: The device.
        dst: `[M, N]`.
        x: `[M, K]`.
        gate: `[N, K]`.
        up: `[N, K]`.
        m: M.
        n: N.
        k: K.
    """
    if m == 0:
        return
    comptime for i in range(len(GEMV_BATCHES)):
        comptime BATCH = GEMV_BATCHES[i]
        if m <= BATCH:
            return _gemv[BATCH](ctx, dst, x, gate, up, m, n, k)
    if m <= SHORT_ROWS:
        _gemm[SHORT_TILE, tf32](ctx, dst, x, gate, up, m, n, k)
    else:
        comptime if by_wgmma[t]():
            _wgmma(ctx, dst, x, gate, up, m, n, k)
        else:
            _gemm[TALL_TILE, tf32](ctx, dst, x, gate, up, m, n, k)


@extensibility.register("gate_up_silu", type="gpu")
struct GateUpSiluGPU:
    """Computes out[T, N] = silu(x @ gate^T) * (x @ up^T)."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString, tf32: Bool = False
    ](
        output: OutputTensor[dtype=t, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        gate: InputTensor[dtype=t, rank=2, ...],
        up: InputTensor[dtype=t, rank=2, ...],
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
        launch_gate_up_silu[tf32](
            ctx,
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            gate.unsafe_ptr(),
            up.unsafe_ptr(),
            m,
            n,
            k,
        )
