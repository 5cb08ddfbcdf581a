"""Each command of the ``lint`` task as a test, so that ``./dev test`` holds style, format and types too."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = tomllib.loads((ROOT / "pixi.toml").read_text())["tasks"]["lint"]["cmd"].split(" && ")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_lint_command_finds_nothing(command: str) -> None:
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
