"""The first half of the SwiGLU MLP: ``silu(x @ gate^T) * (x @ up^T)`` with ``silu(a) = a / (1 + exp(-a))``
(Shazeer, GLU Variants Improve Transformer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops import tf32
from shipway.ops.data import fill, weights
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.linear import DIMS, FILLS, FORKED, product
from shipway.ops.op import Case, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import poisoned_row_stays, repeatable, row_alone

SILU_LOWEST = -1.278464542761074
"""Where silu has its minimum: the root of ``1 + exp(-a) + a * exp(-a)``."""


def silu(a: np.ndarray) -> np.ndarray:
    """``a * sigmoid(a)``, float64, without overflow of the exponential."""
    return a * sigmoid(a)


def sigmoid(a: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-a))``, float64: the exponential is taken of ``-|a|`` only."""
    decayed = np.exp(-np.abs(a))
    return np.where(a >= 0, 1.0, decayed) / (1 + decayed)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``silu(x @ gate^T) * (x @ up^T)`` ``[T, N]`` and its magnitude for the a-priori bound, float64."""
    a, a_magnitude = product(x, gate)
    b, b_magnitude = product(x, up)
    s = sigmoid(a)
    slope = np.abs(s * (1 + a * (1 - s)))  # of silu: carries the error of the gate product to the output
    magnitude = slope * a_magnitude * np.abs(b) + np.abs(a * s) * b_magnitude
    # A float32 sigmoid under 2^-126 may be flushed to 0: that error, in units of float32's roundoff 2^-24.
    magnitude += np.abs(a * b) * 2.0**-102
    return a * s * b, magnitude


def swiglu_in_tf32(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """What rounding x, gate and up to tf32 does to ``silu(x @ gate^T) * (x @ up^T)`` at most, ``[T, N]`` float64.

    Such an error of the gate's product may span more than silu's bend, where a slope says nothing: silu falls to its
    minimum and rises from there, so that its largest changes are those to the ends of the span and to the minimum.
    """
    a, a_magnitude = product(x, gate)
    b, b_magnitude = product(x, up)
    off_a, off_b = tf32.PRODUCT * a_magnitude, tf32.PRODUCT * b_magnitude
    s = silu(a)
    low, high = a - off_a, a + off_a
    off_s = np.max([np.abs(silu(reached) - s) for reached in (low, high, np.clip(SILU_LOWEST, low, high))], axis=0)
    return off_s * (np.abs(b) + off_b) + np.abs(s) * off_b


def reference(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> dict[str, Output]:
    """``x [T, K]``, ``gate [N, K]``, ``up [N, K]`` -> ``out [T, N]``, all in the activation dtype."""
    out, magnitude = swiglu(x, gate, up)
    return {"out": Output(out, "act", magnitude, x.shape[-1], operands=swiglu_in_tf32(x, gate, up))}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, out, hidden = (case.dims[name] for name in ("T", "N", "K"))
    return {
        "x": fill(rng, (tokens, hidden), case.distribution, case.scale),
        "gate": weights(rng, out, hidden),
        "up": weights(rng, out, hidden),
    }


def _torch(dtype: str) -> Callable[..., Any]:
    from torch.nn import functional

    return lambda x, gate, up: functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


def _zero_gate(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["gate"][:] = 0
    return "" if not run(inputs)["out"].any() else "silu(0) * b is not 0"


def _linear_in_up(run: Runner, case: Case) -> str:
    # Doubling up is exact in every step, so the output doubles exactly wherever it is a normal number.
    inputs = run.inputs(case)
    once = run(inputs)["out"]
    doubled = run({**inputs, "up": 2 * inputs["up"]})["out"]
    normal = np.abs(once) > max(2.0**-120, 2.0**run.format.min_exponent)
    twice = run.round(2 * once[normal].astype(np.float64))
    return "" if np.array_equal(doubled[normal], twice) else "doubling up does not double the output"


def _saturates(run: Runner, case: Case) -> str:
    # Gates of +-1e4: silu is the identity above and 0 below, and neither exponential may turn into NaN.
    inputs = run.inputs(case)
    tokens, hidden = inputs["x"].shape
    out = len(inputs["gate"])
    inputs["x"] = np.ones((tokens, hidden), np.float32)
    inputs["gate"] = np.zeros((out, hidden), np.float32)
    inputs["gate"][:, 0] = run.round(np.where(np.arange(out) % 2, -1e4, 1e4))
    inputs["up"] = np.zeros((out, hidden), np.float32)
    inputs["up"][:, -1] = 1
    expected = np.maximum(inputs["gate"][:, 0], 0).astype(np.float64) * np.ones((tokens, 1))
    return run.against(inputs, {"out": Output(expected, "act", np.abs(expected), hidden)})


OP = Op(
    name="gate_up_silu",
    summary="silu(x @ gate^T) * (x @ up^T)",
    dims=DIMS,
    distributions=FILLS,
    draw=_draw,
    activations=frozenset({"x", "gate", "up"}),
    reference=reference,
    result="out",
    strided=("x", "gate", "up"),
    traps=(FORKED,),
    properties=(
        repeatable(),
        row_alone("out", "x"),
        poisoned_row_stays("out", "x"),
        Property("zero_gate_gives_zero", _zero_gate),
        Property("linear_in_up", _linear_in_up),
        Property("large_gates_saturate", _saturates),
    ),
    implementations=rows(torch_row(_torch), *compiled_rows("gate_up_silu")),
)
