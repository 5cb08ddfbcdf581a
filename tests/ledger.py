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

MINUTES = {INSTALL: 6, LINT: 2, UNIT: 5, PARITY: 10, NUMERICS: 6, TARGETS: 4, SIMULATOR: 6, PACKAGE: 6}

# File name patterns in tests/, first match wins; whatever matches none is a unit test.
FILES = (
    ("test_lint.py", LINT),
    ("test_architecture_*.py", PARITY),
    ("test_mojo_graph*.py", PARITY),
    ("test_serve.py", PARITY),
    ("test_mojo.py", NUMERICS),
    ("test_bad_calls.py", NUMERICS),
