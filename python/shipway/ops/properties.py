"""Properties that several ops share, made for an op from the names of its arguments."""

from __future__ import annotations

import numpy as np

from shipway.ops.op import Case, Property, Runner


def repeatable() -> Property:
    """Two runs on the same arguments give the same bits."""

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        first, second = run(inputs), run(inputs)
        for name in first:
            if not np.array_equal(first[name], second[name], equal_nan=True):
                return f"{name} differs between two runs"
        return ""

    return Property("repeatable", check)


def row_alone(result: str, *per_row: str, examples: tuple[Case, ...] = ()) -> Property:
    """A row computed alone (GEMV) equals the same row in the batch (GEMM).

    Args:
        result: Output whose rows are compared.
        per_row: Arguments with one row per output row.
        examples: Cases that are always run.
    """

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        together = run(inputs)[result]
        rows = len(together)
        for row in sorted({0, rows // 2, rows - 1} & set(range(rows))):
            alone = {**inputs, **{name: inputs[name][row : row + 1] for name in per_row}}
            if difference := run.same(alone, {result: together[row : row + 1]}):
                return f"row {row} alone is not row {row} of {rows}: {difference}"
        return ""

    return Property("row_alone", check, examples)


def poisoned_row_stays(result: str, *per_row: str) -> Property:
    """A row of NaN makes only its own output row NaN."""

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        clean = run(inputs)[result]
        rows = len(clean)
        if rows < 2:
            return ""
        bad = case.seed % rows
        poisoned = {name: np.array(inputs[name]) for name in per_row}
        for values in poisoned.values():
            values[bad] = np.nan
        out = run({**inputs, **poisoned})[result]
        if not np.isnan(out[bad]).all():
            return f"row {bad} is NaN but its output is not"
        others = np.arange(rows) != bad
        if not np.array_equal(out[others], clean[others], equal_nan=True):
            return f"NaN in row {bad} changes other rows"
        return ""

    return Property("poisoned_row_stays", check)
