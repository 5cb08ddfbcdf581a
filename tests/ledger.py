"""The 45 minutes a full run may take on two cores with cold caches, shared out among its parts.

A part that takes half as much again as its share fails the run where ``CI`` is set, and is only reported elsewhere: a
busy laptop is no defect. CONTRIBUTING.md prints this table and ``test_tasks.py`` keeps the two equal.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

INSTALL, LINT, UNIT, PARITY, NUMERICS, TARGETS, SIMULATOR, PACKAGE = (
    "install",
    "lint and types",
    "unit",
    "architecture parity",
    "numerics",
    "targets",
    "simulator",
    "wheel and README check",
)

MINUTES = {INSTALL: 3, LINT: 2, UNIT: 5, PARITY: 8, NUMERICS: 9, TARGETS: 4, SIMULATOR: 9, PACKAGE: 5}

# File name patterns in tests/, first match wins; whatever matches none is a unit test.
FILES = (
    ("test_lint.py", LINT),
    ("test_architecture_*.py", PARITY),
    ("test_mojo_graph*.py", PARITY),
    ("test_serve.py", PARITY),
    ("test_mojo.py", NUMERICS),
    ("test_bad_calls*.py", NUMERICS),
    ("test_check_command.py", NUMERICS),
    ("test_compiled_rows.py", NUMERICS),
    ("test_far_offsets.py", NUMERICS),
    ("test_gpu_ops.py", NUMERICS),
    ("test_mutants.py", NUMERICS),
    ("test_ops_*.py", NUMERICS),
    ("test_properties*.py", NUMERICS),
    ("test_targets*.py", TARGETS),
    ("test_simt*.py", SIMULATOR),
    ("test_wheel.py", PACKAGE),
    ("test_readme.py", PACKAGE),
)


def part_of(path: Path) -> str:
    """Returns the part of the ledger that a test file is charged to."""
    return next((part for pattern, part in FILES if fnmatch(path.name, pattern)), UNIT)


def overdrawn(seconds: dict[str, float]) -> list[str]:
    """Returns one line for each part of ``seconds`` that exceeds its share by half or more."""
    return [
        f"{part} took {spent / 60:.1f} minutes, more than one and a half times its share of {MINUTES[part]}"
        for part, spent in seconds.items()
        if spent > 1.5 * 60 * MINUTES[part]
    ]
