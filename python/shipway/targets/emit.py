"""Kernels compiled for a target: assembly, linked object or LLVM IR, kept between runs.

What compiled is kept per kernel, target and kind, under the sources that the kernel's module imports; errors are not
kept. All variants of a kernel are compiled together: a compiler process takes seconds before it sees the first.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from shipway.artefacts import Artefact, artefact, source_of
from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.graphs.extension import KERNELS
from shipway.targets import compiler
from shipway.targets.compiler import Batch, Compiled
from shipway.targets.kernels import DeviceKernel, Variant

_STORE = "gpu-kernels"  # sub-directory of the artefact store
_RECORD = "compiled.json"
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([.\w]+)", re.MULTILINE)


@dataclass(frozen=True)
class Emitted:
    """What became of one variant.

    Attributes:
        files: A file for each kind that was asked for; empty when it does not compile.
        error: Why it does not compile, in one line.
        compile_s: Its share of the seconds of the compiler process that compiled it.
        together: How many variants that process compiled.
        cold: Whether this call compiled it.
    """

    files: Mapping[str, Path]
    error: str | None
    compile_s: float
    together: int
    cold: bool


def emit(variants: Sequence[Variant], arch: str, kind: str) -> dict[Variant, Emitted]:
    """Compiles variants for one target into files of one kind; see :func:`emit_all`."""
    return emit_all([Batch(arch, (kind,), tuple(variants))])[0]


def emit_all(batches: Sequence[Batch], show: Callable[[str], None] = lambda line: None) -> list[dict[Variant, Emitted]]:
    """Compiles what is not kept, one compiler process per batch, as many at a time as there are CPUs.

    Args:
        batches: What is wanted; other variants of the same kernels are compiled with them.
        show: Told what is going on.

    Returns:
        For each batch what became of its variants.

    Raises:
        ShipwayError: The sources were saved meanwhile, or the cache cannot be written.
        CannotRunError: The Mojo compiler is not installed.
    """
    results: list[dict[Variant, Emitted]] = []
    missing: list[Batch] = []
    for batch in batches:
        absent: list[Variant] = []
        results.append({})
        for kernel in dict.fromkeys(variant.kernel for variant in batch.variants):
            if (kept := _kept(batch, kernel)) is None:
                absent += kernel.every(batch.arch)
            else:
                results[-1] |= _read(kept, batch.kinds, kernel.every(batch.arch))
        missing.append(Batch(batch.arch, batch.kinds, tuple(absent)))
    modules = {variant.kernel.module for batch in missing for variant in batch.variants}
    before = {module: source_of(*_sources(module)) for module in modules}
    with tempfile.TemporaryDirectory(prefix="shipway-targets-") as folder:
        todo = [number for number, batch in enumerate(missing) if batch.variants]
        done = compiler.compile_batches([missing[number] for number in todo], Path(folder), show)
        if before != {module: source_of(*_sources(module)) for module in modules}:  # neither state, perhaps
            raise ShipwayError("the kernels changed while they were compiled: run it again")
        for number, compiled in zip(todo, done, strict=True):
            for kernel, group in groupby(compiled, key=lambda variant: variant.kernel):
                results[number] |= _keep(missing[number], kernel, {variant: compiled[variant] for variant in group})
    return [
        {variant: result[variant] for variant in batch.variants} for batch, result in zip(batches, results, strict=True)
    ]


class _Absent(Exception):
    """There is no such artefact."""


def _kept(batch: Batch, kernel: DeviceKernel) -> Artefact | None:
    """The artefact of a kernel, all of whose variants compile."""

    def absent(folder: Path) -> None:
        raise _Absent

    try:
        return artefact(_STORE, _parts(batch, kernel.every(batch.arch)), absent)
    except _Absent:
        return None


def _keep(batch: Batch, kernel: DeviceKernel, compiled: Mapping[Variant, Compiled]) -> dict[Variant, Emitted]:
    """Puts what compiled into the store.

    Where a variant does not compile nobody finds the others there: the kernel is compiled again at the next call.
    """
    whole = [variant for variant in compiled if compiled[variant].error is None]

    def build(folder: Path) -> None:
        for variant in whole:
            for kind, file in compiled[variant].files.items():
                shutil.copy(file, _file(folder, variant, kind))
        shares = {str(variant): (compiled[variant].seconds, compiled[variant].together) for variant in whole}
        (folder / _RECORD).write_text(json.dumps(shares))

    kept = _read(artefact(_STORE, _parts(batch, whole), build), batch.kinds, whole) if whole else {}
    failed = {variant: result for variant, result in compiled.items() if result.error is not None}
    return kept | {
        variant: Emitted({}, result.error, result.seconds, result.together, cold=True)
        for variant, result in failed.items()
    }


def _read(kept: Artefact, kinds: Sequence[str], variants: Sequence[Variant]) -> dict[Variant, Emitted]:
    shares = json.loads((kept.path / _RECORD).read_text())
    emitted = {}
    for variant in variants:
        files = {kind: _file(kept.path, variant, kind) for kind in kinds}
        seconds, together = shares[str(variant)]
        emitted[variant] = Emitted(files, None, seconds, together, kept.cold)
    return emitted


def _file(folder: Path, variant: Variant, kind: str) -> Path:
    return folder / f"{variant}.{kind}"


def _parts(batch: Batch, variants: Sequence[Variant]) -> dict[str, object]:
    """Everything that files of these variants of one kernel depend on."""
    module = variants[0].kernel.module
    try:
        versions = {name: version(name) for name in ("mojo", "max")}
    except PackageNotFoundError as error:
        remedy = this_python(f"-m pip install {error.name}")
        raise CannotRunError(f"kernels are compiled by the package {error.name}, which is missing: {remedy}") from None
    return {
        "arch": batch.arch,
        "kinds": sorted(batch.kinds),
        "module": module,
        "calls": [f"{variant.kernel.name}{variant.arguments()}" for variant in variants],
        "variants": [str(variant) for variant in variants],
        "sources": source_of(*_sources(module)),
        "folder": str(KERNELS),  # line tables name its files
        "driver": source_of(compiler.__file__),
        "versions": versions,
    }


def _sources(module: str) -> list[str]:
    """Files of the kernels that ``module`` imports, directly or not, and its own, sorted.

    A package stands for all the modules in its folder. What `__init__` files import besides does not reach a kernel.
    """
    found: set[Path] = set()
    todo = [(module, KERNELS)]
    while todo:
        name, package = todo.pop()
        dots = len(name) - len(name.lstrip("."))
        base = KERNELS.parent if dots == 0 else package.parents[dots - 2] if dots > 1 else package
        path = base.joinpath(*name[dots:].split("."))
        files = [path.with_suffix(".mojo")] if path.with_suffix(".mojo").is_file() else sorted(path.glob("*.mojo"))
        for file in files:
            if file not in found and file.name != "__init__.mojo" and file.is_relative_to(KERNELS):
                found.add(file)
                todo += [(imported, file.parent) for imported in _IMPORT.findall(file.read_text())]
    return sorted(map(str, found))
