"""The verdict on one op's output against its float64 reference.

All of these must hold, over every element:

1. error bound: an element passes by the 2x rule, ``|out - ref| <= 2 * max|base - ref| + atol`` with ``base`` the plain
   PyTorch result in the dtype under test and ``atol`` two roundings of the largest output (the rule of
   flash-attention's tests), or by the a-priori bound
   ``|out - ref| <= 4 * sqrt(K) * u_acc * sum|a||b| + u_out * |ref|`` (Higham, Accuracy and Stability of Numerical
   Algorithms, chapter 3, with the statistical sqrt(K) in place of K), plus, for an op that holds a value in the dtype
   under test between two reductions, four roundings of it. The 2x rule alone is flaky with few outputs: the base may
   be exact by luck. tf32 rounds both operands of a product to 10 bits of fraction, each by at most ``u_op = 2^-11`` of
   itself: the a-priori bound grows by ``2 * u_op * sum|a||b|``, or by what that does to an output it is not a sum of.
2. cosine difference ``1 - 2<x,y> / (|x|^2 + |y|^2)`` under 1e-10 (f32), 1e-5 (bf16, f16) or 2^-21 (tf32: half the
   square of ``2 * u_op``, products that are all off by what they may) over the finite positions;
   two zero vectors are equal. An op of two stages with a value in the dtype under test between them has both stages'
   limits.
3. non-finite positions: NaN and each infinity exactly where the reference, rounded to the output's dtype, has them.

Two refinements keep rules 1 and 2 well-posed. Underflow: errors below :attr:`DType.underflow` are no errors. Few
outputs: the cosine is an average weighted by the squared outputs; where fewer than 64 of them carry it (their effective
number is ``(sum y^2)^2 / sum y^4``) it measures the luck of single roundings and cancellations, so there rule 2 also
passes within the a-priori bound or four roundings of each output everywhere (as many as plain PyTorch makes on the way
through a gated MLP), or at 4 times the base's cosine difference (twice its error).

A base whose own cosine difference is above :data:`WORTHLESS` excuses nothing: it is left out.

An element that was never written fails rule 1: where ops run (``shipway.numerics.isolated``), fresh memory is full of
large numbers, or of zeros where it comes from MAX.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shipway.numerics.dtypes import DTYPES, F32, DType

COSINE_LIMIT = {"f32": 1e-10, "bf16": 1e-5, "f16": 1e-5, "tf32": 2.0**-21}
FEW_OUTPUTS = 64
WORTHLESS = 0.1


@dataclass(frozen=True)
class Verdict:
    """What :func:`judge` found.

    Attributes:
        ok: Whether every rule held.
        max_err: Largest absolute error over the finite positions.
        max_ulps: Largest error in ulps of the output's dtype. Where a sum cancelled, the ulp is that of its
            uncancelled size ``sum|a||b| / sqrt(K)``, so that the figure compares kernels, not draws.
        cosine_diff: Rule 2's quantity (0 for two zero vectors).
        elements: Number of outputs judged.
        worst: Index of the element the reason speaks of, else of the largest error; ``None`` without elements.
        reason: One line: the rule that failed, where and by how much; empty when ``ok``.
    """

    ok: bool
    max_err: float
    max_ulps: float
    cosine_diff: float
    elements: int
    worst: tuple[int, ...] | None
    reason: str


def judge(
    out: np.ndarray,
    ref64: np.ndarray,
    base: np.ndarray | None,
    dtype: str,
    *,
    magnitude: np.ndarray | float | None = None,
    reduction: int = 1,
    rounded: np.ndarray | None = None,
    operands: np.ndarray | None = None,
    out_dtype: str | None = None,
) -> Verdict:
    """Judges ``out`` against ``ref64`` by the three rules above.

    Args:
        out: Result under test, any float dtype, any shape.
        ref64: float64 reference of the same shape.
        base: Plain PyTorch result of the same shape, for the 2x rule; ``None`` leaves only the a-priori bound.
        dtype: Dtype under test, a key of :data:`DTYPES`: selects the cosine limit. Accumulation is float32.
        magnitude: ``sum|a||b|`` per element (or broadcastable), for the a-priori bound; ``None`` leaves only the 2x
            rule.
        reduction: Reduction length K.
        rounded: Root mean square, as it reaches each output, of what is rounded to ``dtype`` on the way.
        operands: What the roundings of tf32's operands do to each output at most, if not ``2 * u_op * magnitude``.
        out_dtype: Dtype of the output where it is not ``dtype`` (float32 logits of a bf16 op).

    Raises:
        ValueError: Neither ``base`` nor ``magnitude`` is given, or ``base`` has another shape than the reference.
    """
    if base is None and magnitude is None:
        raise ValueError("judge needs base, magnitude or both: without them no error bound exists")
    fmt = DTYPES[out_dtype or dtype]
    if base is not None and np.shape(base) != np.shape(ref64):
        raise ValueError(f"base has shape {np.shape(base)}, the reference {np.shape(ref64)}")
    if np.shape(out) != np.shape(ref64):
        return _broken(f"shape {np.shape(out)} instead of {np.shape(ref64)}", np.size(out), None)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        out, ref = np.asarray(out, np.float64), np.asarray(ref64, np.float64)
    if out.size == 0:
        return Verdict(True, 0.0, 0.0, 0.0, 0, None, "")

    expected = np.where(np.isinf(fmt.round(ref)), np.copysign(np.inf, ref), ref)
    misplaced = _misplaced(out, expected)
    if misplaced.any():
        worst = _first(misplaced)
        return _broken(
            f"{out[worst]} at {worst} where the reference has {ref[worst]:.9g} ({misplaced.sum()} of {out.size})",
            out.size,
            worst,
        )

    finite = np.isfinite(expected)
    error = np.where(finite, np.abs(np.where(finite, out, 0.0) - np.where(finite, ref, 0.0)), 0.0)
    if base is not None and _base_cosine(base, ref, finite, fmt) > WORTHLESS:
        base = None
    bound = _twice_base(base, ref, finite, fmt)
    a_priori = _a_priori(magnitude, reduction, ref, fmt)
    if DTYPES[dtype].operand_roundoff and magnitude is not None:
        a_priori = a_priori + (2 * DTYPES[dtype].operand_roundoff * magnitude if operands is None else operands)
    if rounded is not None:
        a_priori = a_priori + 4 * DTYPES[dtype].unit_roundoff * rounded
    failed = error > np.maximum(bound, a_priori)
    worst = _first(error == error.max())
    size = np.abs(ref) if magnitude is None else np.maximum(np.abs(ref), magnitude / np.sqrt(max(reduction, 1)))
    max_ulps = float((error / fmt.spacing(np.where(finite, size, 1.0))).max())
    cosine = _cosine_difference(out, ref, finite, fmt)
    limit = COSINE_LIMIT[dtype] * (1 if rounded is None else 2)

    reason = ""
    if failed.any():
        worst = _first(failed & (error == error[failed].max()))
        allowed = float(np.maximum(bound, a_priori)[worst])
        reason = (
            f"error {error[worst]:.3g} over the bound {allowed:.3g} at {worst}: {out[worst]:.9g} instead of "
            f"{ref[worst]:.9g} ({failed.sum()} of {out.size} outputs)"
        )
    elif not cosine < limit and not (
        _effective_number(ref[finite]) < FEW_OUTPUTS
        and (
            (error <= np.maximum(a_priori, 4 * DTYPES[dtype].unit_roundoff * np.abs(ref))).all()
            or (base is not None and cosine <= 4 * _base_cosine(base, ref, finite, fmt))
        )
    ):
        reason = f"cosine difference {cosine:.3g} not under {limit:g}, largest error {error[worst]:.3g} at {worst}"
    return Verdict(not reason, float(error.max()), max_ulps, cosine, out.size, worst, reason)


def judge_exact(out: np.ndarray, ref: np.ndarray) -> Verdict:
    """Judges an output that must equal the reference bit for bit (ids, copies). NaN equals NaN."""
    if np.shape(out) != np.shape(ref):
        return _broken(f"shape {np.shape(out)} instead of {np.shape(ref)}", np.size(out), None)
    out, ref = np.asarray(out), np.asarray(ref)
    wrong = (out != ref) & ~((out != out) & (ref != ref))
    if wrong.any():
        worst = _first(wrong)
        return _broken(
            f"{out[worst]} instead of {ref[worst]} at {worst} ({wrong.sum()} of {out.size})", out.size, worst
        )
    return Verdict(True, 0.0, 0.0, 0.0, out.size, None, "")


def judge_choice(out: np.ndarray, accepted: np.ndarray) -> Verdict:
    """Judges chosen ids ``out [R]`` by the mask ``accepted [R, V]``: one right id in every row."""
    rows, width = accepted.shape
    if np.shape(out) != (rows,):
        return _broken(f"shape {np.shape(out)} instead of {(rows,)}", np.size(out), None)
    inside = (out >= 0) & (out < width)
    right = inside & accepted[np.arange(rows), np.where(inside, out, 0)]
    if not right.all():
        worst = _first(~right)
        some = ", ".join(map(str, np.flatnonzero(accepted[worst[0]])[:3]))
        return _broken(f"id {out[worst]} in row {worst[0]}, where {some} would be right", out.size, worst)
    return Verdict(True, 0.0, 0.0, 0.0, out.size, None, "")


def _broken(reason: str, elements: int, worst: tuple[int, ...] | None) -> Verdict:
    return Verdict(False, float("inf"), float("inf"), 1.0, elements, worst, reason)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _misplaced(out: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return (
        (np.isnan(out) != np.isnan(expected))
        | (np.isposinf(out) != np.isposinf(expected))
        | (np.isneginf(out) != np.isneginf(expected))
    )


def _twice_base(base: np.ndarray | None, ref: np.ndarray, finite: np.ndarray, fmt: DType) -> float:
    """The 2x rule's bound; 0 without a base, whose non-finite elements say nothing and are left out."""
    if base is None:
        return 0.0
    base = np.asarray(base, np.float64)
    usable = finite & np.isfinite(base)
    if not usable.any():
        return 0.0
    atol = 2 * fmt.unit_roundoff * float(np.abs(ref[usable]).max())
    return 2 * float(np.abs(base[usable] - ref[usable]).max()) + atol


