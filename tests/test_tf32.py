"""The dtype tf32: what its bounds allow a product of rounded operands, and that they allow nothing coarser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shipway.numerics.campaign import Plan, properties, run_property
from shipway.numerics.check import OpRunner
from shipway.numerics.dtypes import BF16, F16, F32
from shipway.ops import tf32
from shipway.ops.catalogue import OPS
from shipway.ops.gate_up_silu import swiglu, swiglu_in_tf32

Rounding = Callable[[np.ndarray], np.ndarray]
ALL = ["reference", "identity_returns_x", "zero_padding_of_k_changes_nothing"]
NAMED = {prop.name: prop for prop in properties(OPS["linear"])}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def truncated(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & 0xFFFFE000).view(np.float32)


def ties_to_even(x: np.ndarray) -> np.ndarray:
    return replace(F16, min_exponent=F32.min_exponent, max_finite=F32.max_finite).round(x)


def red(dtype: str, rounding: Rounding) -> list[str]:
    """Properties that PyTorch's linear of rounded operands fails."""

    def wrap(linear: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: linear(*(torch.from_numpy(rounding(x.numpy())) for x in operands))

    runner = OpRunner(OPS["linear"], OPS["linear"].implementations["torch"], dtype, wrap)
    return [name for name in ALL if run_property(runner, NAMED[name], Plan(), 30, shrink=False)[0] is not None]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (tf32.operand, []),
        (lambda x: x, []),  # as a GEMV does
        (truncated, ALL),
        (ties_to_even, ["identity_returns_x"]),
        (BF16.round, ALL),
    ],
    ids=["nearest", "exact", "truncated", "ties to even", "bf16"],
)
def test_operands_are_rounded_to_nearest_or_not_at_all(rounding: Rounding, expected: list[str]) -> None:
    assert red("tf32", rounding) == expected


def test_f32_allows_no_rounded_operand() -> None:
    assert red("f32", tf32.operand) == ALL


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0, 1e4])
def test_bound_through_silu_holds_where_an_error_spans_its_bend(scale: float) -> None:
    rng = np.random.default_rng(0)
    for hidden in (1, 2, 3, 40):
        x, gate, up = (rng.standard_normal((rows, hidden)).astype(np.float32) for rows in (400, 300, 300))
        x *= scale
        error = np.abs(swiglu(*map(tf32.operand, (x, gate, up)))[0] - swiglu(x, gate, up)[0])
        bound = swiglu_in_tf32(x, gate, up)
        assert (error <= 1.001 * bound).all()  # 2 u and not 2 u + u^2
        assert (error > 0.1 * bound).any() or hidden > 3  # no more than it takes
