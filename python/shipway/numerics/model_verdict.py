"""The verdict on a route's teacher-forced logits over a fixed text, against the float64 reference model.

Every route, the plain PyTorch baseline included, must stay under an absolute limit on its mean KL divergence and mean
|delta NLL| (:data:`LIMITS`): a baseline has nothing else to be compared with, and a route must not pass by being
compared with a broken one. Then, by dtype:

- float32 routes agree with the reference in every greedy token. A disagreement where the reference itself prefers its
  own token by at most :data:`NEAR_TIE` is a near-tie: reported with its margin, not a failure.
- reduced-precision routes are not worse than plain PyTorch in the same dtype: for the KL divergence and for
  |delta NLL| alike, the upper 95% bootstrap bound of the mean per-token difference (route - baseline) is at most 5% of
  the baseline's mean plus 1e-6 nats.

KL is ``sum p_ref (log p_ref - log p_route)``, in nats, all in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NEAR_TIE = 1e-3
"""Logit margin up to which a float32 route may choose the other token: twenty times the largest logit error of plain
PyTorch in float32 on SmolLM2-135M (5e-5 over 256 tokens)."""

LIMITS = {"f32": (1e-8, 1e-4), "bf16": (0.02, 0.15), "f16": (3e-4, 0.02)}
"""Mean KL and mean |delta NLL|, in nats, that no route in that dtype may reach. On SmolLM2-135M plain PyTorch measures
5e-12 and 2e-6 in float32, 8e-4 and 0.03 in bf16: the limits allow 40 times that error in float32 (deeper models, other
summation orders) and 5 times in bf16 (KL grows with the square); f16 rounds 8 times finer than bf16."""

MARGIN, FLOOR = 0.05, 1e-6  # of the baseline's error; nats
RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True)
class Divergence:
    """A position where the route's greedy token is not the reference's.

    Attributes:
        position: Row of the logits.
        reference: The reference's token.
        route: The route's token.
        margin: How much higher the reference rates its own token than the route's, in logits.
        top2_margin: Distance of the reference's two highest logits.
    """

    position: int
    reference: int
    route: int
    margin: float
    top2_margin: float


@dataclass(frozen=True)
class ModelVerdict:
    """What :func:`judge_model` found. Divergences and NLL are in nats.

    Attributes:
        ok: Whether every rule held.
        reason: One line: the rule that failed and by how much; empty when ``ok``.
        dtype: Dtype the route was judged in.
        positions: Rows judged.
        kl_mean: Mean over rows of KL(reference || route).
        kl_max: Its maximum.
        delta_nll_mean: Mean of |NLL_route - NLL_reference| over the next tokens.
        delta_nll_max: Its maximum.
        nll: The reference's mean NLL of the text, so that the text itself can be judged.
        max_logit_error: Largest |logit - reference|.
        agreement: Share of rows with the reference's greedy token.
        near_ties: Disagreements within :data:`NEAR_TIE`.
        first_divergence: First disagreement of any margin, or ``None``.
        kl_excess: Upper bootstrap bound of the mean KL above the baseline's, or ``None`` without a baseline.
        delta_nll_excess: The same for |delta NLL|.
        base_kl_mean: The baseline's mean KL, or ``None``.
        base_delta_nll_mean: The baseline's mean |delta NLL|, or ``None``.
    """

    ok: bool
    reason: str
    dtype: str
    positions: int
    kl_mean: float
    kl_max: float
    delta_nll_mean: float
    delta_nll_max: float
    nll: float
    max_logit_error: float
    agreement: float
    near_ties: tuple[Divergence, ...]
    first_divergence: Divergence | None
    kl_excess: float | None
    delta_nll_excess: float | None
    base_kl_mean: float | None
    base_delta_nll_mean: float | None


def judge_model(
    route_logits: np.ndarray,
    ref_logits: np.ndarray,
    base_logits: np.ndarray | None,
    tokens: np.ndarray,
    dtype: str,
) -> ModelVerdict:
    """Judges teacher-forced logits by the rules above.

    Args:
        route_logits: ``[S, vocab_size]``, float32; row i predicts token i + 1.
        ref_logits: float64 reference of the same shape.
        base_logits: Plain PyTorch's logits in the same dtype; ``None`` for the baseline itself and for float32.
        tokens: The text ``[S]``.
        dtype: ``"f32"``, ``"bf16"`` or ``"f16"``.

    Raises:
        ValueError: Shapes do not match, or fewer than two tokens are given.
    """
    tokens = np.asarray(tokens)
    for name, logits in (("route", route_logits), ("baseline", base_logits)):
        if logits is not None and np.shape(logits) != np.shape(ref_logits):
            raise ValueError(f"{name} logits have shape {np.shape(logits)}, the reference {np.shape(ref_logits)}")
    if tokens.shape != np.shape(ref_logits)[:1] or len(tokens) < 2:
        raise ValueError(f"{np.shape(ref_logits)} logits need as many tokens, at least 2, not {tokens.shape}")

    route = _Errors.of(route_logits, ref_logits, tokens)
    base = None if base_logits is None else _Errors.of(base_logits, ref_logits, tokens)
    divergences = _divergences(route_logits, ref_logits)
    near_ties = tuple(d for d in divergences if d.margin <= NEAR_TIE)
    kl_excess = nll_excess = None
    if base is not None and base.finite and route.finite:
        kl_excess, nll_excess = (_upper_bound(a - b) for a, b in ((route.kl, base.kl), (route.nll, base.nll)))

    return ModelVerdict(
        ok=not (reason := _reason(route, base, divergences, kl_excess, nll_excess, dtype)),
        reason=reason,
        dtype=dtype,
        positions=len(tokens),
        kl_mean=float(route.kl.mean()),
        kl_max=float(route.kl.max()),
        delta_nll_mean=float(route.nll.mean()),
        delta_nll_max=float(route.nll.max()),
        nll=route.text_nll,
        max_logit_error=route.logit,
        agreement=1 - len(divergences) / len(tokens),
        near_ties=near_ties,
        first_divergence=divergences[0] if divergences else None,
        kl_excess=kl_excess,
        delta_nll_excess=nll_excess,
        base_kl_mean=None if base is None else float(base.kl.mean()),
        base_delta_nll_mean=None if base is None else float(base.nll.mean()),
    )


@dataclass(frozen=True)
class _Errors:
    """Per-token errors of one set of logits: KL ``[S]``, |delta NLL| ``[S - 1]``, largest logit error."""

    kl: np.ndarray
    nll: np.ndarray
    logit: float
    text_nll: float
    finite: bool

    @classmethod
    def of(cls, logits: np.ndarray, ref_logits: np.ndarray, tokens: np.ndarray) -> _Errors:
        kl, nll, text, worst = np.empty(len(tokens)), np.empty(len(tokens) - 1), 0.0, 0.0
        for row in range(len(tokens)):  # one row at a time: whole float64 copies of the logits are 100 MB each
            ref = np.asarray(ref_logits[row], np.float64)
            out = np.asarray(logits[row], np.float64)
            log_ref, log_out = _log_softmax(ref), _log_softmax(out)
            kl[row] = np.exp(log_ref) @ (log_ref - log_out)
            worst = np.maximum(worst, np.abs(out - ref).max())  # NaN stays
            if row + 1 < len(tokens):
                nll[row] = abs(log_out[tokens[row + 1]] - log_ref[tokens[row + 1]])
                text -= log_ref[tokens[row + 1]]
        return cls(kl, nll, float(worst), float(text / len(nll)), bool(np.isfinite(worst)))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which the verdict names
        shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def _divergences(route: np.ndarray, ref: np.ndarray) -> list[Divergence]:
    found = []
    chosen, wanted = np.argmax(route, 1), np.argmax(ref, 1)
    for row in np.flatnonzero(chosen != wanted):
        logits = np.asarray(ref[row], np.float64)
        second, first = np.partition(logits, -2)[-2:]
        a, b = int(wanted[row]), int(chosen[row])
        found.append(Divergence(int(row), a, b, float(logits[a] - logits[b]), float(first - second)))
    return found


def _upper_bound(difference: np.ndarray) -> float:
    """One-sided upper 95% percentile bootstrap bound of a mean of paired per-token differences."""
    rng = np.random.default_rng(SEED)
    means = [difference[rng.integers(0, len(difference), len(difference))].mean() for _ in range(RESAMPLES)]
    return float(np.quantile(means, 0.95))


def _reason(
    route: _Errors,
    base: _Errors | None,
    divergences: list[Divergence],
    kl_excess: float | None,
    nll_excess: float | None,
    dtype: str,
) -> str:
    if not route.finite:
        return "logits are not finite"
    for name, errors, limit in zip(("KL", "|delta NLL|"), (route.kl, route.nll), LIMITS[dtype], strict=True):
        if errors.mean() >= limit:
            return f"mean {name} {errors.mean():.3g} nats reaches the limit of {limit:g} for {dtype}"
    if dtype == "f32":
        far = [d for d in divergences if d.margin > NEAR_TIE]
        if far:
            d = far[0]
            return (
                f"{len(far)} greedy tokens differ beyond near-ties, first at {d.position}: {d.route} instead of "
                f"{d.reference}, margin {d.margin:.3g}"
            )
        return ""
    if base is None:
        return ""
    if kl_excess is None or nll_excess is None:
        return "the baseline's logits are not finite: nothing to compare with"
    pairs = (("KL", kl_excess, base.kl), ("|delta NLL|", nll_excess, base.nll))
    for name, excess, errors in pairs:
        allowed = MARGIN * float(errors.mean()) + FLOOR
        if excess > allowed:
            return (
                f"mean {name} may exceed plain PyTorch's {errors.mean():.3g} by {excess:.3g} nats "
                f"(upper 95% bound), more than {allowed:.3g}"
            )
    return ""
