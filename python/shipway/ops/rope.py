"""Rotary position embedding (Su et al., RoFormer, 2021) in the half-split pairing of the Hugging Face checkpoints.

Element ``i`` of a head is rotated with element ``i + rotary_dim / 2``; elements from ``rotary_dim`` on pass through.
The decoder rotates inside ``qkv_rope_append``; this op is the rotation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Format, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable, row_alone


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


def reference(x: np.ndarray, table: np.ndarray, positions: np.ndarray) -> dict[str, Output]:
    """``x [T, heads, head_dim]`` -> ``out`` of the same shape, in the activation dtype."""
    return {"out": Output(rotate(x, table, positions), "act", rotated_magnitude(np.abs(x), table, positions), 2)}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    tokens, heads, head_dim = (case.dims[name] for name in ("T", "H", "head_dim"))
    rotary = 2 * (head_dim // 8) * case.dims["rotary_quarters"]
    context = tokens + int(rng.integers(1, 40))
    return {
        "x": fill(rng, (tokens, heads, head_dim), case.distribution, case.scale),
        "table": table_of(context, rotary, float(rng.choice([1e4, 1e5, 5e5]))),
        "positions": rng.integers(0, context, tokens).astype(np.int32),
    }


def _torch(dtype: str) -> Callable[..., Any]:
    import torch

    def rope(x: Any, table: Any, positions: Any) -> Any:
        half = table.shape[1] // 2
        cos, sin = table[positions.long()][:, None].split(half, -1)
        low, high, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1).to(x.dtype)

    return rope


def _position_zero(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["positions"][:] = 0
    return run.against(inputs, {"out": Output(inputs["x"].astype(np.float64), "exact")})


def only_turned(before: np.ndarray, after: np.ndarray, half: int, rounded: Format) -> str:
    """Says what a rotation of pairs (i, i + half) does not do, of heads ``[..., head_dim]`` float64.

    Pairs keep their length, but for four roundings, and what lies behind them keeps its bits.
    """
    turned, still = (np.hypot(y[..., :half], y[..., half : 2 * half]) for y in (after, before))
    slack, underflow = _slack(rounded)
    if not np.allclose(turned, still, rtol=slack, atol=underflow):
        return "a rotated pair changed its length"
    same = np.array_equal(after[..., 2 * half :], before[..., 2 * half :])
    return "" if same else "RoPE changed what partial rotary leaves alone"


def same_scores(heads: list[tuple[np.ndarray, np.ndarray]], rounded: Format) -> str:
    """Says where two pairs of queries and keys, ``[tokens, heads, head_dim]`` float64, have other scores."""
    slack, underflow = _slack(rounded)
    scores = [np.einsum("qhd,khd->hqk", q, k) for q, k in heads]
    q, k = (np.abs(y) for y in heads[-1])
    size = np.einsum("qhd,khd->hqk", q, k).max(initial=0)
    lost = underflow * sum(y.sum(2).max(initial=0) for y in (q, k))
    far = np.abs(scores[0] - scores[1]) > slack * size + lost + 1e-36
    return f"scores change with the position, at {tuple(np.argwhere(far)[0])}" if far.any() else ""


def _slack(rounded: Format) -> tuple[float, float]:
    """Relative and absolute error of a few roundings; float32's are fewer than those of the table and the sums."""
    return max(2e-5, 4 * rounded.unit_roundoff), max(1e-36, 2 * rounded.underflow)


def _norm_preserved(run: Runner, case: Case) -> str:
    # A rotation: pairs (i, i + rotary/2) keep their length, and what partial rotary leaves alone keeps its bits.
    inputs = run.inputs(case)
    out, x = run(inputs)["out"].astype(np.float64), inputs["x"].astype(np.float64)
    half = inputs["table"].shape[1] // 2
    return only_turned(x, out, half, run.format)


def _distance_only(run: Runner, case: Case) -> str:
    # q at i + s and k at j + s give the score of q at i and k at j.
    inputs = run.inputs(case.with_dims(T=max(case.dims["T"], 2)))
    tokens = len(inputs["x"])
    shift = 1 + case.seed % 30
    table = table_of(tokens + shift, inputs["table"].shape[1], 1e4)
    heads = []
    for first in (0, shift):
        at = np.arange(first, first + tokens, dtype=np.int32)
        y = run({**inputs, "table": table, "positions": at})["out"].astype(np.float64)
        heads.append((y, y))
    return same_scores(heads, run.format)


OP = Op(
    name="rope",
    summary="rotary position embedding of every head by its token's position",
    dims={
        "T": Dim(0, 40, (1, 2, 7, 8, 9)),
        "H": Dim(1, 9, (2, 3)),
        "rotary_quarters": Dim(1, 4, (4,)),
        "head_dim": Dim(16, 256, (16, 64, 80, 96, 128, 160, 256)),
    },
    distributions=("normal", "uniform", "constant", "spike", "zero_row", "alternating"),
    draw=_draw,
    activations=frozenset({"x"}),
    reference=reference,
    result="out",
    strided=("x", "table"),
    traps=(Case({"T": 129, "H": 9, "rotary_quarters": 4, "head_dim": 256}),),  # enough for several threads
    properties=(
        repeatable(),
        row_alone("out", "x", "positions"),
        Property("position_zero_is_the_identity", _position_zero),
        Property("rotation_keeps_lengths_and_the_rest", _norm_preserved),
        Property("scores_depend_on_the_distance", _distance_only),
    ),
    implementations=rows(torch_row(_torch, bitwise=True), *compiled_rows("rope")),
)
