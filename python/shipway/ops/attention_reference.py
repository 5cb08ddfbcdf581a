"""Attention over the KV cache by definition, in float64, and which keys a query sees."""

from __future__ import annotations

import numpy as np

from shipway.ops.data import sequences
from shipway.ops.op import Inputs, Output


def visible(queries: int, keys: int, window: int = 0, causal: bool = True) -> np.ndarray:
    """Which key each query sees, ``[queries, keys]`` bool: bottom-right causal, at most ``window`` keys (0: all)."""
    position = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None, :]
    seen = key <= position if causal else np.ones((queries, keys), bool)
    return seen & (key > position - window) if window else seen


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int = 0, causal: bool = True
) -> np.ndarray:
    """Softmax attention of one sequence by definition, one query at a time, float64.

    Args:
        q: ``[queries, heads, head_dim]``.
        k: ``[keys, kv_heads, head_dim]``.
        v: ``[keys, kv_heads, head_dim]``.
        scale: Factor on ``q . k``.
        window: Keys a query sees, its own included; 0 for all.
        causal: Whether keys after a query's own position are hidden.

    Returns:
        ``[queries, heads, head_dim]``; a query that sees no key gives 0.
    """
    out = np.zeros(q.shape)
    for row, seen in enumerate(visible(len(q), len(k), window, causal)):
        if seen.any():
            grouped, keys, values = _grouped(q[row], k[seen], v[seen])
            out[row] = (_softmax(grouped, keys, scale) @ values).reshape(q.shape[1:])
    return out


def attend_magnitude(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, scale: float, window: int = 0, causal: bool = True
) -> np.ndarray:
    """Magnitude of ``out = attend(...)`` for the a-priori bound, float64 of the same shape.

    ``sum_j p_j |v_j|``, plus what an error of the scores carries over to first order: ``sum_j p_j e_j |v_j - out|``
    with ``e_j = scale * sum_d |q_d| |k_jd|``.
    """
    magnitude = np.zeros(q.shape)
    for row, seen in enumerate(visible(len(q), len(k), window, causal)):
        if seen.any():
            grouped, keys, values = _grouped(q[row], k[seen], v[seen])
            p = _softmax(grouped, keys, scale)
            shaken = p * scale * (np.abs(grouped) @ np.abs(keys).swapaxes(1, 2))
            away = np.abs(values[:, None] - out[row].reshape(grouped.shape)[:, :, None])
            total = p @ np.abs(values) + (shaken[:, :, None] @ away)[:, :, 0]
            magnitude[row] = total.reshape(q.shape[1:])
    return magnitude


def _grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query's heads by the KV head they share ``[kv_heads, group, head_dim]``, keys and values
    ``[kv_heads, keys, head_dim]``, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    return q.reshape(k.shape[1], -1, q.shape[-1]), k.swapaxes(0, 1), v.swapaxes(0, 1)


def _softmax(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    scores = scale * (q @ k.swapaxes(1, 2))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def reference(
    q: np.ndarray, cache: np.ndarray, offsets: np.ndarray, start: np.ndarray, layer: int, scale: float, window: int
) -> dict[str, Output]:
    """``q [T, heads, head_dim]`` and ``cache`` in the activation dtype -> ``out [T, heads, head_dim]`` in it."""
    out, magnitude = np.zeros(q.shape), np.zeros(q.shape)
    longest = q.shape[-1]
    for b, new, _, total in sequences(offsets, start):
        keys, values = cache[b, layer, 0, :total], cache[b, layer, 1, :total]
        out[new] = attend(q[new], keys, values, scale, window)
        magnitude[new] = attend_magnitude(q[new], keys, values, out[new], scale, window)
        longest = max(longest, total)
    return {"out": Output(out, "act", magnitude, longest)}


def written(inputs: Inputs) -> list[tuple[int, slice, int, np.ndarray, np.ndarray]]:
    """Per sequence ``(index, rows of the new tokens, cached tokens, keys, values)``, keys and values as views."""
    cache, layer = inputs["cache"], inputs["layer"]
    return [
        (b, new, cached, cache[b, layer, 0, :total], cache[b, layer, 1, :total])
        for b, new, cached, total in sequences(inputs["offsets"], inputs["start"])
    ]
