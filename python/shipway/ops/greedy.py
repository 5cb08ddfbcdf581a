"""Greedy choice: the id of the largest logit of each row.

Ties go to the lowest id. NaN counts as minus infinity, so a row's other logits still decide; a row of nothing but
NaN or minus infinity gives id 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable, row_alone


def reference(logits: np.ndarray) -> dict[str, Output]:
    """``logits [R, V]`` float32 -> ``ids [R]`` int32."""
    return {"ids": Output(np.where(np.isnan(logits), -np.inf, logits).argmax(-1).astype(np.int32), "exact")}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    return {"logits": fill(rng, (case.dims["R"], case.dims["V"]), case.distribution, case.scale)}


def _torch(dtype: str) -> Callable[..., Any]:
    import torch

    return lambda logits: torch.nan_to_num(logits, -torch.inf, torch.inf, -torch.inf).argmax(-1).to(torch.int32)


def _choice(change: Callable[[np.ndarray, int], None]) -> Callable[[Runner, Case], str]:
    """A property that changes the logits in place, given a position, and compares with the definition."""

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        change(inputs["logits"], case.seed % inputs["logits"].shape[1])
        return run.against(inputs)

    return check


def _tie_at(logits: np.ndarray, at: int) -> None:
    logits[:] = np.minimum(logits, 1)
    logits[:, at:] = 2.0


def _nan_at(logits: np.ndarray, at: int) -> None:
    logits[:, at] = np.nan


def _nan_until(logits: np.ndarray, at: int) -> None:
    logits[:, : at + 1] = np.nan


def _infinite_at(logits: np.ndarray, at: int) -> None:
    logits[:, at] = np.inf


def _only(value: float) -> Callable[[np.ndarray, int], None]:
    def change(logits: np.ndarray, at: int) -> None:
        logits[:] = value

    return change


def _every_position(run: Runner, case: Case) -> str:
    # One row per id, its maximum there: every lane and tail of the reduction decides once.
    inputs = run.inputs(case)
    vocab = inputs["logits"].shape[1]
    inputs["logits"] = np.where(np.eye(vocab, dtype=bool), np.float32(-1), np.float32(-2))
    return run.against(inputs, {"ids": Output(np.arange(vocab, dtype=np.int32), "exact")})


OP = Op(
    name="greedy",
    summary="argmax of each row of logits, lowest id on ties",
    dims={"R": Dim(0, 9, (1, 2, 3)), "V": Dim(1, 700, (2, 15, 16, 17, 63, 64, 65, 257, 509))},
    distributions=("normal", "constant", "spike", "levels", "tiny"),
    draw=_draw,
    activations=frozenset(),
    reference=reference,
    result="ids",
    strided=("logits",),
    properties=(
        repeatable(),
        row_alone("ids", "logits"),
        Property("every_position_can_win", _every_position),
        Property("ties_go_to_the_lowest_id", _choice(_tie_at)),
        Property("nan_never_wins", _choice(_nan_at)),
        Property("nan_at_the_front_never_wins", _choice(_nan_until)),
        Property("infinity_wins", _choice(_infinite_at)),
        Property("all_nan_gives_zero", _choice(_only(np.nan))),
        Property("all_minus_infinity_gives_zero", _choice(_only(-np.inf))),
    ),
    implementations=rows(torch_row(_torch, bitwise=True), *compiled_rows("greedy")),
)
