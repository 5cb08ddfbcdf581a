"""``shipway targets``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shipway.cli.options import Json, matching, named
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.result import write_json
from shipway.model.resolve import DEFAULT_MODEL

if TYPE_CHECKING:
    from shipway.targets.kernels import Variant

_COMMA = re.compile(r",(?![^[]*\])")  # that is not within brackets


def targets(
    kernel: Annotated[
        str, typer.Option(help="Kernels, or variants such as 'rms_norm\\[bf16]', separated by commas; * and ? match.")
    ] = "*",
    target: Annotated[str, typer.Option(help="Targets, likewise.")] = "*",
    budgets: Annotated[
        Path | None, typer.Option(help="TOML file of limits that kernels must keep, such as bench/budgets.toml.")
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(help="Compile a whole graph for these targets instead, separated by commas."),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help="With --graph: whose graph, mojo-graph, max-graph, serve for our paged KV cache, or ops for each "
            "of our ops once: mojo-graph."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"With --graph: directory, GGUF file, or a model name: {DEFAULT_MODEL}.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --graph: dtype of activations and weights, f32, bf16, tf32, of ops also f16: bf16."),
    ] = None,
    json: Json = None,
) -> None:
    """Compile every GPU kernel for every target, without a GPU, and say what came out.

    Exits with 1 when a kernel does not compile, shows no matrix instructions where it must, or exceeds its budget.
    With --graph: what one decode step launches, what was fused into each launch, and the kernels' registers.
    """
    if graph is None:
        if (route, model, dtype) != (None, None, None):
            raise ShipwayError("--route, --model and --dtype go with --graph: kernels are compiled in all their dtypes")
        _kernels(kernel, target, budgets, json)
    if (kernel, target, budgets) != ("*", "*", None):
        raise ShipwayError(
            "--graph names the targets; it takes --route, --model, --dtype and --json, and has no budgets"
        )
    _graphs(
        graph,
        "mojo-graph" if route is None else route,
        DEFAULT_MODEL if model is None else named(model),
        "bf16" if dtype is None else dtype,
        json,
    )


def _kernels(kernel: str, target: str, budgets: Path | None, json: Path | None) -> NoReturn:
    from shipway.measure.targets import compile_targets, exit_code
    from shipway.report.targets import print_targets
    from shipway.targets.arch import ARCHS
    from shipway.targets.budgets import read_budgets

    variants = _variants(kernel)
    archs = [ARCHS[name] for name in matching(target, list(ARCHS), "--target")]
    limits = [] if budgets is None else read_budgets(budgets)
    with progress() as show:
        document = compile_targets(variants, archs, limits, show)
    try:  # neither a file that cannot be written nor a reader that went away may lose the other
        print_targets(document, sys.stdout)
    finally:
        if json is not None:
            write_json(json, document)
    raise typer.Exit(exit_code(document))


def _graphs(graph: str, route: str, model: str, dtype: str, json: Path | None) -> NoReturn:
    from shipway.measure.targets import compile_graphs, exit_code
    from shipway.model.checkpoint import open_checkpoint
    from shipway.model.resolve import resolve
    from shipway.report.targets import print_graphs
    from shipway.targets.arch import ARCHS
    from shipway.targets.graph import GRAPHS

    archs = [ARCHS[name] for name in matching(graph, list(ARCHS), "--graph")]
    if route not in GRAPHS:
        raise ShipwayError(f"--route {route} is none of {', '.join(GRAPHS)}")
    if dtype not in GRAPHS[route][1]:
        raise ShipwayError(f"--dtype {dtype} is none of {', '.join(GRAPHS[route][1])}")
    if dtype == "tf32" and (others := [arch.name for arch in archs if arch.vendor != "nvidia"]):
        raise ShipwayError(f"--dtype tf32 is for NVIDIA's targets, not {', '.join(others)}")
    config = open_checkpoint(resolve(model)).config
    with progress() as show:
        document = compile_graphs(route, model, config, dtype, archs, show)
    try:
        print_graphs(document, sys.stdout)
    finally:
        if json is not None:
            write_json(json, document)
    raise typer.Exit(exit_code(document))


def _variants(patterns: str) -> list[Variant]:
    """The variants that a list of patterns selects.

    Raises:
        ShipwayError: A pattern selects nothing.
    """
    from shipway.targets import kernels

    found: list[Variant] = []
    for pattern in map(str.strip, _COMMA.split(patterns)):
        if not (selected := kernels.matching(pattern)):
            raise ShipwayError(f"--kernel {pattern!r} is none of {', '.join(row.name for row in kernels.KERNELS)}")
        found += selected
    return list(dict.fromkeys(found))
