"""Deliberately broken variants turn a property of their op red; their unbroken forms stay green."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shipway.numerics.campaign import Plan, run_line
from shipway.numerics.check import OpRunner
from shipway.numerics.mutants import Mutant, mutants, red
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case
from shipway.signature import WORDS


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.op}-{m.defect or 'unbroken'}") for m in mutants()])
def test_mutant_turns_red_and_the_unbroken_form_stays_green(mutant: Mutant) -> None:
    # A case with packed matrices takes longer, and none of their defects needs a rare one.
    drawn = 12 if mutant.op.endswith(WORDS) else 40
    found = red(mutant, examples=drawn if mutant.defect else 3, first=True)
    assert bool(found) == bool(mutant.defect), found or f"{mutant.op} survives {mutant.defect!r}"


def test_every_op_has_a_mutant() -> None:
    assert {mutant.op for mutant in mutants() if mutant.defect} == set(OPS)


def test_strided_call_that_the_check_lets_through_turns_a_refusal_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shipway.ops.op.check", lambda *call, **options: {})
    op = OPS["linear"]
    refused = OpRunner(op, replace(op.implementations["torch"], strided="refused"), "f32")
    assert "declared refused" in refused.strided(Case({"T": 3, "N": 4, "K": 5}, layout="transposed"))


def test_a_strided_call_that_spoils_the_next_turns_red() -> None:
    op, seen = OPS["linear"], []

    def sticky(function):  # type: ignore[no-untyped-def]
        def call(x, w):  # type: ignore[no-untyped-def]
            seen.append(x.is_contiguous())
            return function(x, w) + (0 if all(seen) else 1e-3) * x.is_contiguous()

        return call

    runner = OpRunner(op, op.implementations["torch"], "f32", sticky)
    assert "after a call with" in runner.strided(Case({"T": 3, "N": 4, "K": 5}, layout="transposed"))


def test_a_case_alone_is_run_by_every_property() -> None:
    line = run_line(
        OPS["linear"], OPS["linear"].implementations["torch"], "f32", Plan(case=Case({"T": 2, "N": 3, "K": 5}))
    )
    assert line.verdict == "PASS"
    assert line.examples == 2 + len(OPS["linear"].properties)  # the reference and the layout policy
