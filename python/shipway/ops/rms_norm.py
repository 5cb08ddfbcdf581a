"""RMSNorm of the residual stream: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill
from shipway.ops.implementations import HALF, compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import poisoned_row_stays, repeatable, row_alone


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis, float64.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        eps: The model's own epsilon, added to the mean square.
    """
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def reference(x: np.ndarray, weight: np.ndarray, eps: float) -> dict[str, Output]:
    """``x [T, K]`` float32, ``weight [K]`` float32 -> ``out [T, K]`` in the activation dtype."""
    out = rms_norm(x, weight, eps)
    # The only reduction is a sum of squares: its error, and every rounding after it, is relative to the output.
    return {"out": Output(out, "act", np.abs(out), x.shape[-1])}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, hidden = case.dims["T"], case.dims["K"]
    return {
        "x": fill(rng, (tokens, hidden), case.distribution, case.scale),
        "weight": (1 + 0.3 * rng.standard_normal(hidden)).astype(np.float32),
        "eps": float(rng.choice([1e-5, 1e-6])),
    }


def _torch(dtype: str) -> Callable[..., Any]:
    import torch

    act = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(act)

    return rms_norm


def _zero_row(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["x"][:] = 0
    return "" if not run(inputs)["out"].any() else "a zero row does not give zeros"


def _scale_invariant(run: Runner, case: Case) -> str:
    # Scaling x by 2^k and eps by 4^k scales numerator and denominator exactly, so the reference does not move.
    inputs = run.inputs(case)
    expected = reference(**inputs)
    return run.against({**inputs, "x": inputs["x"] * 16, "eps": inputs["eps"] * 256}, expected)


def _eps_decides(run: Runner, case: Case) -> str:
    # Rows far below sqrt(eps): the output is x / sqrt(eps) * weight, and a wrong or constant eps is off by a factor.
    inputs = run.inputs(case)
    tokens, hidden = inputs["x"].shape
    signs = np.where(np.arange(tokens * hidden).reshape(tokens, hidden) % 3, 1.0, -1.0)
    inputs["x"] = (1e-7 * signs).astype(np.float32)
    x = inputs["x"].astype(np.float64)
    for eps in (1e-5, 1e-6):
        expected = x * inputs["weight"] / np.sqrt(np.square(1e-7) + eps)
        output = Output(expected, "act", np.abs(expected), hidden)
        if reason := run.against({**inputs, "eps": eps}, {"out": output}):
            return f"eps {eps:g}: {reason}"
    return ""


def _large_values(run: Runner, case: Case) -> str:
    # 1e17: squares leave the range of f16 and of careless bf16, not of the float32 accumulator (documented to 1e18
    # over the root of K).
    inputs = run.inputs(case)
    inputs["x"] = np.full_like(inputs["x"], 1e17)
    expected = np.broadcast_to(inputs["weight"].astype(np.float64), inputs["x"].shape)
    return run.against(inputs, {"out": Output(expected, "act", np.abs(expected), inputs["x"].shape[-1])})


OP = Op(
    name="rms_norm",
    summary="x / sqrt(mean(x^2) + eps) * weight, residual stream in, activation dtype out",
    dims={
        "T": Dim(0, 70, (1, 2, 7, 8, 9, 63, 64, 65)),
        "K": Dim(1, 1100, (2, 15, 16, 17, 31, 33, 576, 960, 1039, 1040)),
    },
    distributions=("normal", "constant", "spike", "zero_row", "tiny"),
    draw=_draw,
    activations=frozenset(),
    reference=reference,
    result="out",
    strided=("x",),
    traps=(
        *(Case({"T": rows, "K": hidden}) for rows in (1, 3) for hidden in (576, 960)),
        Case({"T": 2, "K": 64}, distribution="zero_row"),
        Case({"T": 2, "K": 64}, scale=1e4),  # |x| far beyond 256, whose square float16 does not hold
        Case({"T": 257, "K": 1040}),  # enough for several threads
    ),
    properties=(
        repeatable(),
        row_alone("out", "x"),
        poisoned_row_stays("out", "x"),
        Property("zero_row_gives_zero", _zero_row),
        Property("scale_invariant", _scale_invariant),
        Property("eps_decides_small_rows", _eps_decides),
        Property("large_values_stay_finite", _large_values),
    ),
    implementations=rows(torch_row(_torch, dtypes=HALF), *compiled_rows("rms_norm")),
)
