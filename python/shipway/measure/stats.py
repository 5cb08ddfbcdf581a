"""The few statistics every figure is made with: median, bootstrap interval, ratio per round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95
MIN_ROUNDS = 3  # fewer samples have no meaningful interval


@dataclass(frozen=True)
class Estimate:
    """A median over rounds; ``low`` and ``high`` bound its 95% interval, ``None`` below :data:`MIN_ROUNDS` samples."""

    median: float
    low: float | None
    high: float | None

    def excludes(self, value: float) -> bool:
        """Returns whether the interval is known and ``value`` lies outside it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def estimate(samples: Sequence[float]) -> Estimate:
    """Returns the median of ``samples`` with its percentile-bootstrap interval (fixed seed: same input, same output).

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    values = np.asarray(samples, np.float64)
    median = float(np.median(values))
    if len(values) < MIN_ROUNDS:
        return Estimate(median, None, None)
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    medians = np.median(values[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(median, float(low), float(high))


def ratio_per_round(values: dict[int, float], baseline: dict[int, float]) -> Estimate | None:
    """Returns the median of ``values[r] / baseline[r]`` over the rounds both have, ``None`` if they share none.

    A ratio within one round cancels the drift that hits both; a ratio of two medians does not.
    """
    ratios = [values[r] / baseline[r] for r in sorted(values.keys() & baseline.keys())]
    return estimate(ratios) if ratios else None
