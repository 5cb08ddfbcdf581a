"""``shipway compile``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shipway.cli.options import Json, Model, Threads, Weights
from shipway.cli.progress import progress
from shipway.errors import CannotRunError, program
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.model.resolve import DEFAULT_MODEL
from shipway.routes.catalogue import ROUTES


def compile(
    out: Annotated[Path, typer.Option(help="Directory to make; it must not exist yet.")],
    model: Model = DEFAULT_MODEL,
    route: Annotated[str, typer.Option(help="Route to compile with.")] = "mojo-graph",
    dtype: Annotated[str, typer.Option(help="Activation dtype.")] = "f32",
    weights: Weights = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Compile a model into a directory that starts in seconds, on machines with this CPU and these versions."""
    from shipway.api import check_names, check_threads, find_route
    from shipway.compiled import compile_model

    info = find_route(route)
    if not info.ships:
        ships = [name for name, known in ROUTES.items() if known.ships]
        raise CannotRunError(f"{route} has nothing to compile ahead of time: pass --route {' or '.join(ships)}")
    weights = dtype if weights is None else weights
    check_names(dtype, weights, "cpu")
    if (reason := info.why_not(dtype, weights, "cpu")) is not None:
        raise CannotRunError(f"{route} {reason}")
    with progress() as show:
        prepared = compile_model(model, info, dtype, weights, check_threads(threads), out, show)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if json is not None:
        document = {"path": str(out), "route": route, "dtype": dtype, "weights": weights, "bytes": size}
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "compile", **document})
    how = f"compiled in {prepared.compile_s:.1f} s" if prepared.compile_cold else "compiled before"
    print(f"{out}: {route} {dtype}, {weights} weights, {size / (1 << 20):,.1f} MiB, {how}")
    print(f'start it with: {program()} generate --model {shlex.quote(str(out))} --prompt "..."')
