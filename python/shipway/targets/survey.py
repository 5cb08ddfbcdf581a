"""Every kernel on every target: compiled or why not, and what it needs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shipway.targets.arch import Arch
from shipway.targets.compiler import ASM, OBJECT, Batch
from shipway.targets.emit import Emitted, emit_all
from shipway.targets.figures import Figures, figures
from shipway.targets.kernels import Variant


@dataclass(frozen=True)
class Entry:
    """One kernel on one target.

    Attributes:
        variant: The kernel.
        arch: The target.
        error: Why it does not compile, in one line.
        compile_s: Its share of the seconds of the compiler process that compiled it.
        compiled_together: How many kernels that process compiled.
        cold: Whether this survey compiled it.
        figures: What it needs; ``None`` when it does not compile.
    """

    variant: Variant
    arch: Arch
    error: str | None
    compile_s: float
    compiled_together: int
    cold: bool
    figures: Figures | None

    @property
    def blocks(self) -> int:
        """How many blocks a multiprocessor holds at a time; 0 if not even one fits or the kernel does not compile."""
        needs = self.figures
        return 0 if needs is None else self.arch.blocks(needs.registers, needs.shared, needs.scalars)

    @property
    def occupancy(self) -> float:
        """The share of a multiprocessor's warps that can be resident, from 0 to 1."""
        return self.arch.occupancy(self.blocks)


def survey(variants: Sequence[Variant], archs: Sequence[Arch], show: Callable[[str], None]) -> list[Entry]:
    """Compiles variants for targets and reads their figures; a kernel is only asked of targets it is written for.

    Raises:
        ShipwayError: What came out cannot be read, or the cache cannot be written.
        CannotRunError: The compiler or a package that reads what came out is not installed.
    """
    batches = [
        Batch(
            arch.name,
            (ASM, OBJECT),
            tuple(variant for variant in variants if variant.runs_on(arch.name)),
        )
        for arch in archs
    ]
    emitted = emit_all(batches, show)
    return [
        _entry(variant, arch, result)
        for arch, results in zip(archs, emitted, strict=True)
        for variant, result in results.items()
    ]


def _entry(variant: Variant, arch: Arch, result: Emitted) -> Entry:
    needs = None if result.error else figures(arch, result.files[ASM], result.files[OBJECT])
    return Entry(variant, arch, result.error, result.compile_s, result.together, result.cold, needs)
