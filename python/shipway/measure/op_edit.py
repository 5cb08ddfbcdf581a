"""Changes of sources: seeing that one was saved, and making one in a copy of the kernels."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from shipway.errors import ShipwayError
from shipway.signature import WORDS

LIMIT_S = 60.0
"""Seconds from saving a kernel to its line that ``--time-edit`` allows."""

_POLL_S = 0.2
_PACKAGE = Path(__file__).parent.parent
_KERNEL_OF = {
    "linear_residual": "linear",
    "lm_head": "linear",
    "mlp": "gate_up_silu",
    **{
        f"{op}_{word}": f"gpu/{kernel}"
        for op, kernel in (("linear", "linear"), ("gate_up_silu", "gate_up_silu"), ("qkv_rope_append", "qkv"))
        for word in WORDS
    },
}
"""Ops whose kernel lies in another file than that of their name."""

Snapshot = Mapping[Path, tuple[int, int]]


def kernel_file(op: str) -> Path:
    """Returns the file of an op's kernel, relative to the folder of the kernels."""
    return Path(f"{_KERNEL_OF.get(op, op)}.mojo")


def kernel_folders() -> tuple[Path, ...]:
    """Folders whose Mojo and Python files are compiled into the ops."""
    return (_PACKAGE / "mojo", _PACKAGE / "graphs")


def snapshot(folders: tuple[Path, ...]) -> Snapshot:
    """Returns time and size of every source below ``folders``."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in (".mojo", ".py"):
                try:
                    status = path.stat()
                except FileNotFoundError:  # an editor's own, gone again
                    continue
                found[path] = (status.st_mtime_ns, status.st_size)
    return found


def changed(before: Snapshot, after: Snapshot) -> list[Path]:
    """Returns the files that differ, came or went."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def wait_for_change(folders: tuple[Path, ...], before: Snapshot) -> Snapshot:
    """Waits until the sources differ from ``before`` and have come to rest; returns what they are then."""
    while True:
        now = snapshot(folders)
        if now != before:
            while (later := snapshot(folders)) != now:
                now = later
                time.sleep(_POLL_S / 2)
            return now
        time.sleep(_POLL_S)


@contextmanager
def copied_kernels() -> Iterator[Path]:
    """Yields a copy of the kernels, so that no interrupt can leave an edit in the checkout."""
    with TemporaryDirectory(prefix="shipway-kernels-") as folder:
        copy = Path(folder) / "kernels"
        shutil.copytree(_PACKAGE / "mojo" / "kernels", copy)
        yield copy


def edit(path: Path) -> None:
    """Saves ``path`` with one statement more in its first function: other code to compile, the same results.

    Raises:
        ShipwayError: The file has no function.
    """
    lines = path.read_text().splitlines(keepends=True)
    body = _first_body(lines)
    if body is None:
        raise ShipwayError(f"{path.name} has no function to edit")
    line = lines[body]
    indent = line[: len(line) - len(line.lstrip())]
    lines.insert(body, f"{indent}var edited = {secrets.randbits(30)}\n{indent}_ = edited\n")
    path.write_text("".join(lines))


def _first_body(lines: list[str]) -> int | None:
    """Index of the first statement of the first function, its docstring skipped."""
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "fn "))), None)
    if start is None:
        return None
    depth = 0
    for index in range(start, len(lines)):
        depth += sum(lines[index].count(c) for c in "([") - sum(lines[index].count(c) for c in ")]")
        if depth == 0 and lines[index].rstrip().endswith(":"):
            break
    body = index + 1
    if body < len(lines) and lines[body].lstrip().startswith('"""'):
        quotes = 0
        while quotes < 2:
            quotes += lines[body].count('"""')
            body += 1
    return body if body < len(lines) else None
