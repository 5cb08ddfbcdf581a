"""Options that several commands share."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from shipway.errors import ShipwayError
from shipway.measure.result import check_writable


def _writable(path: Path | None) -> Path | None:
    if path is not None:
        if str(path) == "-":
            raise ShipwayError("--json takes a path, not -: /dev/stdout is standard output")
        check_writable(path)
    return path


def named(model: str) -> str:
    """Returns ``model``; raises a :class:`ShipwayError` when it is empty, which a path would take for this folder."""
    if not model:
        raise ShipwayError("the model's name is empty: give a Hugging Face directory, a GGUF file, or a model name")
    return model


Model = Annotated[str, typer.Option(help="Hugging Face directory, GGUF file, or a model name.", callback=named)]
Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file.", callback=_writable, dir_okay=True)
]
Device = Annotated[str, typer.Option(help="Device to run on.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of every route; all CPUs of this process if not given.")]
Weights = Annotated[
    str | None, typer.Option(help="Storage format of the matrices, f32, bf16 or f16; the dtype if not given.")
]


def comma_list(text: str) -> tuple[str, ...]:
    """Splits ``"a,b"``; blanks around names are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def matching(patterns: str, names: list[str], option: str) -> list[str]:
    """Returns those of ``names`` that a list of patterns selects, in their order.

    Raises:
        ShipwayError: A pattern selects nothing.
    """
    wanted = comma_list(patterns)
    idle = [pattern for pattern in wanted if not any(fnmatchcase(name, pattern) for name in names)]
    if idle or not wanted:
        raise ShipwayError(f"{option} {', '.join(idle) or repr(patterns)} is none of {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]
