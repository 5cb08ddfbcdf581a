"""Mojo kernels that tests compile in place of the product's: good ones, and one for each way of going wrong."""

from pathlib import Path

import pytest

from shipway.targets import compiler, emit
from shipway.targets.kernels import DeviceKernel

PART = """def factor[t: DType]() -> Scalar[t]:
    return 3
"""
GOOD = """from max.gpu import thread_idx
from kernels.part import factor


def scale[t: DType, n: Int](p: MutPointer[Scalar[t], MutAnyOrigin]):
    comptime assert n < 4, "n must be below 4"
    p[unsafe_offset=Int(thread_idx.x)] *= factor[t]() * Scalar[t](n)


def flag[on: Bool](p: MutPointer[Int32, MutAnyOrigin]):
    comptime if on:
        p[unsafe_offset=0] = 77
"""
# `product` needs matrix instructions for bfloat16 only; `wide` asks for more shared memory than there is; `hoard` keeps
# more values than there are registers.
HEAVY = """from std.memory import unsafe_stack_allocation
from std.sys.info import is_nvidia_gpu, _is_amd_rdna
from max.gpu import AddressSpace, barrier, thread_idx
from max.gpu.compute.mma import mma


def product[t: DType](o: MutPointer[Float32, MutAnyOrigin], x: ImmPointer[Scalar[t], ImmutAnyOrigin]):
    var i = x.unsafe_offset(Int(thread_idx.x) * 32)
    comptime if t != DType.bfloat16:
        o.unsafe_store(0, i.unsafe_load[width=4, alignment=16](0).cast[DType.float32]())
    elif is_nvidia_gpu():
        var d = SIMD[DType.float32, 4](0)
        mma(d, i.unsafe_load[width=8, alignment=16](0), i.unsafe_load[width=4, alignment=8](8), d)
        o.unsafe_store(0, d)
    elif _is_amd_rdna():
        var d = SIMD[DType.float32, 8](0)
        mma(d, i.unsafe_load[width=16, alignment=16](0), i.unsafe_load[width=16, alignment=16](16), d)
        o.unsafe_store(0, d)
    else:
        var d = SIMD[DType.float32, 4](0)
        mma(d, i.unsafe_load[width=4, alignment=8](0), i.unsafe_load[width=4, alignment=8](4), d)
        o.unsafe_store(0, d)


def wide[n: Int](p: MutPointer[Float32, MutAnyOrigin]):
    var s = unsafe_stack_allocation[n, Float32, address_space=AddressSpace.SHARED]()
    var i = Int(thread_idx.x)
    s[unsafe_offset=i] = p[unsafe_offset=i]
    barrier()
    p[unsafe_offset=i] = s[unsafe_offset=i + 1]


def hoard[n: Int](p: MutPointer[Float32, MutAnyOrigin]):
    var mine = p.unsafe_offset(Int(thread_idx.x) * n)
    var kept = mine.unsafe_load[width=n](0)
    kept *= kept
    barrier()
    mine.unsafe_store(1, kept)
"""


def _kernel(name: str, module: str, parameters: tuple[str, ...], *variants: tuple[str, ...]) -> DeviceKernel:
    return DeviceKernel(name, f"kernels.{module}", parameters, variants, ("linear",), matrix=name == "product")


SCALE = _kernel("scale", "good", ("t", "n"), ("f32", "1"), ("f16", "3"))
BEYOND = _kernel("scale", "good", ("t", "n"), ("f32", "2"), ("f32", "5"))
FLAG = _kernel("flag", "good", ("on: Bool",), ("0",), ("1",))
PRODUCT = _kernel("product", "heavy", ("t",), ("bf16",), ("f32",))
WIDE = _kernel("wide", "heavy", ("n",), ("300",))
TOO_WIDE = _kernel("wide", "heavy", ("n",), ("30000",))
HOARD = _kernel("hoard", "heavy", ("n",), ("4",), ("512",))


def put(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the sources into ``folder``, which takes the place of the product's kernels."""
    folder.mkdir()
    for name, text in (("__init__", '"""Package."""\n'), ("good", GOOD), ("part", PART), ("heavy", HEAVY)):
        (folder / f"{name}.mojo").write_text(text)
    for module in (compiler, emit):
        monkeypatch.setattr(module, "KERNELS", folder)
