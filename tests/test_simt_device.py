"""Launches: arguments in and out, memory that is not the kernel's, crashes, split barriers, what a machine may lack."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shipway.errors import CannotRunError, ShipwayError
from shipway.simt import c_runtime
from shipway.simt.device import Device
from shipway.simt.findings import Finding


def gpu(body: str, parameters: str = "ptr %o", more: str = "", arch: str = "sm_80") -> Device:
    """A device whose every kernel is this one; %t is the thread."""
    nvidia = arch.startswith("sm")
    thread = "llvm.nvvm.read.ptx.sreg.tid.x" if nvidia else "llvm.amdgcn.workitem.id.x"
    text = f"""\
define {"ptx_kernel" if nvidia else "amdgpu_kernel"} void @k({parameters}) {{
  %t = call i32 @{thread}()
  {body}
  ret void
}}
declare i32 @{thread}()
{more}
"""
    return Device(arch, lambda kernel, values, target: text)


SCALE = """%p = getelementptr float, ptr %o, i32 %t
  %x = load float, ptr %p, align 4
  %y = fmul float %x, %s
  %q = getelementptr float, ptr %i, i32 %t
  store float %y, ptr %q, align 4"""


@pytest.mark.parametrize("check", [True, False])
def test_numbers_arrive_as_the_kernel_declares_them(check: bool) -> None:
    body = """%a = sext i32 %n to i64
  %b = add i64 %a, %m
  %c = sitofp i64 %b to double
  %d = fpext float %s to double
  %e = fadd double %c, %d
  %f = fptrunc double %e to float
  store float %f, ptr %o, align 4"""
    out = torch.zeros(1)
    gpu(body, "ptr %o, i32 %n, i64 %m, float %s").launch("k", (), 1, [out, -3, 1 << 40, 0.5], check=check, threads=1)
    assert out.item() == torch.tensor((1 << 40) - 2.5).item()


@pytest.mark.parametrize("check", [True, False])
def test_tensors_are_changed_in_place_and_may_share_memory(check: bool) -> None:
    values = torch.arange(256.0)
    gpu(SCALE, "ptr %o, ptr %i, float %s").launch("k", (), 1, [values, values, 2.0], check=check)
    assert torch.equal(values[:128], 2 * torch.arange(128.0))
    gpu(SCALE, "ptr %o, ptr %i, float %s").launch(
        "k", (), 1, [values[:192], values[64:256], 1.0], check=check, threads=64
    )
    assert torch.equal(values[64:128], values[:64])


def test_tensors_may_begin_where_others_end() -> None:
    values = torch.arange(256.0)
    nothing = values[128:128]
    gpu(SCALE, "ptr %o, ptr %i, ptr %e, float %s").launch("k", (), 1, [values[:128], values[128:], nothing, 2.0])
    assert torch.equal(values[128:], 2 * values[:128])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_what_a_kernel_only_reads_is_not_copied_back() -> None:
    values = torch.arange(128.0)
    locked = torch.frombuffer(mmap.mmap(-1, 512, prot=mmap.PROT_READ), dtype=torch.float32)
    gpu(SCALE, "ptr %o, ptr %i, float %s").launch("k", (), 1, [locked, values, 1.0])
    assert torch.equal(values, torch.zeros(128))


def test_nothing_is_launched_on_no_blocks() -> None:
    gpu("store i32 0, ptr null, align 4").launch("k", (), 0, [torch.zeros(1)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([torch.zeros(128), torch.zeros(128)], "takes 3 arguments, given 2"),
        ([torch.zeros(128), 1, 1.0], "argument 1 is a int, the kernel takes ptr"),
        ([torch.zeros(128), torch.zeros(128), torch.zeros(1)], "argument 2 is a Tensor, the kernel takes float"),
        ([torch.zeros(256)[::2], torch.zeros(128), 1.0], "argument 0 is no contiguous tensor"),
        ([torch.zeros(128, device="meta"), torch.zeros(128), 1.0], "argument 0 is no contiguous tensor"),
    ],
)
def test_arguments_of_other_kinds_are_refused(arguments: list[torch.Tensor | float], said: str) -> None:
    with pytest.raises(ShipwayError, match=said):
        gpu(SCALE, "ptr %o, ptr %i, float %s").launch("k", (), 1, arguments)


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShipwayError, match="argument 1 is 2147483648, the kernel takes i32"):
        gpu("", "ptr %o, i32 %n").launch("k", (), 1, [torch.zeros(1), 1 << 31])


def test_shared_memory_is_nan_until_it_is_written() -> None:
    body = """%p = getelementptr float, ptr addrspace(3) @s, i32 %t
  %x = load float, ptr addrspace(3) %p, align 4
  %q = getelementptr float, ptr %o, i32 %t
  store float %x, ptr %q, align 4"""
    more = "@s = internal addrspace(3) global [128 x float] undef, align 16"
    out = torch.zeros(128)
    gpu(body, more=more).launch("k", (), 1, [out], check=False)
    assert out.isnan().all()


def test_a_neighbour_is_out_of_bounds_however_near_it_lies() -> None:
    storage = torch.zeros(256)
    body = """%p = getelementptr float, ptr %o, i32 128
  store float 1.0, ptr %p, align 4"""
    with pytest.raises(Finding, match="out of bounds: write of 4 bytes at byte 512 of argument 0 of 512 bytes"):
        gpu(body, "ptr %o, ptr %i").launch("k", (), 1, [storage[:128], storage[128:]])
    assert not storage.any()


def test_a_crash_of_an_unchecked_launch_is_a_finding() -> None:
    with pytest.raises(Finding, match=r"crash: access to address 0x18 .*k@sm_80, block 0 thread "):
        gpu("store i32 0, ptr inttoptr (i64 24 to ptr), align 4").launch("k", (), 1, [torch.zeros(1)], check=False)
    out = torch.zeros(1)
    gpu("store float 1.0, ptr %o, align 4").launch("k", (), 1, [out], threads=1)
    assert out == 1


def test_integer_division_by_zero_is_a_finding() -> None:
    body = """%d = sdiv i32 7, %n
  store i32 %d, ptr %o, align 4"""
    with pytest.raises(Finding, match="crash: integer division by zero"):
        gpu(body, "ptr %o, i32 %n").launch("k", (), 1, [torch.zeros(1, dtype=torch.int32), 0])


@pytest.mark.parametrize("check", [True, False])
def test_too_much_private_memory_is_a_finding(check: bool) -> None:
    body = """%a = alloca [100000 x i32], align 4
  %p = getelementptr i32, ptr %a, i32 %n
  store volatile i32 %n, ptr %p, align 4
  %v = load volatile i32, ptr %p, align 4
  store i32 %v, ptr %o, align 4"""
    with pytest.raises(Finding, match="crash: a thread uses more than 126976 bytes of private memory"):
        gpu(body, "ptr %o, i32 %n").launch("k", (), 1, [torch.zeros(1), 0], check=check)


def test_memory_intrinsics_are_checked() -> None:
    more = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\ndeclare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"
    fill = "call void @llvm.memset.p0.i64(ptr %o, i8 0, i64 %n, i1 false)"
    out = torch.ones(4)
    gpu(fill, "ptr %o, i64 %n", more).launch("k", (), 1, [out, 16], threads=1)
    assert not out.any()
    with pytest.raises(Finding, match="write of 17 bytes at byte 0 of argument 0 of 16 bytes"):
        gpu(fill, "ptr %o, i64 %n", more).launch("k", (), 1, [out, 17], threads=1)
    move = "call void @llvm.memcpy.p0.p0.i64(ptr %o, ptr %i, i64 %n, i1 false)"
    with pytest.raises(Finding, match="read of 16 bytes at byte 0 of argument 1 of 12 bytes"):
        gpu(move, "ptr %o, ptr %i, i64 %n", more).launch("k", (), 1, [out, torch.ones(3), 16], threads=1)


def test_constants_of_the_module_may_be_read() -> None:
    body = """%p = getelementptr i32, ptr addrspacecast (ptr addrspace(4) @c to ptr), i32 %t
  %x = load i32, ptr %p, align 4
  %q = getelementptr i32, ptr %o, i32 %t
  store i32 %x, ptr %q, align 4"""
    more = "@c = internal unnamed_addr addrspace(4) constant [4 x i32] [i32 3, i32 1, i32 4, i32 1], align 4"
    out = torch.zeros(4, dtype=torch.int32)
    gpu(body, more=more, arch="gfx1100").launch("k", (), 1, [out], threads=4)
    assert out.tolist() == [3, 1, 4, 1]


SPLIT = """%p = getelementptr i32, ptr addrspace(3) @s, i32 %t
  store i32 %t, ptr addrspace(3) %p, align 4
  call void @llvm.amdgcn.s.barrier.signal(i32 -1)
  {between}
  call void @llvm.amdgcn.s.barrier.wait(i16 -1)
  %u = xor i32 %t, 127
  %q = getelementptr i32, ptr addrspace(3) @s, i32 %u
  %x = load i32, ptr addrspace(3) %q, align 4
  %r = getelementptr i32, ptr %o, i32 %t
  store i32 %x, ptr %r, align 4"""
SPLIT_MORE = """@s = internal addrspace(3) global [128 x i32] undef, align 16
declare void @llvm.amdgcn.s.barrier.signal(i32)
declare void @llvm.amdgcn.s.barrier.wait(i16)
"""


@pytest.mark.parametrize("seed", range(4))
def test_split_barrier_orders_what_came_before_its_signal(seed: int) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    gpu(SPLIT.format(between=""), more=SPLIT_MORE, arch="gfx1201").launch("k", (), 1, [out], seed=seed)
    assert torch.equal(out, 127 - torch.arange(128, dtype=torch.int32))


def test_split_barrier_does_not_order_what_came_after_its_signal() -> None:
    between = "store i32 %t, ptr addrspace(3) %p, align 4"
    with pytest.raises(Finding, match="race"):
        gpu(SPLIT.format(between=between), more=SPLIT_MORE, arch="gfx1201").launch(
            "k", (), 1, [torch.zeros(128, dtype=torch.int32)]
        )


def test_wait_without_signal_is_a_finding() -> None:
    body = SPLIT.replace("call void @llvm.amdgcn.s.barrier.signal(i32 -1)", "").format(between="")
    with pytest.raises(Finding, match="divergence: wait for a barrier"):
        gpu(body, more=SPLIT_MORE, arch="gfx1201").launch("k", (), 1, [torch.zeros(128, dtype=torch.int32)])


def test_rdna3_operands_must_be_held_twice() -> None:
    name = "llvm.amdgcn.wmma.f32.16x16x16.bf16.v8f32.v16i16"
    body = f"""%h = trunc i32 %t to i16
  %a = insertelement <16 x i16> zeroinitializer, i16 %h, i32 0
  %d = call <8 x float> @{name}(<16 x i16> %a, <16 x i16> zeroinitializer, <8 x float> zeroinitializer)
  store <8 x float> %d, ptr %o, align 4"""
    more = f"declare <8 x float> @{name}(<16 x i16>, <16 x i16>, <8 x float>)"
    with pytest.raises(Finding, match=r"divergence: .*lane 16 does not hold the A and B of lane 0"):
        gpu(body, more=more, arch="gfx1100").launch("k", (), 1, [torch.zeros(8)], threads=32)


def test_dynamic_shared_memory_needs_a_kernel_that_has_it() -> None:
    with pytest.raises(ShipwayError, match="k uses no dynamic shared memory"):
        gpu("").launch("k", (), 1, [torch.zeros(1)], dynamic=64)


@pytest.mark.parametrize(("grid", "threads"), [(-1, 32), ((1, -2, 1), 32), (1, 2048)])
def test_impossible_launches_are_refused(grid: int, threads: int) -> None:
    with pytest.raises(ShipwayError, match="cannot launch"):
        gpu("").launch("k", (), grid, [torch.zeros(1)], threads=threads)


def test_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CannotRunError, match="needs a C compiler and there is no cc: install gcc or clang, or set CC"):
        c_runtime._compile(tmp_path)


def test_compiler_that_fails_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(c_runtime, "SOURCES", tmp_path)
    (tmp_path / "bad.c").write_text("int f( {\n")
    with pytest.raises(CannotRunError, match=r"cannot compile the simulator's runtime: .*error") as refused:
        c_runtime._compile(tmp_path)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(CannotRunError, match=r"C compiler .*none cannot run"):
        c_runtime._compile(tmp_path)


@pytest.mark.parametrize("more", [(), ("-DSIMT_UCONTEXT",)])
def test_runtime_compiles_without_warnings(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_runtime, "FLAGS", (*c_runtime.FLAGS, "-Wextra", "-Werror", *more))
    c_runtime._compile(tmp_path)


def test_fibers_of_machines_without_assembly_run_too(tmp_path: Path) -> None:
    """In a process of its own: one process loads the runtime once."""
    code = """
