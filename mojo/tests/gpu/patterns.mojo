"""Small kernels that synchronise as real ones do, and the same kernels broken in one place.

`defect` names what is wrong; "" is the kernel as it should be. A defect that a target does not have changes nothing
there.
"""
from std.atomic import Atomic, Ordering, fence
from std.memory import unsafe_stack_allocation
from std.os import abort
from std.sys.info import is_nvidia_gpu
from max.gpu import (
    AddressSpace,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.memory import (
    async_copy,
    async_copy_commit_group,
    async_copy_wait_all,
    async_copy_wait_group,
)
from max.gpu.primitives import warp
from max.gpu.sync import syncwarp

comptime F = MutPointer[Float32, MutAnyOrigin]
comptime G = ImmPointer[Float32, ImmutAnyOrigin]
comptime U = MutPointer[UInt32, MutAnyOrigin]
comptime T = 4 * WARP_SIZE


@always_inline
def device_scope() -> StaticString:
    comptime if is_nvidia_gpu():
        return "device"
    return "agent"


@always_inline
def block_scope() -> StaticString:
    comptime if is_nvidia_gpu():
        return "block"
    return "workgroup"


comptime Shared = Pointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]


@always_inline
def shared_floats[n: Int]() -> Shared:
    return unsafe_stack_allocation[
        n, Float32, alignment=16, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()


def reverse[defect: StaticString](o: F, x: G):
    """One block: out = x backwards, through shared memory."""
    var s = shared_floats[T]()
    var t = Int(thread_idx.x)
    comptime if defect == "early return":
        if t == 5:
            return
    comptime if defect == "unwritten":
        if t != 7:
            s[unsafe_offset=t] = x[unsafe_offset=t]
    else:
        s[unsafe_offset=t] = x[unsafe_offset=t]
    comptime if defect == "divergent barrier":
        if t < WARP_SIZE:
            barrier()
        else:
            barrier()
    elif defect == "half barrier":
        if t < WARP_SIZE:
            barrier()
    elif defect != "no barrier":
        barrier()
    comptime if defect == "beyond shared":
        o[unsafe_offset=t] = s[unsafe_offset=T - t]
    elif defect == "misaligned":
        var v = s.unsafe_offset(1).unsafe_load[width=2, alignment=8](0)
        o[unsafe_offset=t] = s[unsafe_offset=T - 1 - t] + 0 * v[0]
    else:
        o[unsafe_offset=t] = s[unsafe_offset=T - 1 - t]


def rows[defect: StaticString](o: F, x: G, n: Int32):
    """Any grid: out = 2 x of n elements, a block at a time."""
    for base in range(Int(block_idx.x) * T, Int(n), Int(grid_dim.x) * T):
        var i = base + Int(thread_idx.x)
        comptime if defect == "off by one":
            if i <= Int(n):
                o[unsafe_offset=i] = 2 * x[unsafe_offset=min(i, Int(n) - 1)]
        elif defect == "beyond the end":
            if i < Int(n):
                o[unsafe_offset=i] = 2 * x[unsafe_offset=i] + 0 * (
                    x[unsafe_offset=i + 1]
                )
        elif defect == "before the start":
            if i < Int(n):
                o[unsafe_offset=i] = 2 * x[unsafe_offset=i] + 0 * (
                    x[unsafe_offset=i - 1]
                )
        elif defect == "far away":
            if i < Int(n):
                o[unsafe_offset=i + (1 << 40)] = 2 * x[unsafe_offset=i]
        elif defect == "same cell":
            o[unsafe_offset=Int(thread_idx.x)] = 2
        elif defect == "abort":
            if i == 3:
                abort()
        else:
            if i < Int(n):
                o[unsafe_offset=i] = 2 * x[unsafe_offset=i]


def stages[defect: StaticString](o: F, x: G, steps: Int32):
    """One block, two stages: out[t] = sum over steps of x[step, T - 1 - t].

    Asynchronous copies on NVIDIA, registers and stores on AMD.
    """
    var s = shared_floats[2 * T]()
    var t = Int(thread_idx.x)
    var sum: Float32 = 0

    @always_inline
    def start(step: Int, stage: Int) {imm} -> Float32:
        comptime if is_nvidia_gpu():
            async_copy[4](
                x.unsafe_offset(step * T + t).unsafe_address_space_cast[
                    AddressSpace.GLOBAL
                ](),
                s.unsafe_offset(stage * T + t),
            )
            comptime if defect != "no commit":
                async_copy_commit_group()
            return 0
        return x[unsafe_offset=step * T + t]

    @always_inline
    def finish(value: Float32, stage: Int) {imm}:
        comptime if not is_nvidia_gpu():
            s[unsafe_offset=stage * T + t] = value

    var n = Int(steps)
    var held = start(0, 0)
    finish(held, 0)
    for step in range(n):
        comptime if defect == "wrong group":
            async_copy_wait_group(1)
        elif defect != "no wait":
            async_copy_wait_group(0)
        comptime if defect != "no barrier":
            barrier()
        comptime if defect == "same stage":
            if step + 1 < n:
                held = start(step + 1, step & 1)
        else:
            if step + 1 < n:
                held = start(step + 1, (step + 1) & 1)
        sum += s[unsafe_offset=(step & 1) * T + T - 1 - t]
        comptime if defect == "same stage":
            if step + 1 < n:
                finish(held, step & 1)
        else:
            if step + 1 < n:
                finish(held, (step + 1) & 1)
    o[unsafe_offset=t] = sum


def one_stage[defect: StaticString](o: F, x: G, steps: Int32):
    """One block, one stage, a barrier on either side of its use."""
    var s = shared_floats[T]()
    var t = Int(thread_idx.x)
    var sum: Float32 = 0
    for step in range(Int(steps)):
        s[unsafe_offset=t] = x[unsafe_offset=step * T + t]
        barrier()
        sum += s[unsafe_offset=T - 1 - t]
        comptime if defect != "no trailing barrier":
            barrier()
    o[unsafe_offset=t] = sum


def in_warp[defect: StaticString](o: F, x: G):
    """One block: each warp turns its own values around in shared memory."""
    var s = shared_floats[T]()
    var t = Int(thread_idx.x)
    var first = t - Int(lane_id())
    s[unsafe_offset=t] = x[unsafe_offset=t]
    comptime if defect != "no syncwarp":
        syncwarp()
    var v = s[unsafe_offset=first + WARP_SIZE - 1 - Int(lane_id())]
    comptime if defect == "shuffle of a part":
        if Int(lane_id()) < 8:
            v = warp.shuffle_xor(v, 1)
    elif defect == "two shuffles":
        if Int(lane_id()) < 8:
            v = warp.shuffle_xor(v, 1)
        else:
            v = warp.shuffle_xor(v, 2)
    o[unsafe_offset=t] = v


def pipeline[defect: StaticString](data: F, counter: U, steps: Int32):
    """Block b waits for block b - 1 at every step: all blocks must be resident.

    data[b, step, t] = 2 * data[b - 1, step, T - 1 - t] + b.
    """
    comptime A = Atomic[UInt32, scope=device_scope()]
    comptime N = Atomic[UInt32, scope=block_scope()]
    var b = Int(block_idx.x)
    var t = Int(thread_idx.x)
    for step in range(Int(steps)):
        var v = Float32(step * T + t)
        if b > 0:
            if t == 0:
                comptime if defect == "relaxed load":
                    while A.load[ordering=Ordering.RELAXED](
                        counter.unsafe_offset(b - 1)
                    ) < UInt32(step + 1):
                        pass
                elif defect == "plain load":
                    while counter.unsafe_load[volatile=True](b - 1) < UInt32(
                        step + 1
                    ):
                        pass
                elif defect == "one early":
                    while A.load[ordering=Ordering.ACQUIRE](
                        counter.unsafe_offset(b - 1)
                    ) < UInt32(step):
                        pass
                elif defect == "one late":
                    while A.load[ordering=Ordering.ACQUIRE](
                        counter.unsafe_offset(b - 1)
                    ) < UInt32(step + 2):
                        pass
                elif defect == "fences":
                    while A.load[ordering=Ordering.RELAXED](
                        counter.unsafe_offset(b - 1)
                    ) < UInt32(step + 1):
                        pass
                    fence[Ordering.ACQUIRE, scope=device_scope()]()
                else:
                    while A.load[ordering=Ordering.ACQUIRE](
                        counter.unsafe_offset(b - 1)
                    ) < UInt32(step + 1):
                        pass
            comptime if defect != "no barrier after":
                barrier()
            v = data[
                unsafe_offset=((b - 1) * Int(steps) + step) * T + T - 1 - t
            ]
        comptime if defect == "fence first":
            fence[Ordering.RELEASE, scope=device_scope()]()
        data[unsafe_offset=(b * Int(steps) + step) * T + t] = v * 2 + Float32(b)
        comptime if defect != "no fence" and defect != "fence first":
            fence[Ordering.RELEASE, scope=device_scope()]()
        comptime if defect != "no barrier before":
            barrier()
        if t == 0:
            comptime if defect == "relaxed store" or defect == "fence first":
                A.store[ordering=Ordering.RELAXED](
                    counter.unsafe_offset(b), UInt32(step + 1)
                )
            elif defect == "block scope":
                N.store[ordering=Ordering.RELEASE](
                    counter.unsafe_offset(b), UInt32(step + 1)
                )
            elif defect == "fences":
                fence[Ordering.RELEASE, scope=device_scope()]()
                A.store[ordering=Ordering.RELAXED](
                    counter.unsafe_offset(b), UInt32(step + 1)
                )
            else:
                A.store[ordering=Ordering.RELEASE](
                    counter.unsafe_offset(b), UInt32(step + 1)
                )


def last_block[defect: StaticString](o: F, part: F, count: U, x: G):
    """Every block writes a part; the last to come adds them in order.

    out[t] = sum over blocks of x[block, t]; count is 0 before and after.
    """
    comptime A = Atomic[UInt32, scope=device_scope()]
    var flag = unsafe_stack_allocation[
        1, UInt32, alignment=4, address_space=AddressSpace.SHARED
    ]()
    var b = Int(block_idx.x)
    var t = Int(thread_idx.x)
    part[unsafe_offset=b * T + (T - 1 - t)] = x[unsafe_offset=b * T + T - 1 - t]
    comptime if defect != "no fence":
        fence[Ordering.RELEASE, scope=device_scope()]()
    comptime if defect != "no barrier":
        barrier()
    if t == 0:
        comptime if defect == "relaxed":
            flag[unsafe_offset=0] = A.fetch_add[ordering=Ordering.RELAXED](
                count, 1
            )
        elif defect == "release only":
            flag[unsafe_offset=0] = A.fetch_add[ordering=Ordering.RELEASE](
                count, 1
            )
        elif defect == "acquire only":
            flag[unsafe_offset=0] = A.fetch_add[ordering=Ordering.ACQUIRE](
                count, 1
            )
        else:
            flag[unsafe_offset=0] = A.fetch_add[
                ordering=Ordering.ACQUIRE_RELEASE
            ](count, 1)
    comptime if defect != "no barrier for the flag":
        barrier()
    if flag[unsafe_offset=0] == UInt32(grid_dim.x) - 1:
        var sum: Float32 = 0
        for i in range(Int(grid_dim.x)):
            sum += part[unsafe_offset=i * T + t]
        o[unsafe_offset=t] = sum
        if t == 0:
            A.store[ordering=Ordering.RELAXED](count, 0)


def histogram[defect: StaticString](o: U, x: U):
    """One block: counts of x[t] % 8, by atomics on shared memory."""
    comptime A = Atomic[UInt32, scope=block_scope()]
    var s = unsafe_stack_allocation[
        8, UInt32, alignment=16, address_space=AddressSpace.SHARED
    ]()
    var t = Int(thread_idx.x)
    if t < 8:
        s[unsafe_offset=t] = 0
    comptime if defect != "no barrier":
        barrier()
    var bin = Int(x[unsafe_offset=t]) % 8
    comptime if defect == "plain":
        s[unsafe_offset=bin] = s[unsafe_offset=bin] + 1
    else:
        _ = A.fetch_add[ordering=Ordering.RELAXED](s.unsafe_offset(bin), 1)
    barrier()
    if t < 8:
        o[unsafe_offset=t] = s[unsafe_offset=t]


def between_warps[defect: StaticString](o: F, x: G):
    """One block: warp 1 waits for warp 0 by an atomic in shared memory."""
    comptime A = Atomic[UInt32, scope=block_scope()]
    var s = shared_floats[WARP_SIZE]()
    var ready = unsafe_stack_allocation[
        1, UInt32, alignment=4, address_space=AddressSpace.SHARED
    ]()
    var t = Int(thread_idx.x)
    if t == 0:
        ready[unsafe_offset=0] = 0
    barrier()
    if Int(warp_id()) == 0:
        s[unsafe_offset=t] = x[unsafe_offset=t]
        _ = A.fetch_add[
            ordering=(
                Ordering.RELAXED if defect == "relaxed" else Ordering.RELEASE
            )
        ](ready, 1)
    elif Int(warp_id()) == 1:
        comptime target = WARP_SIZE - 1 if defect == "one early" else WARP_SIZE
        while A.load[ordering=Ordering.ACQUIRE](ready) < UInt32(target):
            pass
        o[unsafe_offset=Int(lane_id())] = s[
            unsafe_offset=WARP_SIZE - 1 - Int(lane_id())
        ]
