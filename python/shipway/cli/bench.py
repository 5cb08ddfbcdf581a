"""``shipway bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shipway.cli.options import Device, Json, Model, Threads, Weights, comma_list
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.result import Result, write_json
from shipway.model.resolve import DEFAULT_MODEL
from shipway.routes.catalogue import ROUTES


def bench(
    model: Model = DEFAULT_MODEL,
    routes: Annotated[str, typer.Option(help="Routes, separated by commas.")] = ",".join(ROUTES),
    dtype: Annotated[str, typer.Option(help="Activation dtypes, separated by commas.")] = "f32,bf16",
    weights: Weights = None,
    device: Device = "cpu",
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds; 3 or more give intervals.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the fixed text in the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="New tokens per run, EOS ignored.")] = 64,
    contexts: Annotated[
        str, typer.Option(help="KV lengths of an additional decode sweep, separated by commas; none if empty.")
    ] = "",
    price: Annotated[
        str | None,
        typer.Option(help="USD per hour, or a row of bench/prices.toml; the row like this machine if not given."),
    ] = None,
    json: Json = None,
) -> None:
    """Time every route behind its numerics verdict and print the table.

    Exits with 1 when a route fails its verdict or breaks, with 3 when none can run here. What is stopped, by Ctrl-C or
    otherwise, still prints and writes the rounds that have ended.
    """
    from shipway.measure.bench import Benchmark, Settings

    try:
        lengths = tuple(int(length) for length in comma_list(contexts))
    except ValueError:
        raise ShipwayError(f"--contexts takes numbers separated by commas, not {contexts!r}") from None
    settings = Settings(
        model=model,
        routes=comma_list(routes),
        dtypes=comma_list(dtype),
        weights=weights,
        threads=threads,
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        contexts=lengths,
        device=device,
        price=price,
    )
    benchmark: Benchmark | None = None
    try:
        with progress() as show:
            benchmark = Benchmark(settings, show)
            result = benchmark.run()
    except BaseException:  # whatever stops it, the rounds that ended are not lost
        if benchmark is not None and (stopped := benchmark.stopped()) is not None:
            _publish(stopped, json)
        raise
    _publish(result, json)
    raise typer.Exit(exit_code(result))


def _publish(result: Result, json: Path | None) -> None:
    from shipway.report.table import print_result

    try:  # neither a file that cannot be written nor a reader that went away may lose the other
        print_result(result, sys.stdout)
    finally:
        if json is not None:
            write_json(json, result)


def exit_code(result: Result) -> int:
    """Returns 1 if a route failed its verdict or broke, 3 if none ran, else 0."""
    statuses = {entry["status"] for entry in result["entries"]}
    if statuses & {"fail", "failed"}:
        return 1
    return 0 if "ok" in statuses else 3
