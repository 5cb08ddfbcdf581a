"""Progress of long work on stderr: one changing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is going on."""
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    with console.status("") as status:

        def show(line: str) -> None:
            if line.startswith("warning: "):
                console.print(line)
            else:
                status.update(line)

        yield show
