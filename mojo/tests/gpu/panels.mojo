"""Products of `wgmma_op` by its own maps: which element lies where, in shared memory and in registers."""
from std.memory import unsafe_stack_allocation
from max.gpu import AddressSpace, barrier, lane_id, thread_idx, warp_id
from kernels.gpu.tile_op import Accumulator, Shared
from kernels.gpu.wgmma_op import (
    CHUNK,
    ROWS,
    Fragment,
    Operand,
    Panel,
    Sums,
    begin_products,
    column,
    commit_products,
    copies_seen,
    fragment,
    multiply,
    row,
    settle,
    wait_products,
)


def fill[
    t: DType, COLUMNS: Int, swizzled: Bool
](
    to: Shared[t],
    matrix: ImmPointer[Scalar[t], ImmutAnyOrigin],
    rows: Int,
    columns: Int,
):
    """Copies `[rows, columns]` to panels, element by element."""
    for i in range(Int(thread_idx.x), rows * columns, 128):
        var r = i // columns
        var c = i % columns
        var at = r * COLUMNS + c % COLUMNS
        comptime if swizzled:
            at = Panel[t, COLUMNS].at(r, c % COLUMNS // CHUNK) + c % CHUNK
        to[unsafe_offset=c // COLUMNS * rows * COLUMNS + at] = matrix[
            unsafe_offset=i
        ]


def product[
    t: DType,
    N: Int,
    K: Int,
    COLUMNS: Int,
    by_k: Bool,
    in_registers: Bool,
    swizzled: Bool,
](
    o: MutPointer[Float32, MutAnyOrigin],
    a: ImmPointer[Scalar[t], ImmutAnyOrigin],
    b: ImmPointer[Scalar[t], ImmutAnyOrigin],
):
    """128 threads: out `[64, N]` = a `[64, K]` @ b, `[K, N]` when by_k, else `[N, K]`."""
    comptime P = Panel[t, COLUMNS]
    comptime SPACE = (128 + ROWS) * 128
    var panels = unsafe_stack_allocation[
        SPACE,
        Scalar[t],
        alignment=P.ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var right = panels.unsafe_offset(ROWS * 128)
    fill[t, COLUMNS, swizzled](panels, a, ROWS, K)
    comptime if by_k:
        fill[t, COLUMNS, swizzled](right, b, K, N)
    else:
        fill[t, COLUMNS, swizzled](right, b, N, K)
    copies_seen()
    barrier()
    var lane = Int(lane_id())
    var warp = Int(warp_id())
    var held = Array[Fragment[t], K // 16](fill=Fragment[t](0))
    comptime if in_registers:
        comptime for step in range(K // 16):
            var of_step = Accumulator(0)
            comptime for e in range(CHUNK):
                of_step[e] = a[
                    unsafe_offset=row[e](warp, lane) * K + column[step, e](lane)
                ].cast[DType.float32]()
            held[step] = fragment[t](of_step)
            settle(held[step])
    var sums = Sums[N](fill=Accumulator(0))
    begin_products(sums)

    @always_inline
    def multiply_all[step: Int](mut sums: Sums[N], y: Operand[t, _]) {imm}:
        comptime if in_registers:
            multiply(sums, held[step], y)
        else:
            var x = panels.unsafe_offset(step // P.STEPS * ROWS * COLUMNS)
            multiply(sums, P.rows(x, step % P.STEPS), y)

    comptime for step in range(K // 16):
        comptime if by_k:
            multiply_all[step](sums, P.columns[K](right, step))
        else:
            var y = right.unsafe_offset(step // P.STEPS * N * COLUMNS)
            multiply_all[step](sums, P.rows(y, step % P.STEPS))
    commit_products()
    wait_products[0]()
    settle(sums)
    comptime for j in range(N // 16):
        comptime for e in range(CHUNK):
            o[unsafe_offset=row[e](warp, lane) * N + column[j, e](lane)] = sums[
                j
            ][e]