def _base_cosine(base: np.ndarray, ref: np.ndarray, finite: np.ndarray, fmt: DType) -> float:
    """The base's cosine difference where it is finite, as the 2x rule reads it."""
    return _cosine_difference(base, ref, finite & np.isfinite(np.asarray(base, np.float64)), fmt)


def _a_priori(magnitude: np.ndarray | float | None, reduction: int, ref: np.ndarray, fmt: DType) -> np.ndarray:
    if magnitude is None:
        return np.full(ref.shape, fmt.underflow)
    accumulated = 4 * np.sqrt(max(reduction, 1)) * F32.unit_roundoff * np.asarray(magnitude, np.float64)
    bound = np.broadcast_to(accumulated, ref.shape) + fmt.unit_roundoff * np.abs(ref) + fmt.underflow
    return np.where(np.isfinite(bound), bound, 0.0)


def _cosine_difference(x: np.ndarray, y: np.ndarray, finite: np.ndarray, fmt: DType) -> float:
    x, y = np.asarray(x, np.float64)[finite], y[finite]
    peak = max(float(np.abs(x).max(initial=0.0)), float(np.abs(y).max(initial=0.0)))
    if peak <= fmt.underflow:
        return 0.0
    x, y = x / peak, y / peak  # the squares of large or small vectors must not leave the range of float64
    # |x - y|^2 / (|x|^2 + |y|^2) is the same quantity without the cancellation of 1 - 2<x,y>/(...).
    return float(np.square(x - y).sum() / (np.square(x).sum() + np.square(y).sum()))


def _effective_number(y: np.ndarray) -> float:
    squares = np.square(y / max(float(np.abs(y).max(initial=0.0)), np.finfo(np.float64).tiny))
    return float(squares.sum() ** 2 / max(float(np.square(squares).sum()), np.finfo(np.float64).tiny))
