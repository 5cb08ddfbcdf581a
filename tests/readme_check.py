"""Runs the README's own ``sh`` and ``python`` blocks, in order, and fails at the first that does.

    ./dev readme-check          in a fresh clone of HEAD, with an environment and a cache of its own
    ./dev readme-check --here   in this checkout and its environment: for CI, whose checkout is a fresh clone already

A block below the comment ``<!-- not run: reason -->`` is listed with its reason instead. Every other fence must name
a language that is shown and not run (``text``), so that no command escapes by a misspelt fence. Python blocks run with
``./dev python``. Needs only the standard library and git.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("text", "mojo", "toml", "json")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the line of its fence, its text, and why it is not run, or ``None``."""

    language: str
    line: int
    text: str
    not_run: str | None


def blocks(markdown: str) -> list[Block]:
    """Returns the ``sh`` and ``python`` blocks of ``markdown``.

    Raises:
        ValueError: A fence is never closed, or names a language that is neither run nor known to be shown only.
    """
    found: list[Block] = []
    reason: str | None = None
    fence: tuple[str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(markdown.splitlines(), start=1):
        if fence is not None:
            if line.strip() != "```":
                body.append(line)
                continue
            if fence[0] in ("sh", "python"):
                found.append(Block(*fence, "\n".join(body) + "\n", reason))
            fence, reason = None, None
        elif line.startswith("```"):
            fence, body = (line[3:].strip(), number), []
            if fence[0] not in ("sh", "python", *SHOWN):
                raise ValueError(f"line {number}: a fence in {fence[0] or 'no language'}: use sh, python or text")
        elif match := NOT_RUN.fullmatch(line.strip()):
            reason = match[1]
        elif line.strip():
            reason = None
    if fence is not None:
        raise ValueError(f"line {fence[1]}: the block is never closed")
    return found


def clean_environment(cache: Path | None) -> dict[str, str]:
    """Returns the user's environment without the virtual environment this process runs in, caches at ``cache``."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    inside = str(Path(sys.prefix, "bin"))
    env["PATH"] = os.pathsep.join(entry for entry in env["PATH"].split(os.pathsep) if entry != inside)
    env["SHIPWAY_NO_PIXI"] = "1"
    if cache is not None:
        env["SHIPWAY_CACHE"] = str(cache)
    return env


def run(readme: Path, env: dict[str, str]) -> int:
    """Runs the blocks of ``readme`` in its folder; returns the exit code of the check."""
    for block in blocks(readme.read_text()):
        where = f"{readme.name}:{block.line}: {block.language} block"
        if block.not_run:
            print(f"{where}: not run: {block.not_run}", flush=True)
            continue
        print(f"{where}: running", flush=True)
        with tempfile.NamedTemporaryFile("w", suffix=f".{block.language}") as script:
            script.write(block.text)
            script.flush()
            command = ["sh", "-eu", script.name] if block.language == "sh" else ["./dev", "python", script.name]
            began = time.monotonic()
            code = subprocess.run(command, cwd=readme.parent, env=env, stdin=subprocess.DEVNULL).returncode
        spent = time.monotonic() - began
        if code:
            print(f"{where}: FAILED with exit code {code} after {spent:.0f} s", flush=True)
            return 1
        print(f"{where}: ok in {spent:.0f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="use this checkout instead of a fresh clone of HEAD")
    here = parser.parse_args().here
    try:
        if here:
            return run(ROOT / "README.md", clean_environment(None))
        with tempfile.TemporaryDirectory(prefix="shipway-readme-") as fresh:
            clone = Path(fresh, "shipway")
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            return run(clone / "README.md", clean_environment(Path(fresh, "cache")))
    except ValueError as error:
        print(f"README.md: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
