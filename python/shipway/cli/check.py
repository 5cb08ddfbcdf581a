"""``shipway check``."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.cli.options import Json, comma_list
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.result import write_json

if TYPE_CHECKING:
    from shipway.ops.op import Case


def check(
    op: Annotated[str, typer.Option(help="Ops, separated by commas; * and ? match; all if not given.")] = "*",
    impl: Annotated[str, typer.Option(help="Implementations, likewise.")] = "*",
    dtype: Annotated[str, typer.Option(help="Dtypes, likewise.")] = "*",
    examples: Annotated[
        int | None,
        typer.Option(
            help="Drawn cases per line, shared out among its properties, each at least 5, beside the pinned ones: 200; "
            "with --mutants per property: 12."
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
    from shipway.ops.catalogue import OPS
    from shipway.report.checks import print_lines, print_mutants

    if examples is None:
        examples = 12 if mutants else 200
    for option, number, least in (("--examples", examples, 1), ("--seed", seed, 0)):
        if number < least:
            raise ShipwayError(f"{option} must be from {least}, not {number}")
    ops = _matching(op, list(OPS), "--op")
    if mutants:
        if impl != "*" or dtype != "*" or case is not None:
            raise ShipwayError(
                "--mutants takes --op, --examples, --seed and --json: variants are of PyTorch's f32 rows"
            )
        with progress() as show:
            document = checks.check_mutants(ops, examples, seed, show)
        code, print_result = checks.mutants_exit_code(document), print_mutants
    else:
        rows = [row for name in ops for row in OPS[name].implementations.values()]
        names = _matching(impl, list(dict.fromkeys(row.name for row in rows)), "--impl")
        dtypes = _matching(dtype, list(dict.fromkeys(name for row in rows for name in row.dtypes)), "--dtype")
        todo = [(o.name, row.name, d) for o, row, d in chosen(ops, names, dtypes)]
        if not todo:
            raise ShipwayError(f"no implementation among {impl} runs {op} in {dtype}")
        plan = Plan(examples, seed, case=None if case is None else _parsed(case, ops))
        with progress() as show:
            document = checks.check_lines(todo, plan, show)
        code, print_result = checks.lines_exit_code(document), print_lines
    try:  # neither a file that cannot be written nor a reader that went away may lose the other
        print_result(document, sys.stdout)
    finally:
        if json is not None:
            write_json(json, document)
    raise typer.Exit(code)


def _matching(patterns: str, names: list[str], option: str) -> list[str]:
    """The names that a list of patterns selects, in the catalogue's order.

    Raises:
        ShipwayError: A pattern selects nothing.
    """
    wanted = comma_list(patterns)
    idle = [pattern for pattern in wanted if not any(fnmatchcase(name, pattern) for name in names)]
    if idle or not wanted:
        raise ShipwayError(f"{option} {', '.join(idle) or repr(patterns)} is none of {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


_LARGEST_SCALE = 1e30  # inputs stay finite in float32


def _parsed(line: str, ops: list[str]) -> Case:
    """The case of ``--case``, which must be one of the only op.

    Raises:
        ShipwayError: It is not.
    """
    from shipway.ops.catalogue import OPS
    from shipway.ops.data import FILLS, LAYOUTS
    from shipway.ops.op import Case

    if len(ops) != 1:
        raise ShipwayError("--case needs --op with the one op it is a case of")
    dims = OPS[ops[0]].dims
    try:
        case = Case.parse(line)
    except ValueError as error:
        raise ShipwayError(f"--case: {error}") from None
    if set(case.dims) != set(dims):
        raise ShipwayError(f"--case of {ops[0]} takes {', '.join(dims)}, not {', '.join(case.dims) or 'no dims'}")
    for name, value in case.dims.items():
        if not dims[name].low <= value <= dims[name].high:
            raise ShipwayError(f"--case: {name}={value} is not in {dims[name].low}..{dims[name].high}")
    for word, given, known in (("distribution", case.distribution, FILLS), ("layout", case.layout, LAYOUTS)):
        if given not in known:
            raise ShipwayError(f"--case: {word}={given} is none of {', '.join(known)}")
    if case.seed < 0:
        raise ShipwayError(f"--case: seed={case.seed} is not from 0")
    if not 0 < case.scale <= _LARGEST_SCALE:  # NaN is not either
        raise ShipwayError(f"--case: scale={case.scale:g} is not above 0 and at most {_LARGEST_SCALE:g}")
    return case
