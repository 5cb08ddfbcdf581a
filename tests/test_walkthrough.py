"""Follows "Adding an op" of CONTRIBUTING.md on a copy of the checkout, step by step as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^`([\w./]+)`(, a new file|, at the end|):\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str, str]]:
    """File, where in it, and the text of each step; without a place the text is a diff."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding an op\n")[1].split("\n## ")[0]
    return STEP.findall(section)


def follow(root: Path) -> None:
    for file, where, text in steps():
        path = root / file
        assert path.exists() == (where != ", a new file"), file
        if where == ", a new file":
            path.write_text(text)
        elif where == ", at the end":
            path.write_text(f"{path.read_text()}\n\n{text}")
        else:
            lines = text.splitlines(keepends=True)
            before = "\n" + "".join(line[1:] for line in lines if not line.startswith("+"))
            after = "\n" + "".join(line[1:] for line in lines)
            assert path.read_text().count(before) == 1, f"{file} does not have this once:{before}"
            path.write_text(path.read_text().replace(before, after))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, the walkthrough done."""
    root = tmp_path_factory.mktemp("checkout")
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    follow(root)
    return root


def test_every_step_of_the_walkthrough_has_its_place(checkout: Path) -> None:
    assert len(steps()) >= 14
    for command in ("ruff check .", "ruff format --check .", r"mblack -t mojo -l 80 --include \.mojo$ --check mojo"):
        done = subprocess.run(command.split(), cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["mypy"],
        ["shipway.cli", "check", "--op", "scale_add", "--examples", "40"],
        ["shipway.cli", "check", "--mutants", "--op", "scale_add", "--examples", "40"],
        ["shipway.cli", "op", "scale_add", "--shape", "T=3,K=600"],
        [
            "pytest",
            "-q",
            "tests/test_ops_reference.py",
            "tests/test_op_command.py",
            "-k",
            "scale_add or catalogue or work",
        ],
        ["pytest", "-q", "tests/test_properties.py", "tests/test_bad_calls.py", "-k", "scale_add"],
    ],
    ids=" ".join,
)
def test_the_new_op_holds(checkout: Path, command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(checkout / "python")}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
