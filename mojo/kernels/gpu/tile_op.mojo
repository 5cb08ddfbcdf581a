"""A 16x16x16 matrix product by one warp: all that depends on the target.

`a` is `[16 rows, 16 k]`, `b` is `[16 columns, 16 k]` or, with `load_b_by_k`,
`[16 k, 16 columns]`, both in shared memory with rows of `row_stride`
elements; the product is accumulated in float32 over the warp's registers, and
`c_row` and `c_col` say which element of it a register holds.

bfloat16 and float16 run on the matrix units:

- NVIDIA: two `mma.sync.m16n8k16`, operands by `ldmatrix.x4` (PTX ISA, "Matrix
  Fragments for mma.m16n8k16" and "ldmatrix").
- CDNA: `v_mfma_f32_16x16x16` (AMD Instinct MI300 Instruction Set Architecture,
  "Matrix Arithmetic Instructions"; the same layout in the MI200 and CDNA4
  documents).
- RDNA3: `v_wmma_f32_16x16x16`, lanes 16..31 mirror lanes 0..15 (RDNA3
  Instruction Set Architecture, "Wave Matrix Multiply Accumulate").
- RDNA4: the same without mirrors, each half of a wave holds half of k (RDNA4
  Instruction Set Architecture, "Wave Matrix Multiply Accumulate").

float32 is exact multiply-adds in the order of k, with the same layout of the
product; its operand is where the values lie, read by `mma16` itself.

tf32, on NVIDIA only and only where it is asked for, multiplies float32 on the
matrix units: four `mma.sync.m16n8k8` (PTX ISA, "Matrix Fragments for
mma.m16n8k8"), of operands that are loaded and then rounded to 10 bits of
fraction by `cvt.rna.tf32.f32`: to nearest, ties away from zero, the only
rounding to nearest that every target has (that to even begins with sm_90).
Without it they are undefined: the format's bits are the hardware's business
(PTX ISA, "Alternate Floating-Point Data Formats").
"""
from std.memory import bitcast
from std.sys import size_of
from std.sys.info import _is_amd_rdna, _is_amd_rdna4, is_nvidia_gpu
from std.sys.intrinsics import llvm_intrinsic
from max.gpu import AddressSpace
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.sync import syncwarp

