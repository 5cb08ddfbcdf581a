"""What kernels must stay within: a table of limits, each for kernels and targets by pattern.

A kernel must compile; one of 16-bit matrices or of tf32 must show matrix instructions, since a target without them
compiles the same source silently to something else. All further limits come from a TOML file, a ``[[budget]]`` each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shipway.errors import ShipwayError
from shipway.targets.arch import ARCHS
from shipway.targets.figures import TF32
from shipway.targets.kernels import Variant, matching
from shipway.targets.survey import Entry

_MOST = ("spills", "scalar_spills", "stack", "registers", "shared", "code_bytes")
_LEAST = ("matrix", "wgmma", "loads16", "occupancy")


@dataclass(frozen=True)
class Budget:
    """Limits of some kernels on some targets.

    Attributes:
        kernels: Pattern of a kernel's name or a variant's, with ``*`` and ``?``.
        targets: Pattern of the targets.
        limits: The largest value of ``spills``, ``scalar_spills``, ``stack``, ``registers``, ``shared`` and
            ``code_bytes``; the smallest of ``matrix`` (matrix instructions), ``wgmma`` (those of a warpgroup),
            ``loads16`` (loads of 16 bytes or more) and ``occupancy``.
    """

    kernels: str
    targets: str
    limits: Mapping[str, float]


@dataclass(frozen=True)
class Excess:
    """A limit that is not kept.

    Attributes:
        kernel: The variant.
        target: The target.
        what: What exceeds it, in words.
    """

    kernel: str
    target: str
    what: str


def read_budgets(path: Path) -> list[Budget]:
    """Reads a file of budgets.

    Raises:
        ShipwayError: It cannot be read, or a budget has a wrong key or value, or names no kernel or no target.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ShipwayError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ShipwayError(f"{path} is no TOML file: {error}") from None
    rows = document.get("budget")
    if not isinstance(rows, list) or set(document) != {"budget"}:
        raise ShipwayError(f"{path} must hold [[budget]] tables and nothing else")
    return [_budget(f"{path}: budget {number}", row) for number, row in enumerate(rows, start=1)]


def _budget(where: str, row: object) -> Budget:
    known = ("kernels", "targets", *_MOST, *_LEAST)
    if not isinstance(row, dict) or (unknown := next((key for key in row if key not in known), None)):
        raise ShipwayError(f"{where}: {unknown} is none of {', '.join(known)}")
    kernels, targets = row.get("kernels"), row.get("targets", "*")
    if not isinstance(kernels, str) or not isinstance(targets, str):
        raise ShipwayError(f"{where} needs kernels, and may have targets: a pattern each")
    limits = {key: value for key, value in row.items() if key in (*_MOST, *_LEAST)}
    for key, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ShipwayError(f"{where}: {key} is a number from 0, not {value!r}")
    if not limits:
        raise ShipwayError(f"{where} sets no limit")
    if not matching(kernels):
        raise ShipwayError(f"{where} is of {kernels}, which names no kernel")
    if not any(fnmatchcase(name, targets) for name in ARCHS):
        raise ShipwayError(f"{where} is of {targets}, which names no target: choose among {', '.join(ARCHS)}")
    return Budget(kernels, targets, limits)


def exceeded(entries: Sequence[Entry], budgets: Sequence[Budget]) -> list[Excess]:
    """Returns what of ``entries`` does not keep its budgets, in their order."""
    named = [(budget, set(matching(budget.kernels))) for budget in budgets]
    return [
        Excess(str(entry.variant), entry.arch.name, what)
        for entry in entries
        for what in _of_entry(entry, [budget for budget, variants in named if _applies(budget, variants, entry)])
    ]


def _applies(budget: Budget, variants: set[Variant], entry: Entry) -> bool:
    return entry.variant in variants and fnmatchcase(entry.arch.name, budget.targets)


def _of_entry(entry: Entry, budgets: Sequence[Budget]) -> list[str]:
    needs = entry.figures
    if needs is None:
        return [f"does not compile: {entry.error}"]
    value: dict[str, float] = {
        "spills": needs.spills,
        "scalar_spills": needs.scalar_spills,
        "stack": needs.stack,
        "registers": needs.registers,
        "shared": needs.shared,
        "code_bytes": needs.code_bytes,
        "matrix": sum(needs.matrix.values()),
        "wgmma": needs.matrix.get("wgmma", 0),
        "loads16": sum(count for size, count in needs.loads.items() if size >= 16),
        "occupancy": entry.occupancy,
    }
    found = []
    if entry.variant.matrix and not needs.matrix:
        found.append("no matrix instructions")
    elif entry.variant.tf32 and set(needs.matrix) != {TF32}:
        found.append(f"matrix instructions are {', '.join(needs.matrix)}, not {TF32}")
    if not entry.blocks:
        found.append("not one block fits")
    for budget in budgets:
        for key, limit in budget.limits.items():
            if (key in _MOST and value[key] > limit) or (key in _LEAST and value[key] < limit):
                word = "at most" if key in _MOST else "at least"
                found.append(f"{key} {value[key]:g}, {word} {limit:g}")
    return found
