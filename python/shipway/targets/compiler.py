"""The Mojo compiler run for GPUs that need not be there: one process per target, split when it fails.

A compiler that crashes, as 26.7's does on bfloat16 matrix instructions for sm_75, takes its whole process with it, and
an error in one kernel fails all that are compiled with it: what failed is compiled again in halves, until the culprit
is alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from shipway.errors import CannotRunError, this_python
from shipway.graphs.extension import KERNELS, first_error
from shipway.model.resolve import cache_dir
from shipway.targets.kernels import Variant

ASM, OBJECT, LLVM = "asm", "object", "llvm-opt"
_LIMIT_S, _LIMIT_EACH_S = 300.0, 60.0
"""Seconds a process may take, and as many more per variant: one that takes longer counts as crashed."""
_POLL_S = 0.02
_NOT_PARSED = "failed to parse the provided Mojo source module"
_ERROR = re.compile(r"\berror:", re.IGNORECASE)
_DRIVER = "driver.mojo"


@dataclass(frozen=True)
class Batch:
    """What one compiler process compiles.

    Attributes:
        arch: The target, such as ``"sm_90a"``.
        kinds: What to emit of each variant: ``"asm"``, ``"object"`` (a linked cubin or code object) or ``"llvm-opt"``,
            which gets line tables, so that its instructions name lines of the ``.mojo`` files.
        variants: The kernels.
    """

    arch: str
    kinds: tuple[str, ...]
    variants: tuple[Variant, ...]

    def halves(self) -> list[Batch]:
        """Returns two batches, split between modules if there are several, else between kernels, else anywhere."""
        levels: tuple[Callable[[Variant], object], ...] = (lambda v: v.kernel.module, lambda v: v.kernel, lambda v: v)
        for level in levels:
            groups = [tuple(group) for _, group in groupby(self.variants, key=level)]
            if len(groups) > 1:
                break
        middle = len(groups) // 2
        parts = [sum(part, ()) for part in (groups[:middle], groups[middle:])]
        return [Batch(self.arch, self.kinds, part) for part in parts if part]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant.

    Attributes:
        files: A file per kind; empty when it does not compile.
        error: Why it does not compile, in one line.
        seconds: Its share of the seconds of the process that compiled it.
        together: How many variants that process compiled.
    """

    files: dict[str, Path]
    error: str | None
    seconds: float
    together: int


def compile_batches(
    batches: Sequence[Batch], folder: Path, show: Callable[[str], None]
) -> list[dict[Variant, Compiled]]:
    """Compiles every batch, as many at a time as there are CPUs.

    Args:
        batches: What to compile.
        folder: An empty folder for what comes out.
        show: Told what is going on.

    Returns:
        For each batch what became of each of its variants.

    Raises:
        CannotRunError: The Mojo compiler is not installed.
    """
    results: list[dict[Variant, Compiled]] = [{} for _ in batches]
    waiting = deque(enumerate(batches))
    running: list[tuple[int, _Process]] = []
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                number, batch = waiting.popleft()
                running.append((number, _Process(batch, Path(tempfile.mkdtemp(dir=folder)))))
                show(f"{batch.arch}: compiling {_named(batch.variants)}")
            time.sleep(_POLL_S)
            for entry in [entry for entry in running if entry[1].ended()]:
                running.remove(entry)
                number, process = entry
                compiled = process.result()
                again = process.batch.halves() if compiled is None else []
                waiting.extendleft((number, half) for half in reversed(again))
                results[number] |= compiled or {}
    finally:
        for _, process in running:
            process.kill()
    return results


def _named(variants: Sequence[Variant]) -> str:
    return str(variants[0]) if len(variants) == 1 else f"{variants[0]} and {len(variants) - 1} more"


class _Process:
    """A compiler process and what it left behind."""

    def __init__(self, batch: Batch, folder: Path) -> None:
        self.batch, self._folder = batch, folder
        (folder / _DRIVER).write_text(driver(batch))
        command = [_mojo(), "build", "-I", str(KERNELS.parent), _DRIVER, "-o", "driver"]
        if LLVM in batch.kinds:
            command.append("-g1")
        environment = os.environ | {"MODULAR_CACHE_DIR": str(cache_dir() / "modular")}
        self._started = time.perf_counter()
        self._late = False
        with open(folder / "log", "w") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def ended(self) -> bool:
        """Whether it has ended; ends one that takes too long."""
        if self._process.poll() is not None:
            return True
        self._late = time.perf_counter() - self._started > _LIMIT_S + _LIMIT_EACH_S * len(self.batch.variants)
        if self._late:
            self.kill()
        return self._late

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def result(self) -> dict[Variant, Compiled] | None:
        """Returns what became of each variant, ``None`` if a failure may be that of some of them only."""
        seconds = time.perf_counter() - self._started
        output = (self._folder / "log").read_text(errors="replace")
        variants = self.batch.variants
        # The AMD linker's "local memory exceeds limit" comes with exit code 0.
        if self._process.returncode == 0 and not _ERROR.search(output):
            subprocess.run([self._folder / "driver"], cwd=self._folder, check=True)
            share = seconds / len(variants)
            return {
                variant: Compiled(self._files(number), None, share, len(variants))
                for number, variant in enumerate(variants)
            }
        error = self._error(output)
        one_kernel = len({variant.kernel for variant in variants}) == 1
        module_broken = _NOT_PARSED in output and _DRIVER not in first_error(output)
        if len(variants) > 1 and not (one_kernel and module_broken):
            return None
        return {variant: Compiled({}, error, seconds / len(variants), len(variants)) for variant in variants}

    def _files(self, number: int) -> dict[str, Path]:
        return {kind: self._folder / f"{number}.{kind}" for kind in self.batch.kinds}

    def _error(self, output: str) -> str:
        code = self._process.returncode
        if self._late:
            return "the compiler did not end in time"
        if not _ERROR.search(output):
            return f"the compiler crashed with {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        line = first_error(output).strip()
        return re.sub(rf"^\S*{re.escape(_DRIVER)}:\d+:\d+: ", "", line)


def driver(batch: Batch) -> str:
    """Returns a Mojo program that holds what its own compiler emitted for each variant, and writes it into files."""
    kernels = list(dict.fromkeys(variant.kernel for variant in batch.variants))
    lines = [
        "from std.compile import compile_info",
        "from std.pathlib import Path",
        "from max.gpu.host import get_gpu_target",
        *(f"from {kernel.module} import {kernel.name} as k{number}" for number, kernel in enumerate(kernels)),
        f'comptime TARGET = get_gpu_target["{batch.arch}"]()',
        "def main() raises:",
    ]
    for number, variant in enumerate(batch.variants):
        function = f"k{kernels.index(variant.kernel)}{variant.arguments()}"
        lines += [
            f'    Path("{number}.{kind}").write_text('
            f'compile_info[{function}, target=TARGET, emission_kind="{kind}"]().asm)'
            for kind in batch.kinds
        ]
    return "\n".join(lines) + "\n"


def _mojo() -> str:
    """Returns the path of this environment's Mojo compiler.

    Raises:
        CannotRunError: There is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "mojo"
    found = str(beside) if beside.exists() else shutil.which("mojo")
    if found is None:
        raise CannotRunError(f"the Mojo compiler is missing: {this_python('-m pip install mojo==1.2.0')}")
    return found
