"""Ops `linear_int8`, `linear_int4`, `gate_up_silu_int8` and `gate_up_silu_int4`
on GPUs: by GEMV, however many rows of x there are."""
from std.math import ceildiv
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.gpu.gate_up_silu import gate_up_silu_gemv
from kernels.gpu.linear import linear_gemv
from kernels.gpu.tile_op import F32
from kernels.gpu.weight_format import GROUP
from kernels.register.gpu.launch import THREADS, blocks, gemv_tiles, unread
from kernels.register.linear import check_linear

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
