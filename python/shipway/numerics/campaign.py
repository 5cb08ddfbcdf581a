"""A campaign: every property of an op, on one implementation in one dtype, over drawn cases; one :class:`Line` each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, Phase, given, seed, settings

from shipway.errors import ShipwayError, this_python
from shipway.numerics.check import OpRunner
from shipway.numerics.strategies import cases
from shipway.ops.catalogue import OPS
from shipway.ops.op import PER_HEAD_DIM, Case, Implementation, Op, Property

EXAMPLES = 200
"""Cases of a line where a plan gives no number."""
SIMULATED_EXAMPLES = 20
"""The same on a simulated device, where a case takes up to seconds."""
FEWEST = 5
"""Cases a property is given at least, however many share the examples of a line."""

REFERENCE = Property("reference", lambda run, case: run.against(run.inputs(case)))
STRIDED = Property("strided_arguments_follow_the_policy", lambda run, case: run.strided(case))


def properties(op: Op) -> tuple[Property, ...]:
    """All that an op's implementations are held to: the reference, the strided policy, the op's own properties."""
    return (replace(REFERENCE, examples=op.traps), STRIDED, *op.properties)


@dataclass(frozen=True)
class Failure:
    """One property that did not hold.

    Attributes:
        property: Its name.
        case: Smallest case found, as ``Case.parse`` reads it; empty where the implementation never ran.
        reason: What was wrong, one line.
    """

    property: str
    case: str
    reason: str


@dataclass(frozen=True)
class Line:
    """What a campaign found for one op, implementation and dtype.

    Attributes:
        op: Name of the op.
        implementation: Name of its row.
        dtype: Dtype under test.
        verdict: ``"PASS"``; ``"KNOWN"`` (all held but the declared failures); ``"FAIL"``; ``"not run"``.
        bitwise: Whether rows and sequences are claimed independent, bit for bit, of those beside them.
        strided: What the row does with non-contiguous arguments.
        examples: Cases run.
        shapes: Shapes compiled for in this line: counted where each size costs a compilation, else the different
            static shapes among the cases, 1 where all sizes are symbolic; 0 where nothing is compiled.
        max_ulps: Largest error of any output in ulps of its dtype, failures included, declared ones not.
        cosine_diff: Largest cosine difference, likewise.
        failures: Properties that did not hold.
        known: Declared failures that were seen to fail.
        reason: Why it was not run, and what would make it run.
    """

    op: str
    implementation: str
    dtype: str
    verdict: str
    bitwise: bool
    strided: str
    examples: int = 0
    shapes: int = 0
    max_ulps: float = 0.0
    cosine_diff: float = 0.0
    failures: tuple[Failure, ...] = ()
    known: tuple[Failure, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """How cases are drawn.

    Attributes:
        examples: Cases of a line, shared out among the properties; None for :data:`EXAMPLES`, and
            :data:`SIMULATED_EXAMPLES` on simulated devices.
        seed: Seed of the draw, with which every property draws cases of its own.
        head_dims: Values of head_dim to draw for implementations that compile one at a time; all of the op's if empty.
        case: The only case to run, instead of drawn ones.
    """

    examples: int | None = None
    seed: int = 0
    head_dims: tuple[int, ...] = ()
    case: Case | None = None


class _Broken(Exception):
    """A property does not hold."""


def missing(row: Implementation, dtype: str = "f32") -> str:
    """What has to be installed for a row, or be in the machine, as one line; empty when nothing is."""
    if absent := [name for name in row.requires if find_spec(name) is None]:
        return f"{' and '.join(absent)} not installed: {this_python(f'-m pip install {row.install}')}"
    return row.absent(dtype)


def chosen(ops: list[str], implementations: list[str], dtypes: list[str]) -> Iterator[tuple[Op, Implementation, str]]:
    """The lines of a campaign, implementation by implementation; an empty list means all."""
    names = implementations or list(dict.fromkeys(name for op in OPS.values() for name in op.implementations))
    for name in names:
        for op in OPS.values():
            row = op.implementations.get(name)
            if row is None or (ops and op.name not in ops):
                continue
            yield from ((op, row, dtype) for dtype in row.dtypes if not dtypes or dtype in dtypes)


def run_line(op: Op, row: Implementation, dtype: str, plan: Plan, on: Watch = lambda _: None) -> Line:
    """Runs every property of one line."""
    line = Line(op.name, row.name, dtype, "PASS", row.bitwise, row.strided)
    if reason := missing(row, dtype):
        return replace(line, verdict="not run", reason=reason)
    runner = OpRunner(op, row, dtype)
    todo = properties(op)
    cases_of_line = plan.examples or (SIMULATED_EXAMPLES if row.device == "simulated" else EXAMPLES)
    share = max(FEWEST, -(-cases_of_line // len(todo)))
    failures: list[Failure] = []
    known: list[Failure] = []
    shapes: set[tuple[int, ...]] = set()
    compiled_before = row.compilations() if row.compilations is not None else 0
    examples = 0
    for prop in todo:
        found, seen, ran = run_declared(runner, prop, plan, share, on)
        failures += [] if found is None else [found]
        known += [] if seen is None else [seen]
        examples += len(ran)
        shapes |= {static_shape(op, case) for case in ran}
        if failures and not failures[-1].case:
            break  # the implementation cannot be made: every other property would say the same
    return replace(
        line,
        verdict="FAIL" if failures else "KNOWN" if known else "PASS",
        examples=examples,
        shapes=_compiled_shapes(row, shapes, compiled_before),
        max_ulps=runner.max_ulps,
        cosine_diff=runner.cosine_diff,
        failures=tuple(failures),
        known=tuple(known),
    )


def smallest(op: str) -> Case:
    """A small case of an op, with something in every dim."""
    dims = {name: max(dim.low, min(2, dim.high)) for name, dim in OPS[op].dims.items()}
    return Case({**dims, **({"head_dim": 64} if "head_dim" in dims else {})})


def run_declared(
    runner: OpRunner, prop: Property, plan: Plan, examples: int, on: Watch = lambda _: None
) -> tuple[Failure | None, Failure | None, list[Case]]:
    """Runs one property; one that the row declares to fail is run on the declared case alone, and must fail there.

    Returns:
        The failure that counts, if any; the declared one, if it was seen; the cases that ran.
    """
    row = runner.implementation
    declared = next((k for k in row.known if k.property == prop.name and runner.dtype in k.dtypes), None)
    if declared is None:
        found, ran = run_property(runner, prop, plan, examples, on=on)
        return found, None, ran
    apart = OpRunner(runner.op, row, runner.dtype)  # its error is none of the line's
    found, ran = run_property(apart, prop, replace(plan, case=plan.case or declared.case), 1, on=on)
    if found is not None:
        return None, replace(found, reason=f"{declared.reason}: {found.reason}"), ran
    if plan.case is not None:
        return None, None, ran
    stale = f"declared KNOWN ({declared.reason}) but it passes: take it off the list"
    return Failure(prop.name, str(declared.case), stale), None, ran


def _compiled_shapes(row: Implementation, static: set[tuple[int, ...]], before: int) -> int:
    if row.compilations is not None:
        return row.compilations() - before
    return len(static) if row.compiled == PER_HEAD_DIM else int(bool(row.compiled))


def static_shape(op: Op, case: Case) -> tuple[int, ...]:
    """The dims of a case that a compiled implementation fixes."""
    return tuple(case.dims[name] for name, dim in op.dims.items() if dim.static)


Watch = Callable[[tuple[str, str]], None]
"""Is told the property and the case that are about to run."""


def run_property(
    runner: OpRunner, prop: Property, plan: Plan, examples: int, shrink: bool = True, on: Watch = lambda _: None
) -> tuple[Failure | None, list[Case]]:
    """Runs one property on ``examples`` drawn and on its pinned cases, or on the plan's only case.

    Returns:
        The smallest failure, or without ``shrink`` the first, if any, and the cases that ran.
    """
    ran: list[Case] = []
    broken: list[Failure] = []

    def check(case: Case) -> None:
        ran.append(case)
        on((prop.name, str(case)))
        try:
            reason = prop.check(runner, case)
        except Exception as error:
            reason = _one_line(error)
        if reason:
            broken.append(Failure(prop.name, str(case), reason))
            raise _Broken

    try:  # before anything is drawn: hypothesis would compile broken sources again for each smaller case
        some = (plan.head_dims or (64,))[0]
        runner.implementation.make(runner.dtype, plan.case.dims.get("head_dim", some) if plan.case else some)
    except Exception as error:
        return Failure("compilation", "", str(error) if isinstance(error, ShipwayError) else _one_line(error)), ran
    head_dims = plan.head_dims if runner.implementation.compiled == PER_HEAD_DIM else ()
    pinned = [case for case in prop.examples if not head_dims or case.dims.get("head_dim", head_dims[0]) in head_dims]
    try:
        if plan.case is None and not prop.pinned:  # before the pinned ones, which cannot be made smaller
            drawn = cases(runner.op, {"head_dim": head_dims} if head_dims else {}, laid_out=prop is STRIDED)
            own = crc32(f"{runner.op.name} {prop.name}".encode()) + plan.seed  # else every property had the same cases
            seed(own)(_configured(examples, shrink)(given(drawn)(check)))()
        for case in pinned if plan.case is None else [plan.case]:
            check(case)
    except Exception:
        if not broken:
            raise
        return broken[-1], ran
    return None, ran


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _configured(examples: int, shrink: bool) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
