"""Matrix products with a weight ``[N, K]``: ``linear`` (one row is a GEMV, more are a GEMM) and ``linear_residual``.

Both return float32: the product is accumulated in float32 and, in ``linear_residual``, added to the residual stream,
which is float32 in every dtype. The output and the down projection are ``linear_residual``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops import tf32
from shipway.ops.data import fill, weights
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import poisoned_row_stays, repeatable, row_alone

DIMS = {
    "T": Dim(0, 70, (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 65)),
    "N": Dim(1, 200, (2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 97)),
    "K": Dim(1, 1100, (2, 15, 16, 17, 31, 33, 63, 65, 576, 960, 1039, 1040)),
}
GEMV, GEMM = (Case({"T": rows, "N": 97, "K": 1040}) for rows in (1, 5))  # neither N nor K is a multiple of a tile
FORKED = Case({"T": 65, "N": 97, "K": 1040})  # enough for several threads, one of its rows for one only
TILES = Case({"T": 65, "N": 129, "K": 40})  # more large tiles than a simulated launch has blocks: one follows another
TRAPS = (
    GEMV,
    GEMM,
    FORKED,
    TILES,
    *(Case({"T": rows, "N": 65, "K": hidden}) for rows in (1, 9) for hidden in (576, 960)),
)
FILLS = ("normal", "uniform", "constant", "spike", "zero_row", "alternating", "tiny")


def product(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``x @ w^T`` and ``|x| @ |w|^T``, float64: ``x [..., K]``, ``w [N, K]`` -> two ``[..., N]``."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x @ w.T, np.abs(x) @ np.abs(w).T


def linear_reference(x: np.ndarray, w: np.ndarray) -> dict[str, Output]:
    """``x [T, K]``, ``w [N, K]`` in the activation dtype -> ``out [T, N]`` float32."""
    out, magnitude = product(x, w)
    return {"out": Output(out, "f32", magnitude, x.shape[-1])}


def linear_residual_reference(x: np.ndarray, w: np.ndarray, residual: np.ndarray) -> dict[str, Output]:
    """``x [T, K]``, ``w [N, K]`` in the activation dtype, ``residual [T, N]`` float32 -> ``out [T, N]`` float32."""
    out, magnitude = product(x, w)
    operands = tf32.PRODUCT * magnitude
    return {"out": Output(residual + out, "f32", magnitude + np.abs(residual), x.shape[-1], operands=operands)}


def _draw_linear(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, out, hidden = (case.dims[name] for name in ("T", "N", "K"))
    return {"x": fill(rng, (tokens, hidden), case.distribution, case.scale), "w": weights(rng, out, hidden)}


def _draw_residual(case: Case, rng: np.random.Generator) -> Inputs:
    inputs = _draw_linear(case, rng)
    return {**inputs, "residual": fill(rng, (case.dims["T"], case.dims["N"]), "normal", case.scale)}


def _torch_linear(dtype: str) -> Callable[..., Any]:
    from torch.nn.functional import linear

    return lambda x, w: linear(x, w).float()


def _torch_residual(dtype: str) -> Callable[..., Any]:
    from torch.nn.functional import linear

    return lambda x, w, residual: residual + linear(x, w).float()


def _identity(run: Runner, case: Case) -> str:
    # Products with 0 and 1 are exact, so multiplying by the identity must return x itself, tail included.
    inputs = run.inputs(case)
    inputs["w"] = np.eye(inputs["x"].shape[1], dtype=np.float32)
    if run.dtype == "tf32":
        # A GEMM returns x as it rounds operands, ties included; few rows take a GEMV, which does not round them.
        inputs["x"][:, ::7] = 1 + tf32.ROUNDOFF
        if np.array_equal(run(inputs)["out"], tf32.operand(inputs["x"])):
            return ""
    return run.against(inputs, {"out": Output(inputs["x"].astype(np.float64), "exact")})


def _padded(run: Runner, case: Case) -> str:
    # K zeros appended change no sum; a wrong tail of K does not survive both lengths.
    inputs = run.inputs(case)
    pad = 1 + case.seed % 40
    padded = {name: np.pad(inputs[name], ((0, 0), (0, pad))) for name in ("x", "w")}
    return run.against(padded, linear_reference(**inputs))


def _columns_alone(run: Runner, case: Case) -> str:
    # Output columns depend on their own weight row only: a wrong tail of N or a tile written twice shows here.
    inputs = run.inputs(case)
    cut = 1 + case.seed % inputs["w"].shape[0]
    return run.same({**inputs, "w": inputs["w"][:cut]}, {"out": run(inputs)["out"][:, :cut]})


def _largest(run: Runner, case: Case) -> str:
    # The largest finite value passes through a product; two of them leave float32, and nothing else does.
    inputs = run.inputs(case.with_dims(K=max(case.dims["K"], 2)))
    largest = tf32.LARGEST if run.dtype == "tf32" else run.format.max_finite
    inputs["x"][:] = 0
    inputs["w"][:] = 0
    inputs["x"][:, [0, -1]] = largest
    inputs["w"][:, 0] = 1
    inputs["w"][1::2, -1] = 1
    expected = np.full((len(inputs["x"]), len(inputs["w"])), largest, np.float64)
    expected[:, 1::2] = np.inf if 2 * largest > float(np.finfo(np.float32).max) else 2 * largest
    return run.against(inputs, {"out": Output(expected, "exact")})


def _subnormal_row_alone(run: Runner, case: Case) -> str:
    # Whether subnormals count as zero must not depend on how many threads share the work.
    if not run.bitwise:
        return ""
    inputs = run.inputs(case)
    shape = inputs["x"].shape
    inputs["x"] = run.round(np.random.default_rng(case.seed).standard_normal(shape) * 2.0**-125)
    together = run(inputs)["out"]
    for row in range(0, len(together), 16):
        alone = {**inputs, "x": inputs["x"][row : row + 1]}
        if reason := run.same(alone, {"out": together[row : row + 1]}):
            return f"row {row} alone: {reason}"
    return ""


def _zero_product(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["x"][:] = 0
    return run.against(inputs, {"out": Output(inputs["residual"].astype(np.float64), "exact")})


LINEAR = Op(
    name="linear",
    summary="x @ w^T, GEMV for one row, GEMM for more",
    dims=DIMS,
    distributions=FILLS,
    draw=_draw_linear,
    activations=frozenset({"x", "w"}),
    reference=linear_reference,
    result="out",
    strided=("x", "w"),
    traps=TRAPS,
    properties=(
        repeatable(),
        row_alone("out", "x", examples=(GEMM,)),
        poisoned_row_stays("out", "x"),
        Property("identity_returns_x", _identity),
        Property("zero_padding_of_k_changes_nothing", _padded),
        Property("columns_alone", _columns_alone),
        Property("subnormal_row_alone", _subnormal_row_alone, (FORKED,)),
        Property("largest_values_overflow_only_in_sum", _largest),
    ),
    implementations=rows(torch_row(_torch_linear), *compiled_rows("linear")),
)

LINEAR_RESIDUAL = Op(
    name="linear_residual",
    summary="residual + x @ w^T, float32",
    dims=DIMS,
    distributions=FILLS,
    draw=_draw_residual,
    activations=frozenset({"x", "w"}),
    reference=linear_residual_reference,
    result="out",
    strided=("x", "w", "residual"),
    traps=TRAPS,
    properties=(
        repeatable(),
        row_alone("out", "x", "residual"),
        poisoned_row_stays("out", "x"),
        Property("zero_x_returns_the_residual", _zero_product),
    ),
    implementations=rows(torch_row(_torch_residual), *compiled_rows("linear_residual")),
)