import torch
from shipway.simt import c_runtime
c_runtime.FLAGS = (*c_runtime.FLAGS, "-DSIMT_UCONTEXT")
from test_simt_device import SPLIT, SPLIT_MORE, gpu
out = torch.zeros(128, dtype=torch.int32)
for seed in range(3):
    gpu(SPLIT.format(between=""), more=SPLIT_MORE, arch="gfx1201").launch("k", (), 1, [out], seed=seed)
    assert torch.equal(out, 127 - torch.arange(128, dtype=torch.int32))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def declared(structure: type[ctypes.Structure]) -> list[str]:
    """Names of the members of a structure of simt.h, pointers to functions left out."""
    header = re.sub(r"//.*", "", (c_runtime.SOURCES / "simt.h").read_text())
    body = re.search(r"typedef struct (?:\w+ )?\{([^}]*)\} " + structure.__name__ + ";", header)
    assert body
    members = [part for line in body[1].split(";") if "(" not in line for part in line.split(",") if part.strip()]
    return [re.sub(r"\[.*|\*", "", member).split()[-1] for member in members]


@pytest.mark.parametrize("structure", [c_runtime.Buffer, c_runtime.Op, c_runtime.Report, c_runtime.Launch])
def test_runtime_declares_the_structures_as_python_has_them(structure: type[ctypes.Structure]) -> None:
    fields = [name for name, *_ in structure._fields_ if name not in ("run", "entry")]
    assert declared(structure) == fields


def test_runtime_has_as_much_shared_memory_as_python_maps() -> None:
    assert f"SHARED_ROOM ({c_runtime.SHARED_ROOM >> 10} << 10)" in (c_runtime.SOURCES / "simt.h").read_text()
