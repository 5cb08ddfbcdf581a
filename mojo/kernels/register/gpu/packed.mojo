"""Ops `linear_int8`, `linear_int4`, `gate_up_silu_int8`, `gate_up_silu_int4`,
`qkv_rope_append_int8` and `qkv_rope_append_int4` on GPUs: by GEMV, however many
rows of x there are."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.gpu.gate_up_silu import gate_up_silu_gemv
from kernels.gpu.linear import linear_gemv
from kernels.gpu.qkv import qkv_gemv
from kernels.gpu.tile_op import F32
from kernels.gpu.weight_format import GROUP
from kernels.register.gpu.kv_cache import contiguous
from kernels.register.gpu.launch import THREADS, blocks, gemv_tiles, unread
from kernels.register.gpu.qkv_rope_append import launch_rope_append
from kernels.register.linear import check_linear
from kernels.register.qkv_rope_append import check_heads, check_vectors

comptime BATCH = 4
"""Rows of x for which the weights stream past once, where there are several."""


struct PackedMatrix[w: DType](TrivialRegisterPassable):
    """A weight matrix `[N, K]` as `kernels.gpu.weight_format` has it.

    Parameters:
        w: Its format: int8, or uint8 for int4.
    """

    var data: ImmPointer[Scalar[Self.w], UntrackedOrigin[mut=False]]
    var scales: ImmPointer[Float16, UntrackedOrigin[mut=False]]
    var zeros: ImmPointer[UInt8, UntrackedOrigin[mut=False]]
    var n: Int

    def __init__(
        out self,
        op: StaticString,
        k: Int,
        data: InputTensor[dtype=Self.w, rank=2, ...],
        scales: InputTensor[dtype=DType.float16, rank=2, ...],
    ) raises:
        """Takes a matrix without zero points; raises where it has not `k`
        columns or its arrays do not agree."""
        self.n = data.dim_size(0)
        var columns = ceildiv(k, 2) if Self.w == DType.uint8 else k
        if (
            data.dim_size(1) != columns
            or scales.dim_size(0) != self.n
            or scales.dim_size(1) != ceildiv(k, GROUP)
        ):
            raise Error(
                op,
                ": x has ",
                k,
                " columns, which a matrix stored as [",
                self.n,
                ", ",
                data.dim_size(1),
                "] with scales [",
                scales.dim_size(0),
                ", ",
                scales.dim_size(1),
                "] has not",
            )
        self.data = unread[Self.w](data.unsafe_ptr())
        self.scales = unread[DType.float16](scales.unsafe_ptr())
        self.zeros = unread[DType.uint8](scales.unsafe_ptr())

    def __init__(
        out self,
        op: StaticString,
        k: Int,
        data: InputTensor[dtype=Self.w, rank=2, ...],
        scales: InputTensor[dtype=DType.float16, rank=2, ...],
        zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
    ) raises:
        """Takes a matrix with zero points."""
        self = Self(op, k, data, scales)
        if zeros.dim_size(0) != self.n or zeros.dim_size(1) != scales.dim_size(
            1
        ):
            raise Error(
                op,
                ": zero points [",
                zeros.dim_size(0),
                ", ",
                zeros.dim_size(1),
                "] are not those of ",
                self.n,
                " rows of ",
                k,
            )
        self.zeros = unread[DType.uint8](zeros.unsafe_ptr())


def _linear[
    t: DType, w: DType, //
](
    ctx: DeviceContext,
    op: StaticString,
    output: OutputTensor[dtype=F32, rank=2, ...],
    x: InputTensor[dtype=t, rank=2, ...],
    matrix: PackedMatrix[w],
) raises:
    var m = x.dim_size(0)
    var k = x.dim_size(1)
    check_linear(op, k, k, m, matrix.n, output.dim_size(0), output.dim_size(1))
    var out = output.unsafe_ptr()

    @always_inline
    def launch[batch: Int]() raises {imm}:
        ctx.enqueue_function[linear_gemv[w, t, batch, False, False]](
            out,
            x.unsafe_ptr(),
            matrix.data,
            matrix.scales,
            matrix.zeros,
            out,
            unread[DType.int32](out),
            Int32(m),
            Int32(matrix.n),
            Int32(k),
            grid_dim=blocks(gemv_tiles[1](m, batch, matrix.n)),
            block_dim=THREADS,
        )

    if m == 1:
        launch[1]()
    elif m > 1:
        launch[BATCH]()


def _gate_up_silu[
    t: DType, w: DType, //
](
    ctx: DeviceContext,
    op: StaticString,
    output: OutputTensor[dtype=t, rank=2, ...],
    x: InputTensor[dtype=t, rank=2, ...],
    gate: PackedMatrix[w],
    up: PackedMatrix[w],
) raises:
    var m = x.dim_size(0)
    var k = x.dim_size(1)
    check_linear(op, k, k, m, gate.n, output.dim_size(0), up.n)

    @always_inline
    def launch[batch: Int]() raises {imm}:
        ctx.enqueue_function[gate_up_silu_gemv[w, t, batch]](
            output.unsafe_ptr(),
            x.unsafe_ptr(),
            gate.data,
            gate.scales,
            gate.zeros,
            up.data,
            up.scales,
            up.zeros,
            Int32(m),
            Int32(gate.n),
            Int32(k),
            grid_dim=blocks(gemv_tiles[2](m, batch, gate.n)),
            block_dim=THREADS,
        )

    if m == 1:
        launch[1]()
    elif m > 1:
        launch[BATCH]()


@extensibility.register("linear_int8", type="gpu")
struct LinearInt8GPU:
    """Computes out[T, N] = x[T, K] @ w[N, K]^T in float32, w in int8."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        w: InputTensor[dtype=DType.int8, rank=2, ...],
        w_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "linear_int8"
        var k = x.dim_size(1)
        var matrix = PackedMatrix[DType.int8](op, k, w, w_scales)
        _linear(ctx, op, output, x, matrix)


