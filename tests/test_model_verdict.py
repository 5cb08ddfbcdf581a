"""The model verdict: each rule can pass and fail. The float64 reference model: it is the published architecture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_checkpoints
from shipway.model.checkpoint import open_checkpoint
from shipway.numerics.model_verdict import LIMITS, NEAR_TIE, judge_model
from shipway.numerics.reference_model import reference_logits

TOKENS, VOCAB = 64, 50
RNG = np.random.default_rng(0)
REF = 3 * RNG.standard_normal((TOKENS, VOCAB))
TEXT = RNG.integers(0, VOCAB, TOKENS)


def noisy(size: float, seed: int = 1) -> np.ndarray:
    return (REF + size * np.random.default_rng(seed).standard_normal(REF.shape)).astype(np.float32)


def test_rounded_reference_passes_in_float32() -> None:
    verdict = judge_model(REF.astype(np.float32), REF, None, TEXT, "f32")
    assert verdict.ok, verdict.reason
    assert verdict.agreement == 1
    assert verdict.first_divergence is None
    assert verdict.kl_mean < 1e-12


def test_divergence_is_kl_of_reference_and_route() -> None:
    # Two tokens with p = (3/4, 1/4) against q = (1/2, 1/2): ln 2 - H(p), by hand.
    ref = np.log([[3.0, 1.0], [3.0, 1.0]])
    verdict = judge_model(np.zeros((2, 2)), ref, None, np.array([0, 1]), "bf16")
    assert verdict.kl_mean == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert verdict.delta_nll_mean == pytest.approx(np.log(2))  # the second token, of probability 1/4 against 1/2
    assert verdict.nll == pytest.approx(np.log(4))


def test_shifted_logits_are_the_same_distribution() -> None:
    assert judge_model(REF + 5, REF, None, TEXT, "f32").kl_mean == pytest.approx(0, abs=1e-14)


def swapped(margin: float) -> tuple[np.ndarray, np.ndarray]:
    """A reference whose top two of row 7 are ``margin`` apart, and a route that prefers the other one."""
    ref = REF.copy()
    order = np.argsort(ref[7])
    ref[7, order[-2]] = ref[7, order[-1]] - margin
    route = ref.copy()
    route[7, order[-2]] = ref[7, order[-1]] + 1e-7
    return ref, route


def test_near_tie_is_reported_with_its_margin_and_passes() -> None:
    ref, route = swapped(NEAR_TIE / 10)
    verdict = judge_model(route, ref, None, TEXT, "f32")
    assert verdict.ok, verdict.reason
    (tie,) = verdict.near_ties
    assert tie == verdict.first_divergence
    assert tie.position == 7
    assert tie.margin == pytest.approx(NEAR_TIE / 10)
    assert tie.top2_margin == pytest.approx(NEAR_TIE / 10)


def test_other_token_beyond_a_near_tie_fails_in_float32() -> None:
    ref, route = swapped(2 * NEAR_TIE)
    verdict = judge_model(route, ref, None, TEXT, "f32")
    assert not verdict.ok
    assert "greedy" in verdict.reason
    assert "at 7" in verdict.reason
    assert not verdict.near_ties


def test_bf16_error_fails_the_float32_limit() -> None:
    verdict = judge_model(noisy(1e-2), REF, None, TEXT, "f32")
    assert not verdict.ok
    assert "limit" in verdict.reason


@pytest.mark.parametrize("dtype", LIMITS)
def test_baseline_alone_fails_at_its_absolute_limit(dtype: str) -> None:
    assert not judge_model(noisy(1.0), REF, None, TEXT, dtype).ok
    assert judge_model(noisy(1e-6), REF, None, TEXT, dtype).ok


def test_better_than_plain_pytorch_passes_and_equal_passes() -> None:
    base = noisy(0.02)
    for route in (noisy(0.01, seed=2), base):
        verdict = judge_model(route, REF, base, TEXT, "bf16")
        assert verdict.ok, verdict.reason
        assert verdict.kl_excess is not None
        assert verdict.kl_excess <= 0


def test_worse_than_plain_pytorch_fails() -> None:
    verdict = judge_model(noisy(0.04, seed=2), REF, noisy(0.02), TEXT, "bf16")
    assert not verdict.ok
    assert "plain PyTorch" in verdict.reason


def test_worse_nll_alone_fails() -> None:
    # The route is better everywhere but at the tokens of the text, where each is pushed down: KL barely sees it.
    base, route = noisy(0.02), noisy(0.001, seed=2)
    route[np.arange(TOKENS - 1), TEXT[1:]] -= 0.05
    verdict = judge_model(route, REF, base, TEXT, "bf16")
    assert not verdict.ok
    assert "NLL" in verdict.reason


def test_broken_baseline_does_not_excuse_a_broken_route() -> None:
    assert "limit" in judge_model(noisy(1.0), REF, noisy(2.0), TEXT, "bf16").reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail(bad: float) -> None:
    route = noisy(1e-6)
    route[5, 5] = bad
    assert "finite" in judge_model(route, REF, None, TEXT, "f32").reason
    assert "baseline" in judge_model(noisy(1e-6), REF, route, TEXT, "bf16").reason


def test_bootstrap_is_repeatable_and_the_verdict_is_plain_data() -> None:
    verdicts = [judge_model(noisy(0.01, 2), REF, noisy(0.02), TEXT, "bf16") for _ in range(2)]
    assert verdicts[0] == verdicts[1]
    json.dumps(dataclasses.asdict(verdicts[0]))


def test_mismatched_shapes_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="route"):
        judge_model(REF[:1], REF, None, TEXT, "f32")
    with pytest.raises(ValueError, match="baseline"):
        judge_model(REF, REF, REF[:1], TEXT, "bf16")
    with pytest.raises(ValueError, match="tokens"):
        judge_model(REF, REF, None, TEXT[:3], "f32")


@pytest.fixture(scope="module", params=["llama2", "llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "smollm2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))


def test_reference_model_is_the_published_architecture(tiny: Path) -> None:
    tokens = np.random.default_rng(3).integers(3, 300, 40)
    model = tiny_checkpoints.reference(tiny).double()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    logits = reference_logits(open_checkpoint(tiny), tokens)
    assert logits.dtype == np.float64
    # transformers takes cos and sin in float32 even in a float64 model; nothing else differs.
    np.testing.assert_allclose(logits, expected, atol=3e-6 * np.abs(expected).max(), rtol=0)


def test_reference_model_refuses_tokens_outside_the_vocabulary(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    for tokens in ([], [checkpoint.config.vocab_size], [-1], [[1, 2]]):
        with pytest.raises(ValueError, match="tokens"):
            reference_logits(checkpoint, np.array(tokens, np.int64))
