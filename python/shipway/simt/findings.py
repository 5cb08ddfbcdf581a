"""What the simulator finds wrong with a launch."""

from __future__ import annotations

KINDS = {
    1: "race",
    2: "out of bounds",
    3: "uninitialised",
    4: "misaligned",
    5: "divergence",
    6: "deadlock",
    7: "crash",
    8: "unsupported",
    9: "undefined",
}
"""Kinds of findings by the runtime's numbers."""

UNKNOWN = "unknown line"
"""What stands for a line where the IR has none."""


class Finding(ValueError):
    """A defect of a kernel that a launch showed: one line.

    Attributes:
        kind: One of :data:`KINDS`.
        line: ``path:line`` of the Mojo source, ``from file:line`` of each call that led there; after ``near`` the
            line before, where the compiler has left none; or :data:`UNKNOWN`.
    """

    def __init__(self, kind: str, what: str, line: str, kernel: str, block: int, thread: int) -> None:
        where = f", block {block} thread {thread}" if thread >= 0 else ""
        super().__init__(f"{kind}: {what} ({line}, {kernel}{where})")
        self.kind = kind
        self.line = line