@extensibility.register("linear_int4", type="gpu")
struct LinearInt4GPU:
    """Computes out[T, N] = x[T, K] @ w[N, K]^T in float32, w in int4."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        w: InputTensor[dtype=DType.uint8, rank=2, ...],
        w_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        w_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "linear_int4"
        var k = x.dim_size(1)
        var matrix = PackedMatrix[DType.uint8](op, k, w, w_scales, w_zeros)
        _linear(ctx, op, output, x, matrix)


@extensibility.register("gate_up_silu_int8", type="gpu")
struct GateUpSiluInt8GPU:
    """Computes out[T, N] = silu(x @ gate^T) * (x @ up^T), both in int8."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        gate: InputTensor[dtype=DType.int8, rank=2, ...],
        gate_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        up: InputTensor[dtype=DType.int8, rank=2, ...],
        up_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "gate_up_silu_int8"
        comptime Matrix = PackedMatrix[DType.int8]
        var k = x.dim_size(1)
        _gate_up_silu(
            ctx,
            op,
            output,
            x,
            Matrix(op, k, gate, gate_scales),
            Matrix(op, k, up, up_scales),
        )


@extensibility.register("gate_up_silu_int4", type="gpu")
struct GateUpSiluInt4GPU:
    """Computes out[T, N] = silu(x @ gate^T) * (x @ up^T), both in int4."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=2, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        gate: InputTensor[dtype=DType.uint8, rank=2, ...],
        gate_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        gate_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        up: InputTensor[dtype=DType.uint8, rank=2, ...],
        up_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        up_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "gate_up_silu_int4"
        comptime Matrix = PackedMatrix[DType.uint8]
        var k = x.dim_size(1)
        _gate_up_silu(
            ctx,
            op,
            output,
            x,
            Matrix(op, k, gate, gate_scales, gate_zeros),
            Matrix(op, k, up, up_scales, up_zeros),
        )


def _qkv_rope_append[
    t: DType, w: DType, //, head_dim: Int, has_bias: Bool, has_norm: Bool
](
    ctx: DeviceContext,
    op: StaticString,
    output: OutputTensor[dtype=t, rank=3, ...],
    cache: MutableInputTensor[dtype=t, rank=6, ...],
    x: InputTensor[dtype=t, rank=2, ...],
    wq: PackedMatrix[w],
    wk: PackedMatrix[w],
    wv: PackedMatrix[w],
    bias_q: InputTensor[dtype=F32, rank=1, ...],
    bias_k: InputTensor[dtype=F32, rank=1, ...],
    bias_v: InputTensor[dtype=F32, rank=1, ...],
    norm_q: InputTensor[dtype=F32, rank=1, ...],
    norm_k: InputTensor[dtype=F32, rank=1, ...],
    eps: Float32,
    table: InputTensor[dtype=F32, rank=2, ...],
    offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    start: InputTensor[dtype=DType.int32, rank=1, ...],
    layer: Int32,
) raises:
    """Checks a call and enqueues it."""
    var tokens = x.dim_size(0)
    var k = x.dim_size(1)
    var cached = contiguous(cache)
    check_heads[head_dim](
        op, cached.shape, wq.n, wk.n, wv.n, table, offsets, start, layer
    )
    check_vectors[head_dim, has_bias, has_norm](
        wq.n, wk.n, bias_q, bias_k, bias_v, norm_q, norm_k
    )
    if tokens == 0:
        return
    var projected = ctx.enqueue_create_buffer[F32](tokens * (wq.n + 2 * wk.n))
    var dst = projected.unsafe_ptr()

    @always_inline
    def launch[batch: Int]() raises {imm}:
        ctx.enqueue_function[qkv_gemv[w, t, batch]](
            dst,
            x.unsafe_ptr(),
            wq.data,
            wq.scales,
            wq.zeros,
            wk.data,
            wk.scales,
            wk.zeros,
            wv.data,
            wv.scales,
            wv.zeros,
            Int32(tokens),
            Int32(wq.n),
            Int32(wk.n),
            Int32(k),
            grid_dim=blocks(
                gemv_tiles[1](tokens, batch, wq.n)
                + 2 * gemv_tiles[1](tokens, batch, wk.n)
            ),
            block_dim=THREADS,
        )

    # Of int4, one with the offsets of several rows of x would need more scalar
    # registers than CDNA has.
    comptime several = 1 if w == DType.uint8 else BATCH
    if tokens == 1:
        launch[1]()
    else:
        launch[several]()
    launch_rope_append[has_bias, has_norm](
        ctx,
        output.unsafe_ptr(),
        cache.unsafe_ptr(),
        cached,
        dst,
        bias_q.unsafe_ptr(),
        bias_k.unsafe_ptr(),
        bias_v.unsafe_ptr(),
        norm_q.unsafe_ptr(),
        norm_k.unsafe_ptr(),
        eps,
        table.unsafe_ptr(),
        table.dim_size(1),
        offsets.unsafe_ptr(),
        start.unsafe_ptr(),
        start.dim_size(0),
        tokens,
        wq.n // head_dim,
        Int(layer),
    )
    # Pointers alone would not keep it until here.
    _ = projected^


@extensibility.register("qkv_rope_append_int8", type="gpu")
struct QKVRopeAppendInt8GPU:
    """Op `qkv_rope_append` of matrices in int8."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=DType.int8, rank=2, ...],
        wq_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wk: InputTensor[dtype=DType.int8, rank=2, ...],
        wk_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wv: InputTensor[dtype=DType.int8, rank=2, ...],
        wv_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        ctx: DeviceContext,
    ) raises:
        comptime op = "qkv_rope_append_int8"
        comptime Matrix = PackedMatrix[DType.int8]
        var k = x.dim_size(1)
        _qkv_rope_append[head_dim, has_bias, has_norm](
            ctx,
            op,
            output,
            cache,
            x,
            Matrix(op, k, wq, wq_scales),
            Matrix(op, k, wk, wk_scales),
            Matrix(op, k, wv, wv_scales),
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            eps,
            table,
            offsets,
            start,
            layer,
        )


