"""Rotary position embedding (Su et al., RoFormer, 2021) in the half-split pairing of the Hugging Face checkpoints.

Element ``i`` of a head is rotated with element ``i + rotary_dim / 2``; elements from ``rotary_dim`` on pass through.
RoPE is no kernel of its own: it is part of ``qkv_rope_append``.
"""

from __future__ import annotations

import numpy as np


def rotate(x: np.ndarray, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotates every head by its token's angle, float64.

    Args:
        x: ``[T, heads, head_dim]``.
        table: ``[P, rotary_dim]``: cosines in the first half of the columns, sines in the second.
        positions: ``[T]`` rows of the table.
    """
    return _combine(x, table, positions, -1.0)


def rotated_magnitude(magnitude: np.ndarray, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Largest magnitude :func:`rotate` can produce from elements of the given magnitudes (same shapes)."""
    return _combine(magnitude, np.abs(table), positions, 1.0)


def _combine(x: np.ndarray, table: np.ndarray, positions: np.ndarray, sign: float) -> np.ndarray:
    out = np.array(x, np.float64)
    half = table.shape[1] // 2
    rows = np.asarray(table, np.float64)[positions]
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    low, high = out[..., :half].copy(), out[..., half : 2 * half].copy()
    out[..., :half] = low * cos + sign * high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    return out


def table_of(positions: int, rotary_dim: int, theta: float) -> np.ndarray:
    """The unscaled table ``[positions, rotary_dim]`` float32, for drawing test data."""
    angle = np.arange(positions)[:, None] * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
