"""Chooses the next token of one sequence from its logits.

The order is temperature, then top-k, then top-p, all in float64:

- temperature 0 is greedy: the largest logit, of equal ones the lowest id.
- top_k keeps the k largest logits, ties by lower id; 0 keeps all.
- top_p keeps the smallest set of most probable tokens whose mass, after top_k, reaches p, ties by lower id; at least
  one token is always kept; 1 keeps all.
- Ids at or beyond ``vocab`` (a checkpoint may pad its logits past the tokenizer's vocabulary) are never chosen.
- One uniform number per token, from a generator of this sequence alone: what is chosen depends on seed, step and this
  row's logits, not on the batch it sits in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from shipway.errors import ShipwayError


def _float(value: object) -> float:
    """Returns ``value`` as a float, NaN when it is no number or none that a float holds."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _int(value: object) -> int:
    """Returns ``value`` as an int, -1 when it is no whole number."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Numbers of any type become Python's own, as messages carry them.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Tokens kept, 0 for all.
        top_p: Probability mass kept, in (0, 1].
        seed: Non-negative seed of the sequence's generator.

    Raises:
        ShipwayError: A value is no number or outside its range, or top_k or top_p is given without a temperature.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        said = dict(vars(self))
        for name, kind in (("temperature", _float), ("top_k", _int), ("top_p", _float), ("seed", _int)):
            object.__setattr__(self, name, kind(said[name]))
        if not 0 <= self.temperature < math.inf:
            raise ShipwayError(f"temperature must be a finite number >= 0, not {said['temperature']!r}")
        if self.top_k < 0:
            raise ShipwayError(f"top-k must be a whole number >= 0 (0 keeps every token), not {said['top_k']!r}")
        if not 0 < self.top_p <= 1:
            raise ShipwayError(f"top-p must be a number in (0, 1], not {said['top_p']!r}")
        if not 0 <= self.seed < 2**63:
            raise ShipwayError(f"seed must be a whole number in [0, 2**63), not {said['seed']!r}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ShipwayError("top-k and top-p need a temperature above 0: greedy choice ignores them")


class Sampler:
    """Chooses the tokens of one sequence, one call per token."""

    def __init__(self, sampling: Sampling, vocab: int) -> None:
        """Starts a sequence; only ids below ``vocab`` are ever chosen."""
        self._sampling = sampling
        self._vocab = vocab
        self._random = np.random.default_rng(sampling.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is always chosen."""
        return self._sampling.temperature == 0

    def choose(self, logits: np.ndarray) -> int:
        """Returns the next id for ``logits [V]`` (any float dtype).

        Raises:
            ShipwayError: The logits hold NaN or +inf, or no finite value: the route's result is broken.
        """
        scores = logits[: self._vocab].astype(np.float64)
        largest = scores.max()  # NaN if any is NaN
        if not np.isfinite(largest):
            raise ShipwayError(f"the route returned logits whose largest value is {largest}: no token can be chosen")
        if self.is_greedy:
            return int(scores.argmax())
        ids, weights = self.candidates(scores)
        mass = np.cumsum(weights)
        drawn = np.searchsorted(mass, self._random.random() * mass[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])

    def candidates(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids kept, most probable first, and their probabilities before renormalisation (float64)."""
        sampling = self._sampling
        order = np.arange(len(scores))
        if 0 < sampling.top_k < len(scores):  # sorting a whole vocabulary costs milliseconds a token
            threshold = np.partition(scores, -sampling.top_k)[-sampling.top_k]
            order = np.flatnonzero(scores >= threshold)
        order = order[np.argsort(-scores[order], kind="stable")]
        if sampling.top_k:
            order = order[: sampling.top_k]
        # Subtracting the maximum before dividing keeps a tiny temperature from overflowing to inf - inf.
        with np.errstate(over="ignore"):
            weights = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
        weights /= weights.sum()
        if sampling.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(weights), sampling.top_p, side="left")) + 1
            order, weights = order[:kept], weights[:kept]
        return order, weights
