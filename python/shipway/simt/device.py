"""A simulated GPU: launches kernels on tensors in this process's memory."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shipway.errors import ShipwayError
from shipway.simt.c_runtime import SHARED_ROOM, Buffer, Launch, runtime, shared_memory
from shipway.simt.findings import KINDS, UNKNOWN, Finding
from shipway.simt.intrinsics import SCOPES
from shipway.simt.kernel import Kernel, compile_kernel
from shipway.targets.compiler import LLVM
from shipway.targets.emit import emit
from shipway.targets.kernels import find

if TYPE_CHECKING:
    import torch

WARP_SIZES = {"sm_80": 32, "sm_90a": 32, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}
"""The simulated targets and their lanes per warp."""
WARPS = 4
_MOST_RESIDENT = 128
_MOST_COPIED = 64 << 20  # bytes
_GAP = 1 << 24  # between two arguments: what misses one hits none of the others
_PAGE = mmap.PAGESIZE
_NORESERVE = 0x4000  # Linux: the gaps cost no memory
_CODES = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "float": "f", "double": "d"}

Source = Callable[[str, tuple[str, ...], str], str]
"""Gives the IR of a kernel: its name, the values of its parameters, the target."""


def of_catalogue(kernel: str, parameters: tuple[str, ...], arch: str) -> str:
    """Returns the IR of a kernel of ``shipway.targets.kernels``.

    Raises:
        ShipwayError: There is no such kernel, it is not written for the target, or it does not compile.
        CannotRunError: The Mojo compiler is not installed.
    """
    variant = find(kernel, parameters)
    if not variant.runs_on(arch):
        raise ShipwayError(f"{variant} is not written for {arch}")
    emitted = emit([variant], arch, LLVM)[variant]
    if emitted.error:
        raise ShipwayError(f"{variant} does not compile for {arch}: {emitted.error}")
    return emitted.files[LLVM].read_text()


@dataclass
class Counts:
    """What a launch did: calls of the runtime, switches between lanes, checked accesses, atomic operations."""

    calls: int
    switches: int
    accesses: int
    atomics: int


class Device:
    """A simulated GPU.

    Args:
        arch: One of :data:`WARP_SIZES`.
        source: Gives the IR of a kernel; by default that of the catalogue.

    Attributes:
        counts: What the latest launch did.

    Raises:
        ShipwayError: No such target is simulated.
    """

    def __init__(self, arch: str, source: Source = of_catalogue) -> None:
        if arch not in WARP_SIZES:
            raise ShipwayError(f"{arch} is not simulated: {', '.join(WARP_SIZES)} are")
        self.arch = arch
        self.warp_size = WARP_SIZES[arch]
        self.counts = Counts(0, 0, 0, 0)
        self._source = source
        self._kernels: dict[tuple[str, tuple[str, ...], bool], Kernel] = {}

    @property
    def threads(self) -> int:
        """Threads of a block where a launch does not say otherwise."""
        return WARPS * self.warp_size

    def launch(
        self,
        kernel: str,
        parameters: tuple[str, ...],
        grid: int | tuple[int, int, int],
        arguments: Sequence[torch.Tensor | int | float],
        *,
        seed: int = 1,
        check: bool = True,
        threads: int | None = None,
        resident: int | None = None,
        dynamic: int = 0,
    ) -> None:
        """Runs a kernel to its end.

        Args:
            kernel: Its name.
            parameters: Values of its compile-time parameters.
            grid: Blocks.
            arguments: Contiguous tensors on the CPU for pointers, numbers for the rest, as the kernel declares them.
            seed: Of the order in which threads and blocks run; 0 is ascending.
            check: Whether accesses are checked. Without, a kernel that leaves its buffers may damage this process.
            threads: Threads of a block, by default :attr:`threads`.
            resident: Blocks that run at the same time, as many as fit on a GPU: by default all of them (at most 128)
                where the kernel has atomics or fences that reach other blocks, else one after the other.
            dynamic: Bytes of dynamic shared memory.

        Raises:
            Finding: The launch showed a defect of the kernel.
            ShipwayError: The kernel uses what is not simulated, or the arguments are not of the kinds it takes.
            CannotRunError: llvmlite or a C compiler is missing.
        """
        key = (kernel, parameters, check)
        if key not in self._kernels:
            self._kernels[key] = compile_kernel(self._source(kernel, parameters, self.arch), check)
        code = self._kernels[key]
        shape = (grid, 1, 1) if isinstance(grid, int) else grid
        threads = threads or self.threads
        if min(shape) < 0 or not 1 <= threads <= 1024:
            raise ShipwayError(f"{kernel}: cannot launch {shape} blocks of {threads} threads")
        if 0 in shape:
            return
        blocks = shape[0] * shape[1] * shape[2]
        if resident is None:
            resident = min(blocks, _MOST_RESIDENT) if code.synchronises else 1
        memory = _Memory(kernel, code, arguments, check)
        launch = Launch(
            entry=code.entry,
            arguments=ctypes.cast(memory.packed, ctypes.c_void_p),
            grid=shape,
            threads=(threads, 1, 1),
            warp_size=self.warp_size,
            resident=resident,
            check=check,
            amd=self.arch.startswith("gfx"),
            granule=code.granule.bit_length() - 1,
            shared_granule=code.shared_granule.bit_length() - 1,
            buffers=len(memory.buffers),
            ops=len(code.ops),
            warpgroups=any(op.scope == SCOPES.index("group") for op in code.ops),
            seed=seed,
            shared=shared_memory(),
            shared_size=_shared_size(kernel, code, dynamic),
            buffer=memory.buffers,
            op=code.ops,
            constants=len(code.constants),
        )
        code_of_end = runtime().simt_launch(ctypes.byref(launch))
        self.counts = Counts(*launch.counts)
        if code_of_end:
            raise self._finding(kernel, parameters, code, launch)
        memory.copy_back()

    def _finding(self, kernel: str, parameters: tuple[str, ...], code: Kernel, launch: Launch) -> Finding:
        report = launch.report
        line = code.sites[report.site - 1] if report.site else UNKNOWN
        what = report.text.decode(errors="replace")
        if report.other:
            what += f" at {code.sites[report.other - 1]}"
        name = f"{kernel}[{','.join(parameters)}]@{self.arch}" if parameters else f"{kernel}@{self.arch}"
        return Finding(KINDS[report.kind], what, line, name, report.block, report.thread)


def _shared_size(kernel: str, code: Kernel, dynamic: int) -> int:
    if dynamic and not code.dynamic:
        raise ShipwayError(f"{kernel} uses no dynamic shared memory, and the launch gives it {dynamic} bytes")
    if code.shared_size + dynamic > SHARED_ROOM:
        raise ShipwayError(f"{kernel} wants {code.shared_size + dynamic} bytes of shared memory")
    return code.shared_size + dynamic


class _Memory:
    """The arguments of a launch in memory.

    Checked launches work on copies that lie far apart, so that what leaves a tensor meets nobody's memory; tensors
    that overlap stay together. Large tensors stay where they are, as all do in unchecked launches.
    """

    def __init__(self, kernel: str, code: Kernel, arguments: Sequence[torch.Tensor | int | float], check: bool) -> None:
        if len(arguments) != len(code.parameters):
            raise ShipwayError(f"{kernel} takes {len(code.parameters)} arguments, given {len(arguments)}")
        ranges: list[tuple[int, int, int]] = []
        for index, (kind, argument) in enumerate(zip(code.parameters, arguments, strict=True)):
            number = isinstance(argument, (int, float))
            if number == (kind == "ptr") or (kind != "ptr" and kind not in _CODES):
                raise ShipwayError(
                    f"{kernel}: argument {index} is a {type(argument).__name__}, the kernel takes {kind}"
                )
            if isinstance(argument, (int, float)):
                continue
            if not argument.is_contiguous() or argument.device.type != "cpu":
                raise ShipwayError(f"{kernel}: argument {index} is no contiguous tensor on the CPU")
            start = argument.data_ptr()
            ranges.append((start, start + argument.numel() * argument.element_size(), index))
        self._places: list[tuple[int, int, int, int]] = []  # address, bytes, address of the copy, first argument
        self._room: mmap.mmap | None = None
        if check:
            self._copy(_united(ranges))
        else:
            self._places = [(start, end - start, start, index) for start, end, index in _united(ranges)]
        packed = b"".join(
            self._packed(kernel, index, kind, argument)
            for index, (kind, argument) in enumerate(zip(code.parameters, arguments, strict=True))
        )
        self.packed = ctypes.create_string_buffer(packed, max(8, len(packed)))
        everything = [Buffer(start=copy, size=size, argument=index) for _, size, copy, index in self._places]
        everything += [Buffer(start=start, size=size) for start, size in code.constants]
        self.buffers = (Buffer * max(1, len(everything)))(*everything)
        self._check = check

    def _copy(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        large = [(start, end, index) for start, end, index in ranges if end - start > _MOST_COPIED]
        self._places = [(start, end - start, start, index) for start, end, index in large]
        ranges = [found for found in ranges if found not in large]
        offsets = []
        room = _GAP
        for start, end, _ in ranges:
            offsets.append(room + start % _PAGE)  # as well aligned as the tensor
            room += (end - start + 2 * _PAGE + _GAP) // _PAGE * _PAGE
        self._room = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        for (start, end, index), offset in zip(ranges, offsets, strict=True):
            ctypes.memmove(base + offset, start, end - start)
            self._places.append((start, end - start, base + offset, index))

    def _packed(self, kernel: str, index: int, kind: str, argument: torch.Tensor | int | float) -> bytes:
        """The eight bytes of an argument."""
        if not isinstance(argument, (int, float)):
            return struct.pack("<Q", self._placed(argument.data_ptr(), argument.numel() * argument.element_size()))
        try:
            return struct.pack(f"<{_CODES[kind]}", argument).ljust(8, b"\0")
        except (struct.error, OverflowError):
            raise ShipwayError(f"{kernel}: argument {index} is {argument}, the kernel takes {kind}") from None

    def _placed(self, address: int, size: int) -> int:
        for start, whole, copy, _ in self._places:
            if start <= address <= address + size <= start + whole:
                return copy + address - start
        raise AssertionError("an argument is in no range")

    def copy_back(self) -> None:
        """Brings what a checked launch has written into the tensors."""
        if not self._check:
            return
        for (start, size, copy, _), buffer in zip(self._places, self.buffers, strict=False):
            if buffer.written and copy != start:
                ctypes.memmove(start, copy, size)


def _united(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges of addresses with their argument's number, in ascending order, those that overlap as one."""
    united: list[tuple[int, int, int]] = []
    for start, end, index in sorted(ranges):
        if united and start < united[-1][1]:
            first, last, other = united[-1]
            united[-1] = (first, max(last, end), min(index, other))
        else:
            united.append((start, end, index))
    return united
