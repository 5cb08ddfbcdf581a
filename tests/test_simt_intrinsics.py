"""Each family of intrinsics against its plain definition, on every simulated target: mojo/tests/gpu/intrinsics.mojo."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shipway.ops import tf32
from shipway.simt import c_runtime
from shipway.simt.device import Device
from shipway.simt.findings import Finding
from shipway.simt.intrinsics import SCOPES, table
from simt_emission import ARCHS, devices

EVERYWHERE = (
    "ids",
    *(f"shuffles[DType.{t}]" for t in ("float32", "int32", "bfloat16", "int64")),
    *(f"reductions[DType.{t}]" for t in ("float32", "int32")),
    "votes",
    "functions",
    "product[DType.bfloat16]",
    "product[DType.float16]",
    "dynamic",
    "atomics",
)
NVIDIA = ("product[DType.float32]", "tf32", "matrix_loads", "copies")
AMD = ("buffers",)
WANTED = {arch: EVERYWHERE + (NVIDIA if arch.startswith("sm") else AMD) for arch in ARCHS}
on_nvidia = pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.startswith("sm")])
on_amd = pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.startswith("gfx")])
everywhere = pytest.mark.parametrize("arch", ARCHS)


def device(arch: str) -> Device:
    return devices("intrinsics", json.dumps(WANTED))[arch]


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


@everywhere
def test_threads_know_who_they_are(arch: str) -> None:
    gpu = device(arch)
    threads, grid = gpu.threads, (3, 2, 2)
    out = torch.full((12, threads, 12), -1, dtype=torch.int32)
    gpu.launch("ids", (), grid, [out])
    for block in range(12):
        for thread in (0, 1, gpu.warp_size, threads - 1):
            where = (block % 3, block // 3 % 2, block // 6)
            lane, warp = thread % gpu.warp_size, thread // gpu.warp_size
            assert out[block, thread].tolist() == [thread, 0, 0, *where, threads, *grid, lane, warp]


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "int64"])
def test_shuffles_move_values_between_the_lanes_of_a_warp(arch: str, dtype: str) -> None:
    gpu = device(arch)
    n, width = gpu.threads, gpu.warp_size
    values = (torch.randperm(n) - n // 2).to(getattr(torch, dtype))
    out = torch.cat([values, torch.zeros(6 * n, dtype=values.dtype)])
    gpu.launch(f"shuffles[DType.{dtype}]", (), 1, [out, n])
    lane, first = torch.arange(n) % width, torch.arange(n) // width * width
    xor, down, up, seventh, neighbour, zeroth = out[n:].view(6, n)
    assert torch.equal(xor, values[first + (lane ^ 5)])
    inside = lane + 3 < width
    assert torch.equal(down[inside], values[(first + lane + 3)[inside]])
    inside = lane >= 2
    assert torch.equal(up[inside], values[(first + lane - 2)[inside]])
    assert torch.equal(seventh, values[first + 7])
    assert torch.equal(neighbour, values[first + (lane ^ 1)])
    assert torch.equal(zeroth, values[first])


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_reductions_of_a_warp_and_of_groups_of_its_lanes(arch: str, dtype: str) -> None:
    gpu = device(arch)
    n, width = gpu.threads, gpu.warp_size
    values = torch.randint(-99, 99, (n,)).to(getattr(torch, dtype))  # sums of float32 are exact
    out = torch.cat([values, torch.zeros(10 * n, dtype=values.dtype)])
    gpu.launch(f"reductions[DType.{dtype}]", (), 1, [out, n])
    warps = values.view(-1, width)
    rows = out[n:].view(10, -1, width)
    for row, wanted in zip(rows, (warps.sum(1), warps.amax(1), warps.amin(1)), strict=False):
        assert torch.equal(row, wanted[:, None].expand(-1, width).to(values.dtype))
    assert torch.equal(rows[3], warps.cumsum(1).to(values.dtype))
    for row, lanes in zip(rows[4:9], (2, 4, 8, 16, 32), strict=True):
        groups = values.view(-1, lanes).sum(1, keepdim=True).expand(-1, lanes).reshape(-1, width)
        assert torch.equal(row, groups.to(values.dtype))
    assert torch.equal(rows[9], values.view(-1, 8).amax(1, keepdim=True).expand(-1, 8).reshape(-1, width))


@everywhere
def test_vote_has_the_bit_of_each_lane(arch: str) -> None:
    gpu = device(arch)
    values = torch.randint(-1, 2, (gpu.threads,), dtype=torch.int32)
    out = torch.zeros(gpu.threads, dtype=torch.int64)
    gpu.launch("votes", (), 1, [out, values])
    for thread in range(gpu.threads):
        first = thread // gpu.warp_size * gpu.warp_size
        yes = sum(1 << lane for lane in range(gpu.warp_size) if values[first + lane] > 0)
        assert int(out[thread]) % (1 << 64) == yes


@everywhere
def test_functions_are_as_near_as_the_instructions_they_are_made_of(arch: str) -> None:
    gpu = device(arch)
    n = gpu.threads
    values = torch.linspace(0.03, 8, n)
    out = nan(13, n)
    gpu.launch("functions", (), 1, [out, values, n])
    x = values.double()
    wanted = (x.exp2(), x.exp(), x.log(), x.log2(), x.sqrt(), x.rsqrt(), x.tanh(), 1 / x, x.erf(), x.sin(), x.cos())
    for row, reference in zip(out, wanted, strict=False):
        torch.testing.assert_close(row.double(), reference, rtol=2e-6, atol=1e-6)
    assert torch.equal(out[11], values.bfloat16().float())
    assert torch.equal(out[12], values.half().float())


@everywhere
def test_conversions_round_to_even_and_keep_what_is_not_finite(arch: str) -> None:
    gpu = device(arch)
    n = gpu.threads
    bits = torch.randint(0, 1 << 31, (n,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values[:6] = torch.tensor([math.inf, -math.inf, math.nan, 1e-40, -0.0, 3.4e38])
    values[6:10] = torch.tensor([0x3F808000, 0x3F818000, 0x00008000, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    out = nan(13, n)
    gpu.launch("functions", (), 1, [out, values, n])
    assert torch.equal(out[11].nan_to_num(7), values.bfloat16().float().nan_to_num(7))
    assert torch.equal(out[12].nan_to_num(7), values.half().float().nan_to_num(7))


# Which element of A, B and C a lane holds in its i-th place: (row, k), (k, column), (row, column).
def nvidia_16(lane: int) -> tuple[list[tuple[int, int]], ...]:
    group, pair = lane >> 2, lane & 3
    a = [(group + 8 * ((i >> 1) & 1), 2 * pair + (i & 1) + 8 * (i >= 4)) for i in range(8)]
    b = [(2 * pair + (i & 1) + 8 * (i >= 2), group) for i in range(4)]
    return a, b, [(group + 8 * (i >= 2), 2 * pair + (i & 1)) for i in range(4)]


def nvidia_tf32(lane: int) -> tuple[list[tuple[int, int]], ...]:
    group, pair = lane >> 2, lane & 3
    a = [(group, pair), (group + 8, pair), (group, pair + 4), (group + 8, pair + 4)]
    return a, [(pair, group), (pair + 4, group)], nvidia_16(lane)[2]


def cdna(lane: int) -> tuple[list[tuple[int, int]], ...]:
    row, quarter = lane & 15, lane >> 4
    four = [4 * quarter + i for i in range(4)]
    return [(row, k) for k in four], [(k, row) for k in four], [(i, row) for i in four]


def rdna(lane: int, arch: str) -> tuple[list[tuple[int, int]], ...]:
    row, half = lane & 15, lane >> 4
    c = [(2 * i + half if arch == "gfx1100" else 8 * half + i, row) for i in range(8)]
    return [(row, k) for k in range(16)], [(k, row) for k in range(16)], c


def check_product(arch: str, dtype: str, columns: int, depth: int, held: object) -> None:
    gpu = device(arch)
    kind = getattr(torch, dtype)
    a, b, c = torch.randn(16, depth).to(kind), torch.randn(depth, columns).to(kind), torch.randn(16, columns)
    if kind == torch.float32:  # tf32
        a, b = (torch.from_numpy(tf32.operand(m.numpy())) for m in (a, b))
    maps = [held(lane) for lane in range(gpu.warp_size)]  # type: ignore[operator]
    registers = [
        torch.stack([matrix[row, column] for entry in maps for row, column in entry[which]])
        for which, matrix in enumerate((a, b, c))
    ]
    out = nan(len(registers[2]))
    gpu.launch(f"product[DType.{dtype}]", (), 1, [out, *registers], threads=gpu.warp_size)
    wanted = a.double() @ b.double() + c.double()
    for value, (row, column) in zip(out, [place for entry in maps for place in entry[2]], strict=True):
        assert abs(value - wanted[row, column]) < 1e-5


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrix_instruction_multiplies_what_the_document_says_each_lane_holds(arch: str, dtype: str) -> None:
    if arch.startswith("sm"):
        check_product(arch, dtype, 8, 16, nvidia_16)
    elif arch == "gfx942":
        check_product(arch, dtype, 16, 16, cdna)
    else:
        check_product(arch, dtype, 16, 16, lambda lane: rdna(lane, arch))


@on_nvidia
def test_tf32_matrix_instruction(arch: str) -> None:
    check_product(arch, "float32", 8, 8, nvidia_tf32)


@on_nvidia
@pytest.mark.parametrize("which", [0, 1])
def test_operand_that_is_not_rounded_to_tf32_is_undefined(arch: str, which: int) -> None:
    operands = [torch.ones(128), torch.ones(64), torch.ones(128)]
    device(arch).launch("product[DType.float32]", (), 1, [nan(128), *operands], threads=32)
    operands[which][-1] += 2**-11
    with pytest.raises(Finding, match=r"undefined: .*mma.* lane 31 gives 1\.00048828, which is not rounded to tf32"):
        device(arch).launch("product[DType.float32]", (), 1, [nan(128), *operands], threads=32)


@on_nvidia
def test_rounding_to_tf32_is_to_nearest_with_ties_away_from_zero(arch: str) -> None:
    ulp = 2.0**-10
    cases = [
        (1 + ulp / 2, 1 + ulp),  # to even it would be 1
        (-1 - ulp / 2, -1 - ulp),
        (1 + 3 * ulp / 2, 1 + 2 * ulp),
        (1 + 0.49 * ulp, 1),
        (1 + 0.51 * ulp, 1 + ulp),
        (2 - ulp / 4, 2),  # into the next binade
        ((2 - ulp / 4) * 2.0**127, math.inf),
        ((2 - ulp) * 2.0**127, (2 - ulp) * 2.0**127),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (0.0, 0.0),
        (3 * 2.0**-138, 2 * 2.0**-137),  # subnormal
    ]
    values, expected = torch.tensor(cases).T
    out = torch.zeros(len(cases) + 1, dtype=torch.int32)
    x = torch.cat([values, torch.tensor([math.nan])])
    device(arch).launch("tf32", (), 1, [out.view(torch.uint32), x], threads=len(x))
    assert torch.equal(out[:-1].view(torch.float32), expected)
    assert out[-1].view(torch.float32).isnan()
    assert not (out & 0x1FFF).any()
    finite = values.isfinite()
    assert np.array_equal(tf32.operand(values[finite].numpy()), expected[finite].numpy())


@on_nvidia
def test_matrix_loads_spread_rows_or_columns_over_the_lanes(arch: str) -> None:
    rows = torch.randn(32, 8).bfloat16()
    out = torch.zeros(896).bfloat16()
    device(arch).launch("matrix_loads", (), 1, [out, rows.view(-1)], threads=32)
    start = 0
    for transposed in (False, True):
        for matrices in (4, 2, 1):
            got = out[start : start + 64 * matrices].view(32, matrices, 2)
            start += 64 * matrices
            for lane in range(32):
                for m in range(matrices):
                    for i in range(2):
                        matrix = rows[8 * m : 8 * m + 8]
                        row, column = lane // 4, 2 * (lane % 4) + i
                        assert got[lane, m, i] == (matrix[column, row] if transposed else matrix[row, column])


@on_nvidia
@pytest.mark.parametrize("kept", [0, 4])
def test_asynchronous_copies_land_whole_or_filled_with_zeros(arch: str, kept: int) -> None:
    values = torch.randn(512)
    out = nan(128 + 1792)
    device(arch).launch("copies", (), 1, [out, values, kept], threads=128)
    assert torch.equal(out[:128], values[384:].flip(0))
    whole, cut = out[128:1024], out[1024:]
    for part, size in ((slice(0, 128), 1), (slice(128, 384), 2), (slice(384, 896), 4)):
        source = values[: 128 * size].view(128, size)
        assert torch.equal(whole[part].view(128, size), source)
        assert torch.equal(cut[part].view(128, size), source * (torch.arange(size) < kept // 4))


@everywhere
def test_dynamic_shared_memory_is_as_large_as_the_launch_says(arch: str) -> None:
    out = nan(100)
    device(arch).launch("dynamic", (), 1, [out, 100], dynamic=400)
    assert torch.equal(out, torch.arange(99.0, -1, -1))


@everywhere
@pytest.mark.parametrize("seed", [0, 3])
def test_atomics_of_a_grid_lose_nothing(arch: str, seed: int) -> None:
    gpu = device(arch)
    n = 3 * gpu.threads
    out, half = torch.zeros(8, dtype=torch.int32), torch.zeros(1)
    out[3] = 1 << 20
    gpu.launch("atomics", (), 3, [out, half], seed=seed)
    added, summed, largest, least, first, winners, stored, twice = out.tolist()
    assert (added, summed, largest, least) == (n, n * (n - 1) // 2, n - 1, 7)
    assert 1 <= first <= n
    assert (winners, stored, twice) == (1, 9, 2 * n)
    assert float(half) == n / 2


@on_amd
def test_buffer_accesses_beyond_the_resource_read_zero_and_write_nothing(arch: str) -> None:
    gpu = device(arch)
    threads = gpu.threads
    n = 4 * threads - 4
    values = torch.randn(n)
    out = nan(n + 2 * threads)
    gpu.launch("buffers", (), 1, [out, values, n])
    assert torch.equal(out[:n], 2 * values)
    wanted = torch.zeros(threads)
    wanted[: len(values[::8])] = values[::8]
    assert torch.equal(out[n : n + threads], wanted)
    first = torch.arange(threads) // gpu.warp_size * gpu.warp_size
    assert torch.equal(out[n + threads :], first.float())


def lanewise(target: str, expression: str) -> str:
    """IR of a kernel that turns each thread's number of [2, threads] into one by ``expression`` of %x, %y and %t."""
    nvidia = target.startswith("sm")
    thread = "llvm.nvvm.read.ptx.sreg.tid.x" if nvidia else "llvm.amdgcn.workitem.id.x"
    called = re.search(r"call (.*?) (@[\w.]+)\((.*)\)", expression)
    assert called
    kinds = ", ".join(part.split()[0] for part in called[3].split(", ") if part)
    return f"""\
define {"ptx_kernel" if nvidia else "amdgpu_kernel"} void @k(ptr %o, ptr %i, i32 %n) {{
  %t = call i32 @{thread}()
  %p = getelementptr i32, ptr %i, i32 %t
  %x = load i32, ptr %p, align 4
  %j = add i32 %t, %n
  %q = getelementptr i32, ptr %i, i32 %j
  %y = load i32, ptr %q, align 4
  %b = trunc i32 %y to i1
  {expression}
  %w = getelementptr i32, ptr %o, i32 %t
  store i32 %r, ptr %w, align 4
  ret void
}}
declare i32 @{thread}()
declare {called[1]} {called[2]}({kinds})
"""