@extensibility.register("qkv_rope_append_int4", type="gpu")
struct QKVRopeAppendInt4GPU:
    """Op `qkv_rope_append` of matrices in int4."""

    @staticmethod
    def execute[
        t: DType,
        //,
        head_dim: Int,
        has_bias: Bool,
        has_norm: Bool,
        target: StaticString,
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        cache: MutableInputTensor[dtype=t, rank=6, ...],
        x: InputTensor[dtype=t, rank=2, ...],
        wq: InputTensor[dtype=DType.uint8, rank=2, ...],
        wq_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wq_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        wk: InputTensor[dtype=DType.uint8, rank=2, ...],
        wk_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wk_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        wv: InputTensor[dtype=DType.uint8, rank=2, ...],
        wv_scales: InputTensor[dtype=DType.float16, rank=2, ...],
        wv_zeros: InputTensor[dtype=DType.uint8, rank=2, ...],
        bias_q: InputTensor[dtype=F32, rank=1, ...],
        bias_k: InputTensor[dtype=F32, rank=1, ...],
        bias_v: InputTensor[dtype=F32, rank=1, ...],
        norm_q: InputTensor[dtype=F32, rank=1, ...],
        norm_k: InputTensor[dtype=F32, rank=1, ...],
        eps: Float32,
        table: InputTensor[dtype=F32, rank=2, ...],
        offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        start: InputTensor[dtype=DType.int32, rank=1, ...],
        layer: Int32,
        ctx: DeviceContext,
    ) raises:
        comptime op = "qkv_rope_append_int4"
        comptime Matrix = PackedMatrix[DType.uint8]
        var k = x.dim_size(1)
        _qkv_rope_append[head_dim, has_bias, has_norm](
            ctx,
            op,
            output,
            cache,
            x,
            Matrix(op, k, wq, wq_scales, wq_zeros),
            Matrix(op, k, wk, wk_scales, wk_zeros),
            Matrix(op, k, wv, wv_scales, wv_zeros),
            bias_q,
            bias_k,
            bias_v,
            norm_q,
            norm_k,
            eps,
            table,
            offsets,
            start,
            layer,
        )
