"""Rows of the embedding table, widened to the float32 residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable, row_alone


def reference(ids: np.ndarray, table: np.ndarray) -> dict[str, Output]:
    """``ids [T]`` int32, ``table [V, K]`` in the activation dtype -> ``out [T, K]`` float32, an exact copy."""
    return {"out": Output(table[ids].astype(np.float64), "exact")}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, vocab, hidden = (case.dims[name] for name in ("T", "V", "K"))
    return {
        "ids": rng.integers(0, vocab, tokens).astype(np.int32),
        "table": fill(rng, (vocab, hidden), case.distribution, case.scale),
    }


def _torch(dtype: str) -> Callable[..., Any]:
    return lambda ids, table: table[ids.long()].float()


def _special_values_are_copied(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    subnormal = 2.0 ** (run.format.min_exponent - 4)
    special = np.array([np.inf, np.nan, -run.format.max_finite, subnormal], np.float32)
    inputs["table"] = np.resize(special, inputs["table"].shape)
    return run.against(inputs)


def _first_and_last(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["ids"] = np.array([0, len(inputs["table"]) - 1], np.int32)
    return run.against(inputs)


OP = Op(
    name="embedding",
    summary="table[ids], float32",
    dims={
        "T": Dim(0, 40, (1, 2, 3)),
        "V": Dim(1, 300, (2, 257)),
        "K": Dim(1, 1100, (2, 15, 16, 17, 33, 576, 960, 1040)),
    },
    distributions=("normal", "tiny", "constant"),
    draw=_draw,
    activations=frozenset({"table"}),
    reference=reference,
    result="out",
    strided=("table",),
    properties=(
        repeatable(),
        row_alone("out", "ids"),
        Property("special_values_are_copied", _special_values_are_copied),
        Property("first_and_last_row", _first_and_last),
    ),
    implementations=rows(torch_row(_torch, bitwise=True), *compiled_rows("embedding")),
)
