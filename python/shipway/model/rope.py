"""Rotary position embedding: the numbers a checkpoint states, and the cos/sin table every route shares.

Scalings: ``none``; ``linear`` (positions divided by a factor); ``llama3`` (low frequencies divided, a smooth band
between, Llama 3.1's ``apply_scaling``); ``yarn`` (Peng et al., "YaRN", 2023, eqs. 17 to 23).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shipway.errors import ShipwayError

_LARGEST = 3e38  # what a float32 holds
_LEAST = 1e-6  # of what frequencies and wavelengths are divided by, so that they stay finite
KINDS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        theta: Base of the geometric series of wavelengths.
        rotary_dim: Leading dimensions of a head that rotate; even, at most head_dim.
        kind: ``"none"``, ``"linear"``, ``"llama3"`` or ``"yarn"``.
        factor: Context extension factor (linear, llama3, yarn).
        original_max_position_embeddings: Context of the pretraining (llama3, yarn).
        low_freq_factor: llama3: wavelengths above original context / this are divided by ``factor``.
        high_freq_factor: llama3: wavelengths below original context / this stay.
        beta_fast: yarn: dimensions that rotate more often than this over the original context stay.
        beta_slow: yarn: dimensions that rotate less often than this are divided by ``factor``.
        attention_factor: yarn: multiplies cos and sin; 1 otherwise.
        truncate: yarn: the two bounds are rounded outwards to whole dimensions.
        divisors: llama3 from a GGUF, which stores the divisor of each frequency instead of the numbers above;
            ``rotary_dim / 2`` of them, or empty.
    """

    theta: float
    rotary_dim: int
    kind: str = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ShipwayError(f"rotary dimension {self.rotary_dim} is not supported: it must be even and positive")
        if not (1 < self.theta < math.inf and _LEAST <= self.factor < math.inf):
            raise ShipwayError(f"rope theta {self.theta} with factor {self.factor} makes no sense")
        factors = (self.beta_fast, self.beta_slow, self.attention_factor)
        if not all(_LEAST <= value < math.inf for value in factors):
            raise ShipwayError(f"yarn's beta_fast, beta_slow and attention factor must be positive, not {factors}")
        if self.kind in ("llama3", "yarn") and not self.divisors and self.original_max_position_embeddings <= 0:
            raise ShipwayError(f"rope scaling {self.kind} needs original_max_position_embeddings")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
        """Reads ``rope_parameters`` or the older ``rope_scaling`` + ``rope_theta`` of a ``config.json``.

        Raises:
            ShipwayError: A scaling other than none, linear, llama3, yarn; a number it needs is missing.
        """
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}  # in the order of transformers
        if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
            raise ShipwayError(f"rope scaling {scaling!r} is not supported: one setting for all layers is")
        theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
        partial = number(scaling, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * partial)
        if rotary_dim > head_dim:
            raise ShipwayError(f"partial_rotary_factor {partial} is not supported: it must not exceed 1")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return cls(theta, rotary_dim)
        if kind not in KINDS[1:]:
            raise ShipwayError(f"rope scaling {kind!r} is not supported: only {', '.join(KINDS[1:])}")
        factor = number(scaling, "factor")
        original = int(
            number(config, "original_max_position_embeddings", 0)
            or number(scaling, "original_max_position_embeddings", 0)
            or max_positions
        )
        if kind == "linear":
            return cls(theta, rotary_dim, "linear", factor)
        if kind == "llama3":
            low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
            if not 0 < low < high:
                raise ShipwayError(f"llama3 rope scaling: low_freq_factor {low} must lie below high_freq_factor {high}")
            return cls(theta, rotary_dim, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
        if scaling.get("attention_factor") is not None:
            attention = number(scaling, "attention_factor")
        else:
            mscale, all_dim = number(scaling, "mscale", 0.0), number(scaling, "mscale_all_dim", 0.0)
            if min(mscale, all_dim) < 0:
                raise ShipwayError(f"yarn's mscale {mscale} and mscale_all_dim {all_dim} must not be negative")
            both = bool(mscale and all_dim)
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor)
        return cls(
            theta,
            rotary_dim,
            "yarn",
            factor,
            original,
            beta_fast=number(scaling, "beta_fast", 0.0) or 32.0,
            beta_slow=number(scaling, "beta_slow", 0.0) or 1.0,
            attention_factor=attention,
            truncate=bool(scaling.get("truncate", True)),
        )

    def inv_freq(self) -> np.ndarray:
        """Returns the angle per position of each rotated pair, float32 ``[rotary_dim / 2]``."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        plain = (1.0 / np.power(self.theta, exponent.astype(np.float64))).astype(np.float32).astype(np.float64)
        if self.divisors:
            scaled = plain / np.asarray(self.divisors)
        elif self.kind == "linear":
            scaled = plain / self.factor
        elif self.kind == "llama3":
            # Turns over the original context: the smooth band runs from low_freq_factor to high_freq_factor of them.
            turns = self.original_max_position_embeddings * plain / (2 * math.pi)
            keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            scaled = keep * plain + (1 - keep) * plain / self.factor
        elif self.kind == "yarn":
            keep = self._yarn_keep()
            scaled = keep * plain + (1 - keep) * plain / self.factor
        else:
            scaled = plain
        return scaled.astype(np.float32)

    def _yarn_keep(self) -> np.ndarray:
        """Share of each frequency that is left unscaled, ``[rotary_dim / 2]`` in [0, 1]."""
        pairs = self.rotary_dim // 2

        def dimension(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # the published code's guard against a ramp of no width
        return 1 - np.clip((np.arange(pairs) - low) / (high - low), 0, 1)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's attention temperature, ``0.1 * scale * ln(factor) + 1`` (eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_table(rope: RopeConfig, positions: int) -> np.ndarray:
    """Returns cos and sin of every angle, float32 ``[positions, rotary_dim]``.

    Columns ``[:rotary_dim / 2]`` are cos, the rest sin, each multiplied by YaRN's attention factor. Pair ``i`` is
    ``(x[i], x[i + rotary_dim / 2])`` (rotate-half). The angle is float32(position) * inv_freq rounded to float32, as
    transformers computes it; cos and sin are then taken in float64, so that only the angle's rounding is shared.
    """
    angles = np.outer(np.arange(positions, dtype=np.float32), rope.inv_freq()).astype(np.float64)
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_factor).astype(np.float32)


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Reads a finite number that may be fractional.

    Raises:
        ShipwayError: It is neither there nor has a default, or is none.
    """
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ShipwayError(f"the configuration lacks {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
        raise ShipwayError(f"{key} must be a number that a float32 holds, not {value!r}")
    return float(value)
