"""The SwiGLU MLP with its residual: ``residual + down @ (silu(gate @ x) * (up @ x))`` (Shazeer, GLU Variants Improve
Transformer, 2020).

Two kernels, ``gate_up_silu`` and ``linear_residual``; what stands between them is held in the activation dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops import tf32
from shipway.ops.data import fill, weights
from shipway.ops.gate_up_silu import swiglu, swiglu_in_tf32
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.linear import DIMS, FILLS, FORKED, product
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import poisoned_row_stays, repeatable, row_alone


def reference(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, residual: np.ndarray
) -> dict[str, Output]:
    """``x [T, K]``, ``gate [N, K]``, ``up [N, K]`` and ``down [K, N]`` in the activation dtype, ``residual [T, K]``
    float32 -> ``out [T, K]`` float32."""
    inner, inner_magnitude = swiglu(x, gate, up)
    out, size = product(inner, down)
    magnitude = product(inner_magnitude, np.abs(down))[0] + size + np.abs(residual)
    rounded = np.sqrt(product(np.square(inner), np.square(np.asarray(down, np.float64)))[0])
    inner_off = swiglu_in_tf32(x, gate, up)
    operands = product(inner_off + tf32.PRODUCT * (np.abs(inner) + inner_off), np.abs(down))[0]
    return {"out": Output(residual + out, "f32", magnitude, max(gate.shape), rounded, operands)}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, inner, hidden = (case.dims[name] for name in ("T", "N", "K"))
    return {
        "x": fill(rng, (tokens, hidden), case.distribution, case.scale),
        "gate": weights(rng, inner, hidden),
        "up": weights(rng, inner, hidden),
        "down": weights(rng, hidden, inner),
        "residual": fill(rng, (tokens, hidden), "normal", case.scale),
    }


def _within(inputs: Inputs, largest: float) -> None:
    # What lies between the products is of the square of x: a row of f16 would overflow there at a scale of hundreds.
    a, b = (product(inputs["x"], inputs[name])[0] for name in ("gate", "up"))
    peak = np.abs(a * b).max(axis=1, initial=0)
    too_large = peak > largest / 4
    inputs["x"][too_large] *= np.sqrt(largest / 4 / peak[too_large])[:, None].astype(np.float32)


def _torch(dtype: str) -> Callable[..., Any]:
    from torch.nn.functional import linear, silu

    return lambda x, gate, up, down, residual: residual + linear(silu(linear(x, gate)) * linear(x, up), down).float()


def _zero_x(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["x"][:] = 0
    return run.against(inputs, {"out": Output(inputs["residual"].astype(np.float64), "exact")})


OP = Op(
    name="mlp",
    summary="residual + down @ (silu(gate @ x) * (up @ x)), float32",
    # Every output carries the roundings of the same N values in between: with a few of them the cosine measures luck.
    dims={**DIMS, "N": Dim(64, 260, (65, 95, 96, 97, 127, 128, 129, 257))},
    distributions=FILLS,
    draw=_draw,
    within=_within,
    activations=frozenset({"x", "gate", "up", "down"}),
    reference=reference,
    result="out",
    strided=("x", "gate", "up", "down", "residual"),
    traps=(FORKED,),
    properties=(
        repeatable(),
        row_alone("out", "x", "residual"),
        poisoned_row_stays("out", "x"),
        Property("swiglu_of_zero_is_zero", _zero_x),
    ),
    implementations=rows(torch_row(_torch), *compiled_rows("mlp")),
)
