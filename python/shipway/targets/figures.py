"""What the compiler made of a kernel, read from its assembly and its linked object."""

from __future__ import annotations

import io
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.targets.arch import Arch

# What starts an instruction of each kind, after a predicate. NVIDIA: PTX ISA, "Warp Level Matrix Instructions" and the
# asynchronous ones of sm_90a and sm_100a; AMD: the instruction set architecture of CDNA3 and of RDNA3.
TF32 = "mma.sync.tf32"
_MATRIX = {
    "mma.sync": r"mma\.sync\b(?!\S*\.tf32)",
    TF32: r"mma\.sync\S*\.tf32\b",
    "wgmma": r"wgmma\.mma_async\b",
    "tcgen05": r"tcgen05\.mma\b",
    "v_mfma": r"v_mfma_",
    "v_smfmac": r"v_smfmac_",
    "v_wmma": r"v_wmma_",
    "v_swmmac": r"v_swmmac_",
}
_START = r"^\s*(?:@!?%\w+\s+)?"
_MATRIX_KINDS = {kind: re.compile(_START + pattern, re.MULTILINE) for kind, pattern in _MATRIX.items()}
_PTX_LOAD = re.compile(_START + r"ld(?:\.\w+|::\w+)*?\.global((?:\.\w+|::\w+)*)\s", re.MULTILINE)
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\.shared(?:::\w+)?\.global\S*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(\d+)")
_AMD_LOAD = re.compile(r"^\s*(?:global|flat|buffer)_load_(?:async_to_)?(?:lds_)?(\w+)", re.MULTILINE)
_AMD_BYTES = {"dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16}
_PTX_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+\S+\[(\d+)\]")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_RESERVED, _RESERVED_BYTES = ".nv.shared.reserved.0", 1 << 10
_AMD_FIELD = re.compile(r"^\s*(?:- )?\.(\w+):\s+(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """What a kernel needs on a target.

    Attributes:
        matrix: How many matrix instructions there are, by kind; kinds without any are left out.
        registers: Registers of a thread; on CDNA vector and accumulation registers together.
        scalars: AMD: scalar registers of a wavefront.
        shared: Bytes of statically allocated shared memory of a block.
        stack: Bytes of local (scratch) memory of a thread.
        spills: NVIDIA: bytes of the stack that are no variable of the kernel's own. AMD: vector registers spilled.
        scalar_spills: AMD: scalar registers spilled, into lanes of vector registers while there are any.
        code_bytes: Bytes of machine code.
        loads: How many loads of global memory there are by their bytes, asynchronous copies included.
    """

    matrix: Mapping[str, int]
    registers: int
    scalars: int
    shared: int
    stack: int
    spills: int
    scalar_spills: int
    code_bytes: int
    loads: Mapping[int, int]


@dataclass(frozen=True)
class Usage:
    """What a kernel of a cubin needs.

    Attributes:
        name: As the compiler calls it.
        registers: Registers of a thread.
        stack: Bytes of local memory of a thread.
        shared: Bytes of statically allocated shared memory of a block.
    """

    name: str
    registers: int
    stack: int
    shared: int


def figures(arch: Arch, asm: Path, linked: Path) -> Figures:
    """Reads the figures of one kernel.

    Args:
        arch: The target.
        asm: Its assembly: PTX, or AMD assembly with metadata.
        linked: Its cubin or code object.

    Raises:
        ShipwayError: One of the files is not what it should be.
        CannotRunError: A package that reads them is not installed.
    """
    text = asm.read_text()
    matrix = _matrix(text)
    code = code_bytes(linked.read_bytes())
    if arch.vendor == "nvidia":
        usages = cubin_usages(linked)
        if len(usages) != 1:
            raise ShipwayError(f"{linked} holds {len(usages)} kernels, not one")
        use = usages[0]
        own = sum(map(int, _PTX_LOCAL.findall(text)))
        spills = max(use.stack - own, 0)
        return Figures(matrix, use.registers, 0, use.shared, use.stack, spills, 0, code, _ptx_loads(text))
    fields = {name: int(value) for name, value in _AMD_FIELD.findall(text.partition(".amdgpu_metadata")[2])}
    try:
        return Figures(
            matrix=matrix,
            registers=fields["vgpr_count"],
            scalars=fields["sgpr_count"],
            shared=fields["group_segment_fixed_size"],
            stack=fields["private_segment_fixed_size"],
            spills=fields["vgpr_spill_count"],
            scalar_spills=fields["sgpr_spill_count"],
            code_bytes=code,
            loads=_amd_loads(text),
        )
    except KeyError as error:
        raise ShipwayError(f"{asm} has no {error} in its metadata") from None


def _matrix(text: str) -> dict[str, int]:
    return {kind: count for kind, pattern in _MATRIX_KINDS.items() if (count := len(pattern.findall(text)))}


def _ptx_loads(text: str) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for modifiers in _PTX_LOAD.findall(text):
        words = modifiers.split(".")
        lanes = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
        bits = next(int(word[1:]) for word in reversed(words) if re.fullmatch(r"[busf]\d+", word))
        counts[lanes * bits // 8] += 1
    counts.update(int(size) for size in _PTX_COPY.findall(text))
    return dict(sorted(counts.items()))


def _amd_loads(text: str) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for word in _AMD_LOAD.findall(text):  # such as tr_b128, ubyte, short_d16_hi
        narrow = 1 if re.search("byte|[iu]8", word) else 2
        counts[_AMD_BYTES.get(word.split("_")[-1], narrow)] += 1
    return dict(sorted(counts.items()))


def cubin_usages(cubin: Path) -> list[Usage]:
    """Returns what each kernel of a cubin needs, as cuobjdump reports it.

    From sm_90 on cuobjdump counts what every block takes besides its own as the kernel's, where that has any shared
    memory; it is taken off.

    Raises:
        ShipwayError: It is no cubin.
        CannotRunError: A package that reads it is not installed.
    """
    done = subprocess.run([_cuobjdump(), "-res-usage", cubin], capture_output=True, text=True)
    if not (found := _USAGE.findall(done.stdout)):
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ShipwayError(f"cuobjdump finds no kernel in {cubin}: it says {said}")
    counted = any(section.name == _RESERVED for section in elf_file(cubin.read_bytes()).iter_sections())
    usages = []
    for name, *numbers in found:
        registers, stack, shared, local = map(int, numbers)
        own = shared - (_RESERVED_BYTES if counted and shared else 0)
        usages.append(Usage(name, registers, stack + local, own))
    return usages


def code_bytes(linked: bytes) -> int:
    """Returns the bytes of machine code of an ELF file, from its first to the end of its last function.

    Raises:
        ShipwayError: It is not an ELF file, or has no functions.
        CannotRunError: pyelftools is not installed.
    """
    table = elf_file(linked).get_section_by_name(".symtab")
    symbols = table.iter_symbols() if table is not None else ()
    spans = [(s["st_value"], s["st_value"] + s["st_size"]) for s in symbols if s["st_info"]["type"] == "STT_FUNC"]
    if not spans:
        raise ShipwayError("the linked kernel has no function")
    return max(end for _, end in spans) - min(start for start, _ in spans)


def elf_file(content: bytes) -> Any:
    """Returns the ELF file that ``content`` starts with.

    Raises:
        ShipwayError: There is none.
        CannotRunError: pyelftools is not installed.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise missing("pyelftools") from None
    try:
        return ELFFile(io.BytesIO(content))
    except ELFError as error:
        raise ShipwayError(f"the linked kernel cannot be read: {error}") from None


def missing(package: str) -> CannotRunError:
    """Says that a package of the extra ``targets`` is not installed."""
    remedy = this_python("-m pip install 'shipway[targets]'")
    return CannotRunError(f"the package {package} is missing: {remedy}")


@cache
def _cuobjdump() -> str:
    """The path of cuobjdump, a program among the files of its package."""
    try:
        found = files("nvidia-cuda-cuobjdump") or []
    except PackageNotFoundError:
        raise missing("nvidia-cuda-cuobjdump") from None
    return next(str(file.locate()) for file in found if file.name == "cuobjdump")
