"""The launches of the projections to q, k and v on GPUs."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
from kernels.gpu.qkv import NT, WGMMA_NT, qkv_gemm, qkv_gemv, qkv_wgmma
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


def _gemv[
    t: DType, //, BATCH: Int
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    wq: Pointer[Scalar[t], _],
    wk: Pointer[Scalar[t], _],
    wv: Pointer[Scalar[t], _],
    m: Int,
    nq: Int,
    nk: Int,
    k: Int,
) raises:
    ctx.enqueue_function[qkv_gemv[t, t, BATCH]](
        dst,
        x,
        wq,
        unread[DType.float16](wq),
        unread[DType.uint8](wq),
        wk,
        unread[DType.float16](wk),
        unread[DType.uint8](wk),
        wv,
        unread[DType.float16](wv),
        unread[DType.uint8](wv),
        Int32(m),
        Int32(nq),
        Int32(nk),
        Int32(k),
        grid_dim=blocks(
            gemv_tiles[1](m, BATCH, nq) + 2 * gemv_tiles[1](m, BATCH, nk)
        ),
        block_dim=THREADS,
    )


def _gemm[
    t: DType, //, MT: Int, tf32: Bool
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    wq: Pointer[Scalar[t], _],
    wk: Pointer[Scalar[t], _],
    wv: Pointer[Scalar[t], _],
    m: Int,
    nq: Int,
    nk: Int,
    k: Int,
) raises:
    ctx.enqueue_function[qkv_gemm[t, MT, tf32]](
        dst,
        x,
        wq,
        wk,
        wv,
        Int32(m),
        Int32(nq),
        Int32(nk),
        Int32(k),
        grid_dim=blocks(
            ceildiv(m, MT) * (ceildiv(nq, NT) + 2 * ceildiv(nk, NT))
        ),
        block_dim=THREADS,
    )


def _wgmma[
    t: DType, //
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    wq: Pointer[Scalar[t], _],
    wk: Pointer[Scalar[t], _],
    wv: Pointer[Scalar[t], _],
    m: Int,
    nq: Int,
    nk: Int,
    k: Int,
) raises:
    ctx.enqueue_function[qkv_wgmma[t]](
        dst,
        x,
        wq,
        wk,
        wv,
        Int32(m),
        Int32(nq),
        Int32(nk),
        Int32(k),
        grid_dim=blocks(
            ceildiv(m, TALL_TILE)
            * (ceildiv(nq, WGMMA_NT) + 2 * ceildiv(nk, WGMMA_NT))
        ),
        block_dim=THREADS,
    )


def launch_qkv[
    t: DType, //, tf32: Bool = False
](
    ctx: DeviceContext,
    dst: Pointer[mut=True, Float32, _],
    x: Pointer[Scalar[t], _],
    wq: Pointer[Scalar[t], _],
    wk: Pointer[Scalar[t], _],
    wv: Pointer[Scalar[t], _],
    m: Int,
    nq: Int,
    nk: Int,
    k: Int,
) raises:
    """Enqueues the projections of x by wq, wk and wv.

    Parameters:
        t: Dtype of x and the weights.
        tf32: Whether more rows than a GEMV takes are multiplied as tf32.

    Args:
        ctx: The device.
        dst: `[T, Nq + 2 Nk]` float32.
        x: `[T, K]`.
        wq: `[Nq, K]`.
        wk: `[Nk, K]`.
        wv: `[Nk, K]`.
        m: T, from 1.
        nq: Nq.
        nk: Nk.
        k: K.
    """
    comptime for i in range(len(GEMV_BATCHES)):
        comptime BATCH = GEMV_BATCHES[i]
        if m <= BATCH:
            return _gemv[BATCH](ctx, dst, x, wq, wk, wv, m, nq, nk, k)
    if m <= SHORT_ROWS:
        _gemm[SHORT_TILE, tf32](ctx, dst, x, wq, wk, wv, m, nq, nk, k)
    else:
        comptime if by_wgmma[t]():
            _wgmma(ctx, dst, x, wq, wk, wv, m, nq, nk, k)
        else:
            _gemm[TALL_TILE, tf32](ctx, dst, x, wq, wk, wv, m, nq, nk, k)
