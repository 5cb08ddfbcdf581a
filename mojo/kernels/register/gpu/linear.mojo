"""Ops `linear`, `linear_residual` and `lm_head` on GPUs."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.linear import (
    NT,
    WGMMA_NT,
    linear_gemm,
    linear_gemv,
    linear_wgmma,
)
from kernels.gpu.tile_op import F32
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
    t: DType, //, BATCH: Int, residual: Bool, gather: Bool
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    w: Pointer[Scalar[t], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[linear_gemv[t, t, BATCH, residual, gather]](
        dst,
        x,
        w,
        unread[DType.float16](w),
        unread[DType.uint8](w),
        added,
        rows,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(gemv_tiles[1](m, BATCH, n)),
        block_dim=THREADS,
    )


def _gemm[
    t: DType, //, MT: Int, residual: Bool, gather: Bool, tf32: Bool
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    w: Pointer[Scalar[t], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[linear_gemm[t, MT, residual, gather, tf32]](
        dst,
        x,
        w,
        added,
        rows,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(ceildiv(m, MT) * ceildiv(n, NT)),
        block_dim=THREADS,
    )


def _wgmma[
    t: DType, //, residual: Bool, gather: Bool
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    w: Pointer[Scalar[t], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    ctx.enqueue_function[linear_wgmma[t, residual, gather]](
        dst,
        x,
        w,
        added,
        rows,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=blocks(ceildiv(m, TALL_TILE) * ceildiv(n, WGMMA_NT)),
        block_dim=THREADS,
    )


def launch_linear[
    t: DType, //, residual: Bool, gather: Bool, tf32: Bool = False
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    w: Pointer[Scalar[t], _],
    added: Pointer[Float32, _],
    rows: Pointer[Int32, _],
    m: Int,
    n: Int,
    k: Int,
) raises:
    """Enqueues out = x @ w^T (+ added).

    Parameters:
        t: Dtype of x and w.
        residual: Whether `added` is added.
        gather: Whether row i of x is `rows[i]`.
        tf32: Whether more rows than a GEMV takes are multiplied as tf32.

    Args:
        ctx: The device.
        dst: `[M, N]` float32.
        x: `[M, K]`.
        w: `[N, K]`.
        added: `[M, N]` float32, read when `residual`.
        rows: `[M]` row numbers, read when `gather`.
        m: M.
        n: N.
        k: K.
    """
    if m == 0:
        return
    comptime for i in range(len(GEMV_BATCHES)):
        comptime BATCH = GEMV_BATCHES[i]
        if m <= BATCH:
            return _gemv[BATCH, residual, gather](
                ctx, dst, x, w, added, rows, m, n, k
            )
    if m <= SHORT_ROWS:
        _gemm[SHORT_TILE, residual, gather, tf32](
            ctx, dst, x, w, added, rows, m, n, k
        )
    else:
        comptime if by_wgmma[t]():
            _wgmma[residual, gather](ctx, dst, x, w, added, rows, m, n, k)
        else:
            _gemm[TALL_TILE, residual, gather, tf32](
                ctx, dst, x, w, added, rows, m, n, k
            )


@extensibility.register("linear", type="gpu")
struct LinearGPU:
    """Computes out[T, N] = x[T, K] @ w[N, K]^T in float32."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString, tf32: Bool = False
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        w: InputTensor[dtype=t, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "linear",
            k,
            w.dim_size(1),
            m,
            n,
            output.dim_size(0),
            output.dim_size(1),
        )
        var out = output.unsafe_ptr()
        launch_linear[False, False, tf32](
            ctx,
            out,
            x.unsafe_ptr(),
            w.unsafe_ptr(),
            out,
            unread[DType.int32](out),
            m,
            n,
            k,
        )


@extensibility.register("linear_residual", type="gpu")
struct LinearResidualGPU:
    """Computes out[T, N] = residual[T, N] + x[T, K] @ w[N, K]^T in float32."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString, tf32: Bool = False
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        w: InputTensor[dtype=t, rank=2, ...],
        residual: InputTensor[dtype=F32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var m = x.dim_size(0)
        var n = w.dim_size(0)
        var k = x.dim_size(1)
        check_linear(
            "linear_residual",
            k,
            w.dim_size(1),
            m,
            n,
            residual.dim_size(0),
            residual.dim_size(1),
        )
        var added = residual.unsafe_ptr()
        launch_linear[True, False, tf32](
            ctx,
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            w.unsafe_ptr(),
            added,
            unread[DType.int32](added),
            m,
            n,
            k,
        )
