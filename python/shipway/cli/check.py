"""``shipway check``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from shipway.cli.options import Json, matching
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.result import write_json

if TYPE_CHECKING:
    from shipway.numerics.campaign import Line
    from shipway.ops.op import Case


def check(
    op: Annotated[str, typer.Option(help="Ops, separated by commas; * and ? match; all if not given.")] = "*",
    impl: Annotated[
        str | None,
        typer.Option(
            help="Implementations, likewise; those on the CPU if not given: mojo@TARGET is simulated, mojo-gpu wants a "
            "GPU."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtypes, likewise.")] = "*",
    examples: Annotated[
        int | None,
        typer.Option(
            help="Drawn cases per line, shared out among its properties, each at least 5, beside the pinned ones: 200, "
            "on simulated GPUs 20; with --mutants per property: 12."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    case: Annotated[str | None, typer.Option(help="Run only this case, as a failure printed it.")] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Check the checks: every broken variant must fail.")
    ] = False,
    json: Json = None,
) -> None:
    """Judge every op on every implementation against float64, over drawn shapes and known traps.

    Exits with 1 when a verdict fails (with --mutants: when a broken variant survives), with 3 when nothing runs here.
    """
    from shipway.measure import checks
    from shipway.numerics.campaign import Plan, chosen
    from shipway.numerics.mutants import mutants as all_mutants
    from shipway.ops.catalogue import OPS
    from shipway.report.checks import print_lines, print_mutants

    for option, number, least, most in (("--examples", examples, 1, 10**6), ("--seed", seed, 0, 2**63)):
        if number is not None and not least <= number <= most:
            raise ShipwayError(f"{option} must be from {least} to {most}, not {number}")
    if case is not None and examples is not None:
        raise ShipwayError("--case runs one case: --examples is for drawn ones")
    ops = matching(op, list(OPS), "--op")
    if mutants:
        if impl is not None or dtype != "*" or case is not None:
            raise ShipwayError(
                "--mutants takes --op, --examples, --seed and --json: variants are of PyTorch's f32 rows"
            )
        broken = [mutant for mutant in all_mutants() if mutant.op in ops]
        red: list[dict[str, Any]] = []
        try:
            with progress() as show:
                checks.run_mutants(broken, examples or 12, seed, red, show)
        finally:
            document = checks.mutants_document(ops, examples or 12, seed, len(broken), red)
            if red:
                _publish(document, print_mutants, json)
        raise typer.Exit(checks.mutants_exit_code(document))
    rows = [row for name in ops for row in OPS[name].implementations.values()]
    if impl is None:
        rows = [row for row in rows if row.device == "cpu"]
    names = matching(impl or "*", list(dict.fromkeys(row.name for row in rows)), "--impl")
    dtypes = matching(dtype, list(dict.fromkeys(name for row in rows for name in row.dtypes)), "--dtype")
    todo = [(o.name, row.name, d) for o, row, d in chosen(ops, names, dtypes)]
    if not todo:
        raise ShipwayError(f"no implementation among {impl or '*'} runs {op} in {dtype}")
    plan = Plan(examples, seed, case=None if case is None else _parsed(case, ops))
    done: list[Line] = []
    try:
        with progress() as show:
            checks.run_campaign(todo, plan, done, show)
    finally:  # whatever stops a campaign, the lines that are done are not lost
        document = checks.campaign_document(todo, plan, done)
        if done:
            _publish(document, print_lines, json)
    raise typer.Exit(checks.lines_exit_code(document))


def _publish(
    document: dict[str, Any], print_result: Callable[[dict[str, Any], TextIO], None], json: Path | None
) -> None:
    """Prints and writes a result: neither a full disk nor a reader that went away may lose the other."""
    try:
        print_result(document, sys.stdout)
    finally:
        if json is not None:
            write_json(json, document)


def _parsed(line: str, ops: list[str]) -> Case:
    """The case of ``--case``, which must be one of the only op.

    Raises:
        ShipwayError: It is not.
    """
    from shipway.measure.op_bench import check_dims
    from shipway.ops.catalogue import OPS
    from shipway.ops.data import FILLS, LAYOUTS
    from shipway.ops.op import Case

    if len(ops) != 1:
        raise ShipwayError("--case needs --op with the one op it is a case of")
    op = OPS[ops[0]]
    try:
        case = Case.parse(line)
    except ValueError as error:
        raise ShipwayError(f"--case: {error}") from None
    if set(case.dims) != set(op.dims):
        raise ShipwayError(f"--case of {op.name} takes {', '.join(op.dims)}; given: {', '.join(case.dims) or 'none'}")
    check_dims(op, case.dims)
    for word, given, known in (("distribution", case.distribution, FILLS), ("layout", case.layout, LAYOUTS)):
        if given not in known:
            raise ShipwayError(f"--case: {word}={given} is none of {', '.join(known)}")
    if case.seed < 0:
        raise ShipwayError(f"--case: seed={case.seed} is not from 0")
    if not min(op.scales) <= case.scale <= max(op.scales):  # NaN is not either
        raise ShipwayError(
            f"--case: scale={case.scale:g} is not in {op.name}'s range {min(op.scales):g}..{max(op.scales):g}"
        )
    return case
