"""Hopper's asynchronous matrix products: all that depends on `wgmma`.

A warpgroup, which is a block of ours, multiplies a `[64 rows, 16 k]` by b
`[16 k, N columns]`, both bfloat16 or both float16, and accumulates in float32
over its registers. The documents are chapters of "Asynchronous Warpgroup Level
Matrix Multiply-Accumulate Instructions" of the PTX ISA: "Register Fragments"
(`Sums`, `Fragment`), "Shared Memory Matrix Layout" and "Matrix Descriptor"
(`Panel`), "wgmma.mma_async", "Async Proxy" and "wgmma.fence" (the order of
calls):

    comptime P = Panel[t, 64]
    ...                             # chunks to P.at(row, chunk), by any copy
    copies_seen()                   # every writer, once its writes have landed
    barrier()
    begin_products(sums)
    comptime for step in range(P.STEPS):
        multiply(sums, P.rows(a, step), P.rows(b, step))
    commit_products()
    wait_products[0]()
    settle(sums)                    # now sums may be used,
    barrier()                       # and now a and b be written again

Between `multiply` and the wait nothing may touch the registers of sums and of
an `a` in registers, or write what is read in shared memory. With products of
other sums still in flight, `wait_products[groups]` waits until only the last
`groups` commits are; sums that are in flight must not be settled. All 128
threads make all the calls.
"""
from std.collections.string.string_span import _get_kgen_string
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly
from std.utils import StaticTuple
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync as commit_products,
    wgmma_fence_aligned,
    wgmma_wait_group_sync as wait_products,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.memory import fence_async_view_proxy as copies_seen
from kernels.gpu.tile_op import F32, TILE, Accumulator, Shared, c_col, c_row

