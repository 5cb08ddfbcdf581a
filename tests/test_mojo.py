"""Runs every Mojo test file, ``mojo/tests/test_*.mojo``, in a process of its own, so that a crash fails one test."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "mojo/tests").glob("test_*.mojo"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mojo_file_passes(path: Path) -> None:
    command = ["mojo", "run", "-I", "mojo", str(path.relative_to(ROOT))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert re.search(r"\b[1-9]\d* passed", done.stdout), f"no test ran:\n{done.stdout}{done.stderr}"


def test_there_are_mojo_tests() -> None:
    assert FILES
