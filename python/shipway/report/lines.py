"""Prints aligned columns: a Rich table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

_LABELS = 2  # the first columns hold names and are aligned left when the rest are figures


def print_table(lines: Sequence[Sequence[str]], out: TextIO, figures: bool = True) -> None:
    """Prints ``lines``, the first of which are titles; ``figures`` aligns all but the first two columns right."""
    left = _LABELS if figures else len(lines[0])
    if out.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for number, title in enumerate(lines[0]):
            table.add_column(title, justify="left" if number < left else "right", overflow="fold")
        for line in lines[1:]:
            table.add_row(*line)
        Console(file=out, highlight=False, markup=False).print(table)
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=out)
