"""What every route does around its step: sizes are checked before it, logits after it."""

from __future__ import annotations

import numpy as np
import pytest

from shipway.errors import ShipwayError
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute

VOCAB = 8


class Broken(SteppedRoute):
    """Logits with one value everywhere; chooses the first id, as a kernel may that finds no largest one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def prepare(self, spec: RunSpec) -> Prepared:
        self._begin(spec, VOCAB)
        return Prepared(load_s=0, import_s=0, compile_s=0, compile_cold=False)

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        rows = tokens.size if every_row else len(tokens)
        return np.full((rows, VOCAB), self.value, np.float32), np.zeros(rows, np.int32)


def route(value: float) -> Broken:
    made = Broken(value)
    made.prepare(RunSpec("none", "bf16", "bf16", max_context=4, max_batch=2))
    return made


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_choose_no_token(value: float) -> None:
    with pytest.raises(ShipwayError, match=r"after 3 tokens are not finite.*bf16"):
        route(value).prefill(np.zeros((1, 3), np.int32))
    broken = route(0.0)
    broken.prefill(np.zeros((2, 1), np.int32))
    broken.value = value
    with pytest.raises(ShipwayError, match="after 2 tokens are not finite"):
        broken.decode(np.zeros(2, np.int32))


def test_scores_are_handed_on_as_they_are_for_the_verdict_to_fail() -> None:
    assert np.isnan(route(np.nan).score(np.zeros(3, np.int32))).all()
