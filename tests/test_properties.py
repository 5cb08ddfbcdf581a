"""Every property of every op on every implementation and dtype, driven by the one table of the ops catalogue.

A failure names its smallest case and the ``shipway check`` command that runs it again. ``-m slow`` draws more cases, of
every head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from held_lines import assert_holds
from shipway.numerics.campaign import FEWEST, Line, Plan, chosen, properties, run_line, run_property
from shipway.numerics.check import OpRunner
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case, Implementation, KnownFailure, Op, Property

# One compilation per head_dim and dtype, some ten seconds each: CI takes these, the long profile all of them.
HEAD_DIMS = {"f32": (64, 96), "bf16": (64, 80), "f16": (64,)}
PER_PROPERTY = {"ci": 12, "long": 300}
OURS = ("torch", "mojo")  # the base of every verdict, and what is developed here; in CI others get half the cases
MAX_STATIC_SHAPES = 6

LINES = [
    pytest.param(op, row, dtype, id=f"{op.name}-{row.name}-{dtype}")
    for op, row, dtype in chosen(list(OPS), [], [])
    if row.device == "cpu"  # the simulated ones are in test_simt_rows.py
]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def holds(op: Op, row: Implementation, dtype: str, profile: str) -> Line:
    ci = profile == "ci"
    each = PER_PROPERTY[profile] // (2 if ci and row.name not in OURS else 1)
    plan = Plan(examples=each * len(properties(op)), head_dims=HEAD_DIMS[dtype] if ci else ())
    line = run_line(op, row, dtype, plan)
    assert_holds(line)
    return line


@pytest.mark.parametrize(("op", "row", "dtype"), LINES)
def test_properties_hold(op: Op, row: Implementation, dtype: str) -> None:
    assert holds(op, row, dtype, "ci").examples >= FEWEST


@pytest.mark.slow
@pytest.mark.parametrize(("op", "row", "dtype"), LINES)
def test_properties_hold_over_many_cases(op: Op, row: Implementation, dtype: str) -> None:
    shapes = holds(op, row, dtype, "long").shapes
    assert shapes <= MAX_STATIC_SHAPES or row.compilations is not None  # where one costs a fraction of a second


def test_compiled_shapes_stay_few() -> None:
    for op in OPS.values():
        static_dims = [dim for dim in op.dims.values() if dim.static]
        assert np.prod([len(dim.special) for dim in static_dims]) <= MAX_STATIC_SHAPES, op.name


LINEAR = OPS["linear"]
SMALL = Case({"T": 2, "N": 3, "K": 4})


def refuse(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


def test_an_exception_is_a_failure_with_its_case() -> None:
    row = replace(LINEAR.implementations["torch"], make=lambda dtype, head_dim: refuse)
    line = run_line(LINEAR, row, "f32", Plan(examples=8, case=SMALL))
    assert line.verdict == "FAIL"
    assert {failure.reason for failure in line.failures} == {"RuntimeError: no such kernel"}
    assert {failure.case for failure in line.failures} == {str(SMALL)}


def test_a_row_that_cannot_be_made_is_one_failure_without_a_case() -> None:
    row = replace(LINEAR.implementations["torch"], make=refuse)
    (failure,) = run_line(LINEAR, row, "f32", Plan(examples=8)).failures
    assert (failure.property, failure.case, failure.reason) == ("compilation", "", "RuntimeError: no such kernel")


def test_the_figures_of_a_failed_line_are_those_of_its_failure() -> None:
    def off(dtype: str, head_dim: int) -> Any:
        return lambda x, w: (x.float() @ w.float().T) * 1.01

    line = run_line(LINEAR, replace(LINEAR.implementations["torch"], make=off), "f32", Plan(examples=8))
    assert line.verdict == "FAIL"
    assert line.max_ulps > 1e4
    assert line.cosine_diff > 1e-5


def test_a_failure_is_shrunk_to_its_smallest_case() -> None:
    seen = Property("small", lambda run, case: "too many rows" if case.dims["T"] > 6 else "")
    failure, ran = run_property(OpRunner(LINEAR, LINEAR.implementations["torch"], "f32"), seen, Plan(), 100)
    assert failure is not None
    assert Case.parse(failure.case) == Case({"T": 7, "N": 1, "K": 1})
    assert len(ran) > 7


def test_a_declared_failure_is_known_and_one_that_passes_is_red() -> None:
    known = KnownFailure("reference", "made up", SMALL, ("f32",))
    row = replace(LINEAR.implementations["torch"], known=(known,))
    line = run_line(LINEAR, row, "f32", Plan(examples=8))
    assert line.verdict == "FAIL"
    assert [failure.property for failure in line.failures] == ["reference"]
    assert "take it off the list" in line.failures[0].reason

    def off(dtype: str, head_dim: int) -> Any:
        return lambda x, w: (x.float() @ w.float().T) * 1.01

    wrong = replace(row, make=off, known=(known,))
    found = run_line(LINEAR, wrong, "f32", Plan(examples=8))
    assert [failure.property for failure in found.known] == ["reference"]


def test_a_missing_package_is_said_with_its_remedy() -> None:
    row = replace(LINEAR.implementations["torch"], requires=("no_such_package",), install="no-such-package==1")
    line = run_line(LINEAR, row, "f32", Plan())
    assert line.verdict == "not run"
    assert "pip install no-such-package==1" in line.reason


def test_the_same_seed_draws_the_same_cases() -> None:
    runner = OpRunner(LINEAR, LINEAR.implementations["torch"], "f32")
    draws = [run_property(runner, Property("any", lambda *_: ""), Plan(seed=seed), 20)[1] for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_each_property_draws_cases_of_its_own() -> None:
    runner = OpRunner(LINEAR, LINEAR.implementations["torch"], "f32")
    first, second = (set(map(str, run_property(runner, Property(name, lambda *_: ""), Plan(), 20)[1])) for name in "ab")
    assert len(first & second) <= 2


def test_a_declared_failure_is_known_as_a_case_alone_too() -> None:
    known = KnownFailure("reference", "made up", SMALL, ("f32",))
    row = replace(LINEAR.implementations["torch"], known=(known,))
    wrong = replace(row, make=lambda dtype, head_dim: lambda x, w: (x.float() @ w.float().T) * 1.01)
    line = run_line(LINEAR, wrong, "f32", Plan(case=SMALL))
    assert "reference" not in [failure.property for failure in line.failures]
    assert [failure.property for failure in line.known] == ["reference"]


def test_our_own_kernels_have_no_known_failures_and_are_bitwise() -> None:
    for op in OPS.values():
        assert all(row.known == () for name, row in op.implementations.items() if name.startswith("mojo"))
        assert "mojo" not in op.implementations or op.implementations["mojo"].bitwise