def lane_results(arch: str, expression: str) -> tuple[list[int], list[int], list[int], int]:
    """Runs ``lanewise`` on one warp: the numbers x and y of its lanes, and what came out."""
    gpu = Device(arch, lambda kernel, parameters, target: lanewise(arch, expression))
    n = gpu.warp_size
    given = torch.randint(0, 64, (2, n), dtype=torch.int32)
    out = torch.full((n,), -1, dtype=torch.int32)
    gpu.launch("k", (), 1, [out, given, n], threads=n)
    return given[0].tolist(), given[1].tolist(), out.tolist(), n


FULL = "i32 -1"
NVVM = "@llvm.nvvm"


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        (f"%r = call i32 {NVVM}.redux.sync.add(i32 %x, {FULL})", lambda x, y: [sum(x)] * 32),
        (f"%r = call i32 {NVVM}.redux.sync.max(i32 %x, {FULL})", lambda x, y: [max(x)] * 32),
        (f"%r = call i32 {NVVM}.redux.sync.umin(i32 %x, {FULL})", lambda x, y: [min(x)] * 32),
        (
            f"%r = call i32 {NVVM}.match.any.sync.i32({FULL}, i32 %x)",
            lambda x, y: [sum((v == w) << lane for lane, w in enumerate(x)) for v in x],
        ),
        (
            f"%v = call i1 {NVVM}.vote.any.sync({FULL}, i1 %b)\n  %r = zext i1 %v to i32",
            lambda x, y: [int(any(v & 1 for v in y))] * 32,
        ),
        (
            f"%v = call i1 {NVVM}.vote.all.sync({FULL}, i1 true)\n  %r = zext i1 %v to i32",
            lambda x, y: [1] * 32,
        ),
        (
            f"%v = call i1 {NVVM}.vote.uni.sync({FULL}, i1 %b)\n  %r = zext i1 %v to i32",
            lambda x, y: [int(len({v & 1 for v in y}) == 1)] * 32,
        ),
        (f"%r = call i32 {NVVM}.activemask()", lambda x, y: [0xFFFFFFFF] * 32),
    ],
)
def test_warp_operations_of_nvidia_that_mojo_does_not_reach(expression: str, wanted: object) -> None:
    x, y, out, _ = lane_results("sm_80", expression)
    assert [value & 0xFFFFFFFF for value in out] == [value & 0xFFFFFFFF for value in wanted(x, y)]  # type: ignore[operator]


