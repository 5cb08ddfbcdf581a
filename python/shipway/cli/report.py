"""``shipway report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shipway.errors import program
from shipway.measure.result import read_result


def report(path: Annotated[Path, typer.Argument(help=f"A file written by `{program()} bench --json`.")]) -> None:
    """Print the table of a recorded benchmark again."""
    from shipway.report.table import print_result

    print_result(read_result(path), sys.stdout)