comptime ROWS = 64
"""Rows of a product, 16 of each warp."""
comptime CHUNK = 8
"""Elements of 16 bytes: the unit of copies and of swizzling."""
comptime Sums[N: Int] = Array[Accumulator, N // TILE]
"""A lane's elements of a product of N columns, N a multiple of 16: those of
16 columns each. `row` and `column` say which."""
comptime Fragment[t: DType] = SIMD[t, CHUNK]
"""A lane's elements of a, `[64 rows, 16 k]`, in registers."""


@always_inline
def row[e: Int](warp: Int, lane: Int) -> Int:
    """Row of element e of each of `Sums`."""
    return warp * TILE + c_row[e](lane)


@always_inline
def column[j: Int, e: Int](lane: Int) -> Int:
    """Column of element e of the j-th of `Sums`."""
    return j * TILE + c_col[e](lane)


@always_inline
def fragment[t: DType](product: Accumulator) -> Fragment[t]:
    """16 columns of a product, rounded to t, as 16 k of a: a lane holds the
    same elements of both."""
    return rebind[Fragment[t]](product.cast[t]())


@fieldwise_init
struct Operand[t: DType, by_k: Bool](TrivialRegisterPassable):
    """16 k of a or b in shared memory.

    Parameters:
        t: Dtype, bfloat16 or float16.
        by_k: Whether a row in memory has one k, else one row of a or column
            of b.
    """

    var descriptor: WGMMADescriptor[Self.t]


def _swizzle(columns: Int) -> TensorMapSwizzle:
    if columns == 64:
        return TensorMapSwizzle.SWIZZLE_128B
    if columns == 32:
        return TensorMapSwizzle.SWIZZLE_64B
    return TensorMapSwizzle.SWIZZLE_32B


struct Panel[t: DType, COLUMNS: Int]:
    """Rows of `COLUMNS` elements in shared memory, swizzled.

    A panel is dense but for the order of the chunks in a row, and begins at a
    multiple of `ALIGNMENT` bytes. Neither eight chunks of neighbouring rows
    nor those of a row share a bank, so 16-byte copies that go along the rows
    and the products' reads have no conflicts.

    Parameters:
        t: Dtype, bfloat16 or float16.
        COLUMNS: Elements of a row: 64 (swizzle of 128 bytes), 32 or 16. Wider
            matrices are panels one after another.
    """

    comptime CHUNKS = Self.COLUMNS // CHUNK
    """Chunks of a row."""
    comptime STEPS = Self.COLUMNS // TILE
    """Products of 16 k that a panel of `rows` is enough for."""
    comptime EIGHT_ROWS = 8 * Self.COLUMNS * 2
    comptime ALIGNMENT = Self.EIGHT_ROWS
    """Bytes: swizzling goes by the address."""
    comptime SWIZZLE = _swizzle(Self.COLUMNS)

    @staticmethod
    @always_inline
    def at(row: Int, chunk: Int) -> Int:
        """Elements from the panel's start to a chunk of a row."""
        # A line is 128 bytes, all banks once.
        var line = (row * Self.CHUNKS) >> 3
        return row * Self.COLUMNS + (chunk ^ (line & Self.CHUNKS - 1)) * CHUNK

    @staticmethod
    @always_inline
    def rows(panel: Shared[Self.t], step: Int) -> Operand[Self.t, False]:
        """An operand whose rows are the panel's: rows of a, columns of b.

        Args:
            panel: 64 rows for a, N for b. Rows from an address of a multiple
                of `ALIGNMENT` on are a panel too.
            step: Which 16 of its k, below `STEPS`.
        """
        # Strides count 16 bytes. The other one has no meaning here.
        return {
            WGMMADescriptor[Self.t].create[
                Self.EIGHT_ROWS // 16, 1, Self.SWIZZLE
            ](panel.unsafe_offset(step * TILE))
        }

    @staticmethod
    @always_inline
    def columns[
        K: Int
    ](panels: Shared[Self.t], step: Int) -> Operand[Self.t, True]:
        """An operand b whose columns are those of panels `[K, COLUMNS]` one
        after another, which together have at least N.

        Parameters:
            K: Rows of a panel, a multiple of 16.

        Args:
            panels: The panels.
            step: Which 16 of their k.
        """
        return {
            WGMMADescriptor[Self.t].create[
                Self.EIGHT_ROWS // 16, K * Self.COLUMNS * 2 // 16, Self.SWIZZLE
            ](panels.unsafe_offset(step * TILE * Self.COLUMNS))
        }


@always_inline
def settle[n: Int, //](mut sums: Array[Accumulator, n]):
    """Keeps the compiler from moving uses of sums to the other side of this
    call: the calls around it do not name them."""
    comptime for i in range(n):
        comptime for e in range(CHUNK):
            sums[i][e] = inlined_assembly["", Float32, constraints="=f,0"](
                sums[i][e]
            )


@always_inline
def settle[t: DType, //](mut a: Fragment[t]):
    """As of sums, for a in registers."""
    var words = bitcast[DType.uint32, CHUNK // 2](a)
    comptime for i in range(CHUNK // 2):
        words[i] = inlined_assembly["", UInt32, constraints="=r,0"](words[i])
    a = bitcast[t, CHUNK](words)


@always_inline
def begin_products[n: Int, //](mut sums: Array[Accumulator, n]):
    """Goes before the first product of sums, and before the next one after
    they, or an a in registers (settle it before), were written otherwise."""
    settle(sums)
    wgmma_fence_aligned()


@always_inline
def multiply[
    t: DType, n: Int, by_k: Bool, //
](mut sums: Array[Accumulator, n], a: Operand[t, False], b: Operand[t, by_k],):
    """Adds a @ b to sums, from here to the wait on."""
    comptime WIDTH = n * CHUNK
    var d = StaticTuple[Float32, WIDTH]()
    comptime for i in range(WIDTH):
        d[i] = sums[i // CHUNK][i % CHUNK]
    d = wgmma_async[
        ROWS,
        n * TILE,
        TILE,
        F32,
        WIDTH,
        a_type=t,
        b_type=t,
        layout_b="row" if by_k else "col",
    ](a.descriptor, b.descriptor, d)
    comptime for i in range(WIDTH):
        sums[i // CHUNK][i % CHUNK] = d[i]


@always_inline
def multiply[
    t: DType, n: Int, by_k: Bool, //
](mut sums: Array[Accumulator, n], a: Fragment[t], b: Operand[t, by_k],):
    """Adds a @ b to sums with a in registers, from here to the wait on."""
    comptime WIDTH = n * CHUNK
    comptime Pack = _RegisterPackType[
        *TypeList.splat[Trait=TrivialRegisterPassable, WIDTH, Float32]()
    ]
    var d = Array[Float32, WIDTH](fill=0)
    comptime for i in range(WIDTH):
        d[i] = sums[i // CHUNK][i % CHUNK]
    var words = bitcast[DType.uint32, CHUNK // 2](a)
    # std's `wgmma_async` has this form for bfloat16 alone.
    var product = __mlir_op.`pop.inline_asm`[
        _type=Pack,
        assembly=_get_kgen_string[_template[t, WIDTH]()](),
        constraints=_get_kgen_string[_constraints[WIDTH]()](),
        hasSideEffects=True.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](
        words[0],
        words[1],
        words[2],
        words[3],
        b.descriptor.desc,
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1) if by_k else Int32(0),
        Pointer(to=d).unsafe_bitcast[Pack]()[]._mlir_value,
    )
    comptime for i in range(WIDTH):
        sums[i // CHUNK][i % CHUNK] = rebind[Float32](product[i])


def _numbered[
    width: Int
](first: Int, separator: StaticString, prefix: StaticString) -> String:
    """`width` operands from `first` on."""
    var text = String()
    for i in range(first, first + width):
        if i > first:
            text += separator
        text += String(prefix, i)
    return text


def _template[t: DType, width: Int]() -> String:
    """Operands: d, 4 of a, b, the scales of d, a and b, whether b has a k per
    row, and d as it was."""
    comptime word = "bf16" if t == DType.bfloat16 else "f16"
    return String(
        "{ .reg .pred p; setp.ne.b32 p, $",
        width + 5,
        ", 0;\nwgmma.mma_async.sync.aligned.m64n",
        width * 2,
        "k16.f32.",
        word,
        ".",
        word,
        " {",
        _numbered[width](0, ", ", "$"),
        "}, {",
        _numbered[4](width, ", ", "$"),
        "}, $",
        width + 4,
        ", p, ",
        _numbered[3](width + 6, ", ", "$"),
        "; }",
    )


def _constraints[width: Int]() -> String:
    return "=f," * width + "r,r,r,r,l,n,n,n,n," + _numbered[width](0, ",", "")