comptime F32 = DType.float32
comptime TILE = 16
"""Rows, columns and depth of the product."""
comptime Shared[t: DType] = Pointer[
    Scalar[t], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Shared memory, 16-byte aligned."""
comptime Accumulator = SIMD[F32, accumulator_size()]
"""A lane's elements of the product."""


@always_inline
def row_stride[t: DType](columns: Int) -> Int:
    """Elements from row to row in shared memory for rows of `columns`.

    16 bytes of padding: for the columns in use, a multiple of 32 bytes, the
    stride is an odd number of 16-byte words, so 8 rows read together fall in
    different banks.
    """
    return columns + 16 // size_of[t]()


@always_inline
def operand_size[t: DType, tf32: Bool = False]() -> Int:
    """Elements of a or b that a lane holds in registers."""
    comptime if t == F32 and not tf32:
        return 1
    elif is_nvidia_gpu() or _is_amd_rdna4():
        return 8
    elif _is_amd_rdna():
        return 16
    else:
        return 4


@always_inline
def accumulator_size() -> Int:
    """Elements of the product that a lane holds."""
    comptime if is_nvidia_gpu() or _is_amd_rdna():
        return 8
    else:
        return 4


@always_inline
def row_lanes() -> Int:
    """Neighbouring lanes, from a multiple of this, that hold the same rows."""
    comptime if is_nvidia_gpu():
        return 4
    else:
        return 16


@always_inline
def c_row[i: Int](lane: Int) -> Int:
    """Row of element i of a lane's accumulator."""
    comptime if is_nvidia_gpu():
        return (lane >> 2) + 8 * ((i >> 1) & 1)
    elif _is_amd_rdna4():
        return (lane >> 4) * 8 + i
    elif _is_amd_rdna():
        return 2 * i + (lane >> 4)
    else:
        return (lane >> 4) * 4 + i


@always_inline
def c_col[i: Int](lane: Int) -> Int:
    """Column of element i of a lane's accumulator."""
    comptime if is_nvidia_gpu():
        return (lane & 3) * 2 + (i & 1) + 8 * (i >> 2)
    else:
        return lane & 15


@always_inline
def c_at[i: Int, LD: Int](lane: Int) -> Int:
    """Element i's place in a matrix with rows LD apart.

    Every row and column is element 0's and a constant apart, but compilers do
    not see it through the product with LD: as a sum, all places share one
    register.
    """
    comptime FROM_FIRST = c_row[i](0) * LD + c_col[i](0)
    return c_row[0](lane) * LD + c_col[0](lane) + FROM_FIRST


@fieldwise_init
struct Operand[t: DType, LD: Int, by_k: Bool, tf32: Bool = False](
    TrivialRegisterPassable
):
    """A lane's share of a or b.

    Parameters:
        t: Dtype.
        LD: Elements from row to row.
        by_k: Whether a row has one k, else one row of a or column of b.
        tf32: Whether it is float32 rounded to tf32.
    """

    var values: SIMD[Self.t, operand_size[Self.t, Self.tf32]()]
    """The elements; unused when float32."""
    var at: Shared[Self.t]
    """The tile, which must stay as it is until `mma16`; used when float32."""


@always_inline
def _first_k(lane: Int) -> Int:
    """First k that a lane holds on AMD."""
    comptime if _is_amd_rdna4():
        return (lane >> 4) * 8
    elif _is_amd_rdna():
        return 0
    else:
        return (lane >> 4) * 4


@always_inline
def _load_by_row[
    t: DType, //, LD: Int, tf32: Bool
](at: Shared[t], lane: Int) -> Operand[t, LD, False, tf32]:
    """A 16-bit operand on AMD, where a and b have the same layout."""
    comptime S = operand_size[t, tf32]()
    return {
        at.unsafe_offset((lane & 15) * LD + _first_k(lane)).unsafe_load[
            width=S, alignment=min(16, S * 2)
        ](),
        at,
    }


@always_inline
def _load_tf32[
    t: DType, //, LD: Int
](at: Shared[t], row: Int, k: Int) -> Operand[t, LD, False, True]:
    """Loads a or b as tf32: for each half of the 16 k one `ldmatrix.x4`, to
    which a row of four float32 is one of eight 16-bit elements.

    Args:
        at: The tile.
        row: Row of the tile that the lane names.
        k: First k of it, in either half.
    """
    comptime assert t == F32 and is_nvidia_gpu(), "tf32 is NVIDIA's, of float32"
    var first = at.unsafe_offset(row * LD + k)
    var low = ld_matrix[4](first)
    var high = ld_matrix[4](first.unsafe_offset(8))
    var values = low.join(high)
    comptime for i in range(8):
        values[i] = bitcast[t](
            llvm_intrinsic["llvm.nvvm.f2tf32.rna", Int32](values[i])
        )
    return {rebind[SIMD[t, operand_size[t, True]()]](values), at}


@always_inline
def load_a[
    t: DType, //, LD: Int, tf32: Bool = False
](at: Shared[t], lane: Int) -> Operand[t, LD, False, tf32]:
    """Loads a: the tile at `at` has one row of a per row."""
    comptime if tf32:
        return rebind[Operand[t, LD, False, tf32]](
            _load_tf32[LD](at, lane & 15, 4 * (lane >> 4))
        )
    elif t == F32:
        return {SIMD[t, operand_size[t, tf32]()](0), at}
    elif is_nvidia_gpu():
        return {
            ld_matrix[operand_size[t, tf32]()](
                at.unsafe_offset((lane & 15) * LD + 8 * (lane >> 4))
            ),
            at,
        }
    else:
        return _load_by_row[LD, tf32](at, lane)


@always_inline
def load_b[
    t: DType, //, LD: Int, tf32: Bool = False
](at: Shared[t], lane: Int) -> Operand[t, LD, False, tf32]:
    """Loads b: the tile at `at` has one column of b per row."""
    comptime if tf32:
        var row = (lane & 7) + 8 * (lane >> 4)
        return rebind[Operand[t, LD, False, tf32]](
            _load_tf32[LD](at, row, 4 * ((lane >> 3) & 1))
        )
    elif t == F32:
        return {SIMD[t, operand_size[t, tf32]()](0), at}
    elif is_nvidia_gpu():
        var row = (lane & 7) + 8 * (lane >> 4)
        var k = 8 * ((lane >> 3) & 1)
        return {
            ld_matrix[operand_size[t, tf32]()](at.unsafe_offset(row * LD + k)),
            at,
        }
    else:
        return _load_by_row[LD, tf32](at, lane)


@always_inline
def load_b_by_k[
    t: DType, //, LD: Int
](at: Shared[t], lane: Int) -> Operand[t, LD, True]:
    """Loads b: the tile at `at` has one k per row, as V of attention has."""
    comptime if t == F32:
        return {SIMD[t, operand_size[t]()](0), at}
    elif is_nvidia_gpu():
        return {
            ld_matrix[operand_size[t](), transpose=True](
                at.unsafe_offset((lane & 15) * LD + 8 * (lane >> 4))
            ),
            at,
        }
    else:
        var values = SIMD[t, operand_size[t]()](0)
        var first = at.unsafe_offset(_first_k(lane) * LD + (lane & 15))
        comptime for j in range(operand_size[t]()):
            values[j] = first[unsafe_offset=j * LD]
        return {values, at}


@always_inline
def product_as_a[
    t: DType, //, LD: Int
](product: Accumulator, scratch: Shared[t], lane: Int) -> Operand[t, LD, False]:
    """Turns a product, rounded to t, into operand a of the next.

    On NVIDIA a lane holds the same elements of both (PTX ISA, "Matrix Fragments
    for mma.m16n8k16": A's registers are C's of two neighbouring n8 products);
    elsewhere they go through shared memory.

    Args:
        product: The product.
        scratch: `[16, LD]` of the warp alone, which must stay as it is until
            `mma16`; it may be that of the operand before.
        lane: Number of the thread in its warp.
    """
    comptime S = operand_size[t]()
    comptime if is_nvidia_gpu() and t != F32:
        return {rebind[SIMD[t, S]](product.cast[t]()), scratch}
    else:
        syncwarp()
        comptime for i in range(accumulator_size()):
            scratch[
                unsafe_offset=c_row[i](lane) * LD + c_col[i](lane)
            ] = product[i].cast[t]()
        syncwarp()
        return load_a[LD](scratch, lane)


@always_inline
def _wmma_rdna4[
    t: DType
](a: SIMD[t, 8], b: SIMD[t, 8], c: SIMD[F32, 8]) -> SIMD[F32, 8]:
    comptime if t == DType.float16:
        return llvm_intrinsic[
            "llvm.amdgcn.wmma.f32.16x16x16.f16", SIMD[F32, 8]
        ](a, b, c)
    else:
        return llvm_intrinsic[
            "llvm.amdgcn.wmma.f32.16x16x16.bf16", SIMD[F32, 8]
        ](bitcast[DType.int16, 8](a), bitcast[DType.int16, 8](b), c)


@always_inline
def _rows4[
    LA: Int
](a: Shared[F32], k: Int, lane: Int) -> Array[SIMD[F32, 4], accumulator_size()]:
    """4 k of the rows of a that a lane holds, one per element."""
    var first = a.unsafe_offset(c_row[0](lane) * LA + k)
    var rows = Array[SIMD[F32, 4], accumulator_size()](fill=0)
    comptime for i in range(accumulator_size()):
        rows[i] = first.unsafe_load[width=4, alignment=16](c_row[i](0) * LA)
    return rows^


@always_inline
def _fma4[
    LB: Int, by_k: Bool
](
    mut acc: Accumulator,
    rows: Array[SIMD[F32, 4], accumulator_size()],
    b: Shared[F32],
    k: Int,
    lane: Int,
):
    """4 k of the float32 product: a lane reads the columns that it holds.
    Elements of one row or column are one load to the compiler."""
    comptime for i in range(accumulator_size()):
        var column = SIMD[F32, 4](0)
        comptime if by_k:
            var first = b.unsafe_offset(c_col[0](lane) + k * LB)
            comptime for j in range(4):
                column[j] = first[unsafe_offset=c_col[i](0) + j * LB]
        else:
            var first = b.unsafe_offset(c_col[0](lane) * LB + k)
            column = first.unsafe_load[width=4, alignment=16](c_col[i](0) * LB)
        comptime for j in range(4):
            acc[i] = rows[i][j].fma(column[j], acc[i])


@always_inline
def mma16[
    t: DType, LA: Int, LB: Int, by_k: Bool, tf32: Bool, //
](
    mut acc: Accumulator,
    a: Operand[t, LA, False, tf32],
    b: Operand[t, LB, by_k, tf32],
    lane: Int,
):
    """Adds a @ b to the accumulator; every lane of the warp takes part."""
    comptime if tf32:
        comptime for k_half in range(2):
            var left = acc.slice[4, offset=0]()
            var right = acc.slice[4, offset=4]()
            var rows = a.values.slice[4, offset=4 * k_half]()
            mma(left, rows, b.values.slice[2, offset=4 * k_half](), left)
            mma(right, rows, b.values.slice[2, offset=4 * k_half + 2](), right)
            acc = rebind[Accumulator](left.join(right))
    elif t == F32:
        var at = rebind[Shared[F32]](a.at)
        var bt = rebind[Shared[F32]](b.at)
        # Not unrolled: a compiler that sees the loads of many products holds
        # what they share in more registers than there are.
        for k in range(0, TILE, 4):
            _fma4[LB, by_k](acc, _rows4[LA](at, k, lane), bt, k, lane)
    elif is_nvidia_gpu():
        var left = SIMD[F32, 4](0)
        var right = SIMD[F32, 4](0)
        mma(
            left,
            a.values,
            b.values.slice[4, offset=0](),
            acc.slice[4, offset=0](),
        )
        mma(
            right,
            a.values,
            b.values.slice[4, offset=4](),
            acc.slice[4, offset=4](),
        )
        acc = rebind[Accumulator](left.join(right))
    elif _is_amd_rdna4():
        acc = rebind[Accumulator](
            _wmma_rdna4(
                rebind[SIMD[t, 8]](a.values),
                rebind[SIMD[t, 8]](b.values),
                rebind[SIMD[F32, 8]](acc),
            )
        )
    else:
        var d = Accumulator(0)
        mma(d, a.values, b.values, acc)
        acc = d


@always_inline
def mma16_each[
    t: DType, LA: Int, N: Int, //, LB: Int, by_k: Bool
](
    mut sums: Array[Accumulator, N],
    a: Operand[t, LA, False],
    b: Shared[t],
    step: Int,
    lane: Int,
):
    """Adds a @ b to each of N accumulators, of N tiles b a step apart.

    float32 goes through all tiles with 4 k of a at a time: with all 16 they
    would not stay in registers.

    Args:
        sums: The accumulators.
        a: Operand a of them all.
        b: First tile b, rows LB apart: one k per row when by_k, else one
            column.
        step: Elements from a tile to the next.
        lane: Number of the thread in its warp.
    """
    comptime if t == F32:
        var left = rebind[Shared[F32]](a.at)
        var right = rebind[Shared[F32]](b)
        for k in range(0, TILE, 4):
            var rows = _rows4[LA](left, k, lane)
            comptime for n in range(N):
                _fma4[LB, by_k](
                    sums[n], rows, right.unsafe_offset(n * step), k, lane
                )
    else:
        comptime for n in range(N):
            var at = b.unsafe_offset(n * step)
            comptime if by_k:
                mma16(sums[n], a, load_b_by_k[LB](at, lane), lane)
            else:
                mma16(sums[n], a, load_b[LB](at, lane), lane)
