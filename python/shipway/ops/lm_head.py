"""Logits of chosen rows: ``x[rows] @ w^T``, float32, so that a prefill pays for last tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill, weights
from shipway.ops.implementations import compiled_rows, torch_row
from shipway.ops.implementations import rows as table
from shipway.ops.linear import FILLS, product
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable, row_alone


def reference(x: np.ndarray, w: np.ndarray, rows: np.ndarray) -> dict[str, Output]:
    """``x [T, K]``, ``w [V, K]`` in the activation dtype, ``rows [R]`` int32 -> ``out [R, V]`` float32."""
    out, magnitude = product(x[rows], w)
    return {"out": Output(out, "f32", magnitude, x.shape[-1])}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, vocab, hidden, chosen = (case.dims[name] for name in ("T", "V", "K", "R"))
    return {
        "x": fill(rng, (tokens, hidden), case.distribution, case.scale),
        "w": weights(rng, vocab, hidden),
        "rows": rng.integers(0, tokens, chosen).astype(np.int32),
    }


def _torch(dtype: str) -> Callable[..., Any]:
    from torch.nn.functional import linear

    return lambda x, w, rows: linear(x[rows.long()], w).float()


def _other_rows_unread(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    clean = run(inputs)["out"]
    unread = np.setdiff1d(np.arange(len(inputs["x"])), inputs["rows"])
    inputs["x"][unread] = np.nan
    return "" if np.array_equal(run(inputs)["out"], clean) else "rows that were not asked for change the logits"


OP = Op(
    name="lm_head",
    summary="x[rows] @ w^T, float32 logits",
    dims={
        "T": Dim(1, 40, (2, 7, 9)),
        "V": Dim(1, 300, (2, 15, 17, 63, 65, 257)),
        "K": Dim(1, 1100, (2, 15, 17, 33, 576, 960, 1040)),
        "R": Dim(0, 10, (1, 2, 3)),
    },
    distributions=FILLS,
    draw=_draw,
    activations=frozenset({"x", "w"}),
    reference=reference,
    result="out",
    strided=("x", "w"),
    traps=(
        Case({"T": 9, "V": 257, "K": 1040, "R": 9}),  # enough for several threads
        Case({"T": 66, "V": 129, "K": 40, "R": 65}),  # of tiles as in linear
    ),
    properties=(
        repeatable(),
        row_alone("out", "rows"),
        Property("rows_not_asked_for_are_not_read", _other_rows_unread),
    ),
    implementations=table(torch_row(_torch), *compiled_rows("lm_head")),
)