def rows_of_16(moved: object) -> object:
    """Lanes within their row of 16: ``moved`` gives the place in it that is read, ``None`` for none."""

    def values(x: list[int], y: list[int]) -> list[int]:
        sources = [moved(lane % 16) for lane in range(len(x))]  # type: ignore[operator]
        return [y[i] if s is None else x[i // 16 * 16 + s] for i, s in enumerate(sources)]

    return values


def dpp(control: int, rows: int = 15, banks: int = 15, bound: str = "false") -> str:
    numbers = f"i32 {control}, i32 {rows}, i32 {banks}, i1 {bound}"
    return f"%r = call i32 @llvm.amdgcn.update.dpp.i32(i32 %y, i32 %x, {numbers})"


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        (dpp(0x1B), lambda x, y: [x[i // 4 * 4 + 3 - i % 4] for i in range(len(x))]),
        (dpp(0x101), rows_of_16(lambda i: i + 1 if i < 15 else None)),
        (dpp(0x112), rows_of_16(lambda i: i - 2 if i >= 2 else None)),
        (dpp(0x112, bound="true"), lambda x, y: [x[i - 2] if i % 16 >= 2 else 0 for i in range(len(x))]),
        (dpp(0x124), rows_of_16(lambda i: (i - 4) % 16)),
        (dpp(0x140), rows_of_16(lambda i: 15 - i)),
        (dpp(0x141), rows_of_16(lambda i: i // 8 * 8 + 7 - i % 8)),
        (dpp(0x140, rows=1), lambda x, y: [x[15 - i] if i < 16 else y[i] for i in range(len(x))]),
        (dpp(0x140, banks=2), rows_of_16(lambda i: 15 - i if i // 4 == 1 else None)),
        (dpp(0x142), lambda x, y: [x[i // 16 * 16 - 1] if i >= 16 else y[i] for i in range(len(x))]),
        (dpp(0x155), rows_of_16(lambda i: 5)),
        (dpp(0x163), rows_of_16(lambda i: i ^ 3)),
        (
            "%a = shl i32 %y, 2\n  %r = call i32 @llvm.amdgcn.ds.bpermute(i32 %a, i32 %x)",
            lambda x, y: [x[v % len(x)] for v in y],
        ),
        (
            "%u = xor i32 %t, 5\n  %a = shl i32 %u, 2\n  %r = call i32 @llvm.amdgcn.ds.permute(i32 %a, i32 %x)",
            lambda x, y: [x[i ^ 5] for i in range(len(x))],
        ),
        (
            "%r = call i32 @llvm.amdgcn.ds.swizzle(i32 %x, i32 16415)",
            lambda x, y: [x[i // 32 * 32 + (i % 32 ^ 16)] for i in range(len(x))],
        ),
        (
            "%r = call i32 @llvm.amdgcn.ds.swizzle(i32 %x, i32 32795)",
            lambda x, y: [x[i // 4 * 4 + 3 - i % 4] for i in range(len(x))],
        ),
        ("%r = call i32 @llvm.amdgcn.readlane.i32(i32 %x, i32 9)", lambda x, y: [x[9]] * len(x)),
        ("%r = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %x)", lambda x, y: [x[0]] * len(x)),
        (
            "%r = call i32 @llvm.amdgcn.permlanex16(i32 %y, i32 %x, i32 1985229328, i32 -19088744, i1 0, i1 0)",
            lambda x, y: [x[i ^ 16] for i in range(len(x))],
        ),
    ],
)
def test_lane_permutations_of_amd(arch: str, expression: str, wanted: object) -> None:
    x, y, out, _ = lane_results(arch, expression)
    assert out == wanted(x, y)  # type: ignore[operator]


def test_every_row_of_the_table_is_a_function_of_the_runtime_and_has_a_document() -> None:
    runtime = c_runtime.runtime()
    for name, row in table().items():
        assert getattr(runtime, row.run), name
        assert row.scope in SCOPES
        assert len(row.document) > 8


def test_runtime_does_nothing_that_the_table_does_not_name() -> None:
    sources = "".join(path.read_text() for path in Path(c_runtime.SOURCES).glob("*_ops.c"))
    functions = set(re.findall(r"^void (\w+)\(Lane \*\*lanes, int count\)", sources, re.MULTILINE))
    assert functions - {row.run for row in table().values()} == set()
