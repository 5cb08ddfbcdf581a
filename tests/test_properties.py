"""Every property of every op on every implementation and dtype, driven by the one table of the ops catalogue.

Hypothesis draws shapes, seed, scale, distribution and layout; a failure prints its case as one line that
``Case.parse`` reads. ``SHIPWAY_HYPOTHESIS=long`` (or ``pytest -m slow``) runs more examples and every head_dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from shipway.numerics.check import OpRunner
from shipway.numerics.strategies import cases, layouts
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case, KnownFailure, Op, Property

COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("ci", max_examples=12, derandomize=True, database=None, **COMMON)
settings.register_profile("long", max_examples=300, **COMMON)
PROFILE = os.environ.get("SHIPWAY_HYPOTHESIS", "ci")

# One compilation per head_dim and dtype, some ten seconds each: CI takes these, the long profile all of them.
COMPILED_HEAD_DIMS = {"f32": (64, 96), "bf16": (64, 80)}
MAX_STATIC_SHAPES = 6

REFERENCE = Property("reference", lambda run, case: run.against(run.inputs(case)))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """PyTorch's and MAX's pools both spin: on two cores they would stop each other for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def table() -> Iterator[Any]:
    for op in OPS.values():
        for row in op.implementations.values():
            for dtype in row.dtypes:
                runner = OpRunner(op, row, dtype)
                for prop in (REFERENCE, *op.properties):
                    yield pytest.param(runner, prop, id=f"{op.name}-{row.name}-{dtype}-{prop.name}")


def static(runner: OpRunner, profile: str) -> dict[str, tuple[int, ...]]:
    compiled = runner.implementation.compiled and profile == "ci"
    return {"head_dim": COMPILED_HEAD_DIMS[runner.dtype]} if compiled else {}


def known(runner: OpRunner, prop: Property) -> KnownFailure | None:
    failures = runner.implementation.known
    return next((k for k in failures if k.property == prop.name and runner.dtype in k.dtypes), None)


def holds(runner: OpRunner, prop: Property, profile: str) -> None:
    declared = known(runner, prop)
    if declared is not None:
        assert prop.check(runner, declared.case), (
            f"declared KNOWN ({declared.reason}) but it passes: take it off the list"
        )
        pytest.xfail(f"KNOWN: {declared.reason}")

    def check(case: Case) -> None:
        reason = prop.check(runner, case)
        assert not reason, f"{runner.op.name} {prop.name} [{case}]: {reason}"

    for case in prop.examples:
        check = example(case)(check)
    settings(settings.get_profile(profile))(given(cases(runner.op, static(runner, profile)))(check))()


@pytest.mark.parametrize(("runner", "prop"), list(table()))
def test_property(runner: OpRunner, prop: Property) -> None:
    holds(runner, prop, PROFILE)


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "prop"), list(table()))
def test_property_long(runner: OpRunner, prop: Property) -> None:
    holds(runner, prop, "long")


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(OpRunner(op, row, dtype), id=f"{op.name}-{row.name}-{dtype}")
        for op in OPS.values()
        for row in op.implementations.values()
        for dtype in row.dtypes
    ],
)
def test_strided_arguments_follow_the_declared_policy(runner: OpRunner) -> None:
    @settings(settings.get_profile(PROFILE))
    @given(cases(runner.op, static(runner, PROFILE)), layouts())
    def check(case: Case, layout: str) -> None:
        reason = runner.strided(Case(case.dims, case.seed, case.scale, case.distribution, layout))
        assert not reason, f"{runner.op.name} [{case}] {layout}: {reason}"

    check()


def test_compiled_shapes_stay_few() -> None:
    for op in OPS.values():
        static_dims = [dim for dim in op.dims.values() if dim.static]
        assert np.prod([len(dim.special) for dim in static_dims]) <= MAX_STATIC_SHAPES, op.name


def smallest(op: Op) -> Case:
    dims = {name: max(dim.low, 2) if dim.high > 1 else dim.low for name, dim in op.dims.items()}
    return Case({**dims, **({"head_dim": 64} if "head_dim" in dims else {})})


def wrong(change: Callable[[Any], Any]) -> Callable[[OpRunner, str], None]:
    """A bad call: one argument changed; it must be a ValueError, and the next good call must still work."""

    def check(runner: OpRunner, name: str) -> None:
        inputs = runner.inputs(smallest(runner.op))
        good = runner(inputs)

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            at = list(inputs).index(name)
            return lambda *arguments: function(*arguments[:at], change(arguments[at]), *arguments[at + 1 :])

        with pytest.raises(ValueError, match=name):
            OpRunner(runner.op, runner.implementation, runner.dtype, wrap)(inputs)
        again = runner(inputs)
        assert all(np.array_equal(again[key], good[key], equal_nan=True) for key in good)

    return check


def array_arguments() -> Iterator[Any]:
    for op in OPS.values():
        inputs = OpRunner(op, op.implementations["mojo"], "f32").inputs(smallest(op))
        for name, value in inputs.items():
            if isinstance(value, np.ndarray):
                yield pytest.param(OpRunner(op, op.implementations["mojo"], "f32"), name, id=f"{op.name}-{name}")


@pytest.mark.parametrize(("runner", "name"), list(array_arguments()))
def test_bad_array_is_a_value_error(runner: OpRunner, name: str) -> None:
    wrong(lambda x: x[None])(runner, name)
    wrong(lambda x: x.double())(runner, name)
    wrong(lambda x: None)(runner, name)


def bad_values() -> Iterator[Any]:
    table = (
        ("embedding", {"ids": [0, 2]}),
        ("embedding", {"ids": [-1, 0]}),
        ("lm_head", {"rows": [0, 2]}),
        ("lm_head", {"rows": [-1, 0]}),
        ("rms_norm", {"weight": "shorter"}),
        ("linear", {"w": "narrower"}),
        ("linear_residual", {"residual": "narrower"}),
        ("gate_up_silu", {"up": "shorter"}),
        ("qkv_rope_append", {"layer": 9}),
        ("qkv_rope_append", {"layer": -1}),
        ("qkv_rope_append", {"start": [-1, 0]}),
        ("qkv_rope_append", {"start": [10**6, 0]}),
        ("qkv_rope_append", {"offsets": [0, 1, 99]}),
        ("qkv_rope_append", {"table": "shorter"}),
        ("qkv_rope_append", {"wq": "shorter"}),
        ("attention_prefill", {"start": [10**6, 0]}),
        ("attention_prefill", {"offsets": [0, 4, 3]}),
        ("attention_prefill", {"window": -1}),
        ("attention_decode", {"layer": 9}),
        ("attention_decode", {"q": "narrower"}),
    )
    for op, change in table:
        yield pytest.param(op, change, id=f"{op}-{'-'.join(f'{k}={v}' for k, v in change.items())}")


@pytest.mark.parametrize(("name", "change"), list(bad_values()))
def test_bad_value_is_a_value_error(name: str, change: dict[str, Any]) -> None:
    op = OPS[name]
    runner = OpRunner(op, op.implementations["mojo"], "f32")
    inputs = runner.inputs(smallest(op))
    for key, value in change.items():
        if value == "shorter":
            inputs[key] = inputs[key][:1]
        elif value == "narrower":
            inputs[key] = inputs[key][..., :1]
        else:
            inputs[key] = np.array(value, np.int32) if isinstance(value, list) else value
    with pytest.raises(ValueError, match=name.split("_")[0]):
        runner(inputs)
