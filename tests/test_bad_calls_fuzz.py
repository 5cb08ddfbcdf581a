"""Any call of any op with one argument damaged: a ``ValueError`` that writes nothing, or a result that is right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from op_calls import LARGE, RUNNERS, SMALL, Arguments, arguments_of, assert_same_bits, call, callable_of
from shipway.ops.op import Op
from shipway.signature import SIGNATURES, check

NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def odd_strides(x: torch.Tensor, n: int) -> torch.Tensor:
    """The same values in a view that is not contiguous, or that starts or strides oddly but is."""
    if x.dim() == 0:
        return x
    match n % 4:
        case 0:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case 1:
            return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
        case 2:
            return torch.cat([torch.zeros_like(x[:1]), x])[1:]
        case _:
            return x.as_strided(x.shape, [1 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)])


def resized(x: torch.Tensor, n: int) -> torch.Tensor:
    """One axis one or more elements shorter or longer, or empty."""
    if x.dim() == 0:
        return x
    axis, to = n % x.dim(), (0, -1, 1, 7)[n // 7 % 4]
    size = max(x.shape[axis] + to, 0) if to else 0
    return x.repeat_interleave(2 + size // max(x.shape[axis], 1), axis).narrow(axis, 0, size).contiguous()


def renumbered(x: torch.Tensor, n: int) -> torch.Tensor:
    """One element replaced, or all of them in another order."""
    if not x.numel() or x.is_complex() or x.dtype == torch.bool:
        return x
    if n % 3 == 0:
        return x.flip(0)
    values = (-1, 0, 1, -(2**31), 2**31 - 1, x.numel(), 8, NAN if x.is_floating_point() else -2)
    value = values[n // 3 % len(values)]
    kind = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    x = x.clone()
    x.view(-1)[n % x.numel()] = value if math.isnan(value) else min(max(value, kind.min), kind.max)
    return x


ARRAY_FAULTS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "rank": lambda x, n: (x[None], x.flatten(), x.sum(), x[..., None])[n % 4],
    "dtype": lambda x, n: x.to(
        (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.int64,
            torch.int32,
            torch.bool,
            torch.complex64,
            torch.uint8,
        )[n % 9]
    ),
    "size": resized,
    "values": renumbered,
    "strides": odd_strides,
    "another": lambda x, n: (None, x.tolist(), x.float().numpy(), "tensor", 3, NAN, x.to("meta"), object, [x], {})[
        n % 10
    ],
    "kind": lambda x, n: (
        lambda: torch.nn.Parameter(x, x.is_floating_point()),
        lambda: x.to_sparse(),
        lambda: torch.nested.nested_tensor([x]),
        lambda: torch.complex(x.float(), x.float()).conj().imag,  # negated lazily: a bit of the view
        lambda: x.expand(2, *x.shape),
    )[n % 5](),
}
NUMBER_FAULTS = (
    *(
        NAN,
        INF,
        -INF,
        -1,
        -0.0,
        0,
        1,
        1.5,
        -1e-30,
        1e-40,
        1e39,
        1e300,
        2**31 - 1,
        2**31,
        2**32,
        2**63,
        2**100,
        -(2**31),
    ),
    *(True, None, "1", [1], 1j, np.float32(1), np.int64(1), torch.tensor(1), torch.ones(2), float, b"1"),
)


# What a row refuses on top of the common check: stock MAX's RMSNorm takes epsilon as a constant of the graph.
LIMITS = {"max": "eps .* is none of"}

# Scores so far apart that float32 rounds them away are neither a bad call nor a test of a good one.
LARGEST = {"scale": 1e3, "temperature": 1e30}


def damaged(good: Arguments, at: int, fault: str, n: int) -> Arguments:
    """Gives one argument the fault; ``swap`` exchanges it with another."""
    names = list(good)
    name = names[at % len(names)]
    value = good[name]
    if fault == "swap":
        other = names[n % len(names)]
        return good | {name: good[other], other: value}
    if isinstance(value, torch.Tensor):
        return good | {name: ARRAY_FAULTS[fault](value, n)}
    return good | {name: NUMBER_FAULTS[n % len(NUMBER_FAULTS)]}


def plain(op: Op, given: Arguments) -> Arguments:
    """Arguments as the references take them: activations in float32, the others as they are stored."""

    def array(name: str, value: torch.Tensor) -> np.ndarray:
        value = value.detach().clone()
        return (value.float() if name in op.activations else value).numpy()

    return {name: array(name, value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def settle(name: str, good: Arguments, at: int, fault: str, n: int) -> None:
    """Makes a call that may be wrong: it is a ``ValueError`` that writes nothing, or its result passes the verdict."""
    runner = RUNNERS[name]
    given = damaged(good, at, fault, n)
    cache = good["cache"].clone() if "cache" in good else None
    said = refusal(check, runner.op.name, runner.dtype, list(given.values()), head_dim=64, strided="handled")
    inputs = {} if said else plain(runner.op, given)
    result: list[Any] = []
    refused = refusal(lambda: result.append(callable_of(name)(*given.values())))
    if refused:
        own = LIMITS.get(runner.implementation.name)
        assert refused == said or "contiguous" in refused or (own and re.search(own, refused))
        assert refused.startswith(runner.op.name)
        assert cache is None or torch.equal(good["cache"], cache), "a refused call wrote to the cache"
        return
    assert not said, f"a wrong call ran: {said}"
    if all(inputs[key] <= largest for key, largest in LARGEST.items() if isinstance(inputs.get(key), int | float)):
        reason = runner.judge(inputs, runner.outputs(plain(runner.op, given), *result))
        assert not reason, reason


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the ``ValueError`` that a call raises, empty when it raises none."""
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*NumPy array is not writable.*:UserWarning")
@pytest.mark.parametrize("examples", [150, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNNERS)
def test_any_call_is_a_value_error_or_right_and_leaves_the_row_working(name: str, examples: int) -> None:
    runner = RUNNERS[name]
    op = runner.op.name
    before = {size["T"]: call(name, arguments_of(op, runner.dtype, size)) for size in (SMALL, LARGE)}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.sampled_from((SMALL, LARGE)),
        st.integers(0, 2**10),
        st.integers(0, len(SIGNATURES[op]) - 1),
        st.sampled_from((*ARRAY_FAULTS, "swap")),
        st.integers(0, 2**10),
    )
    def any_call(size: Mapping[str, int], seed: int, at: int, fault: str, n: int) -> None:
        with torch.no_grad():
            settle(name, arguments_of(op, runner.dtype, size, seed), at, fault, n)
            assert_same_bits(call(name, arguments_of(op, runner.dtype, size)), before[size["T"]])

    any_call()
