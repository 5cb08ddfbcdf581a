"""The runtime: its C sources compiled by the system's compiler once, kept in the cache, loaded into this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from shipway.artefacts import artefact, cpu_target, source_of
from shipway.errors import CannotRunError

SOURCES = Path(__file__).with_name("runtime")
# No fortified longjmp: a launch is left from a fiber's stack. No contraction: a product rounds as it is written.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-fast-math", "-U_FORTIFY_SOURCE", "-Wall")

SHARED_ROOM = 256 << 10
"""Bytes mapped for the shared memory of a block; its address is a multiple of this."""
_PLACES = range(0x2000_0000, 0x8000_0000, 0x1000_0000)  # below 4 GiB: shared pointers have 32 bits


class Buffer(ctypes.Structure):
    """``Buffer`` of simt.h."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("shadow", ctypes.c_void_p),
        ("written", ctypes.c_int),
        ("argument", ctypes.c_int),
    )


class Op(ctypes.Structure):
    """``Op`` of simt.h."""

    _fields_ = (
        ("scope", ctypes.c_int),
        ("orders", ctypes.c_int),
        ("run", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
    )


class Report(ctypes.Structure):
    """``Report`` of simt.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("block", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("site", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("text", ctypes.c_char * 256),
    )


class Launch(ctypes.Structure):
    """``Launch`` of simt.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_int * 3),
        ("threads", ctypes.c_int * 3),
        *((name, ctypes.c_int) for name in ("warp_size", "resident", "check", "amd")),
        *((name, ctypes.c_int) for name in ("granule", "shared_granule", "buffers", "ops", "warpgroups")),
        ("seed", ctypes.c_uint),
        ("shared", ctypes.c_void_p),
        ("shared_size", ctypes.c_int64),
        ("buffer", ctypes.POINTER(Buffer)),
        ("op", ctypes.POINTER(Op)),
        ("constants", ctypes.c_int),
        ("report", Report),
        ("counts", ctypes.c_int64 * 4),
    )


def _compile(directory: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        raise CannotRunError("the simulator needs a C compiler and there is no cc: install gcc or clang, or set CC")
    command = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(directory / "runtime.so"), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as problem:
        raise CannotRunError(f"the simulator's C compiler {compiler} cannot run ({problem.strerror})") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise CannotRunError(f"{compiler} cannot compile the simulator's runtime: {first}")


@cache
def runtime() -> ctypes.CDLL:
    """Returns the runtime, compiled at first use.

    Raises:
        CannotRunError: There is no C compiler that can compile it.
    """
    parts = {
        "sources": source_of(*map(str, sorted(SOURCES.iterdir()))),
        "flags": FLAGS,
        "compiler": os.environ.get("CC") or "cc",
        "target": cpu_target(),
        "platform": sys.platform,
    }
    library = ctypes.CDLL(str(artefact("simt", parts, _compile).path / "runtime.so"))
    library.simt_launch.argtypes = [ctypes.POINTER(Launch)]
    return library


@cache
def shared_memory() -> int:
    """Returns the address of the block's shared memory: fixed in this process, compiled into the kernels.

    Raises:
        CannotRunError: None of the addresses is free.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    read_write, private_anonymous_noreplace = 3, 0x100022
    for place in _PLACES:
        if libc.mmap(place, SHARED_ROOM, read_write, private_anonymous_noreplace, -1, 0) == place:
            return place
    raise CannotRunError("the simulator found no free address below 4 GiB for shared memory")
