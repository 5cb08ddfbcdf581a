import numpy as np
import pytest

from shipway.errors import ShipwayError
from shipway.measure import limits
from shipway.measure.prices import choose_price, usd_per_million
from shipway.measure.stats import Estimate, estimate, ratio_per_round
from shipway.model.config import ModelConfig


def config(**changes: object) -> ModelConfig:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 10,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    return ModelConfig.from_hf(fields | changes)


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = sum(not estimate(rng.normal(3.0, 1.0, 15).tolist()).excludes(3.0) for _ in range(300))
    assert 270 <= hits <= 299


def test_estimate_is_reproducible_and_ordered() -> None:
    samples = [3.0, 1.0, 2.0, 5.0, 4.0]
    first = estimate(samples)
    assert first == estimate(samples)
    assert first.median == 3.0
    assert first.low is not None
    assert first.high is not None
    assert 1.0 <= first.low <= first.median <= first.high <= 5.0


def test_equal_samples_have_an_interval_of_no_width() -> None:
    assert estimate([2.0] * 5) == Estimate(2.0, 2.0, 2.0)


def test_fewer_than_three_samples_have_no_interval_and_exclude_nothing() -> None:
    assert estimate([1.0, 2.0]) == Estimate(1.5, None, None)
    assert not estimate([1.0, 2.0]).excludes(100.0)
    with pytest.raises(ValueError, match="no samples"):
        estimate([])


def test_ratio_per_round_cancels_a_drift_that_hits_both() -> None:
    drift = {0: 1.0, 1: 3.0, 2: 0.5, 3: 2.0}
    ratio = ratio_per_round({r: 2 * x for r, x in drift.items()}, drift)
    assert ratio == Estimate(2.0, 2.0, 2.0)


def test_ratio_takes_only_rounds_both_have() -> None:
    assert ratio_per_round({0: 4.0, 1: 9.0}, {0: 2.0, 2: 1.0}) == Estimate(2.0, None, None)
    assert ratio_per_round({0: 4.0}, {1: 2.0}) is None


def test_decode_bytes_count_weights_head_and_cache() -> None:
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12  # q, k, v, o; gate, up, down
    matrices = 2 * layer + 10 * 8
    vectors = (2 * 2 + 1) * 8
    assert limits.weight_bytes_per_token(config(), "bf16") == 2 * matrices + 2 * 8 + 4 * vectors
    # A prompt of 5 and 3 new tokens decode at 6 and 7 tokens in the cache; K and V, 2 layers, 2 heads of 2, 4 bytes.
    cache = 6.5 * 2 * 2 * 2 * 2 * 4
    assert limits.decode_bytes(config(), "f32", "bf16", 5, 3) == limits.weight_bytes_per_token(config(), "bf16") + cache


def test_sliding_window_bounds_what_is_read_and_computed() -> None:
    windowed = config(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=4, tie_word_embeddings=False
    )
    assert limits.kv_bytes(windowed, "f32", 40) == limits.kv_bytes(windowed, "f32", 4)
    assert limits.prefill_flops(windowed, 20) < limits.prefill_flops(config(), 20)


def test_prefill_flops_by_hand() -> None:
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 12
    pairs = 1 + 2 + 3
    attention = 2 * pairs * 4 * 2 * 4  # QK^T and PV: 4 FLOPs per pair, head and channel; 2 layers
    assert limits.prefill_flops(config(), 3) == 2 * 3 * 2 * layer + attention + 2 * 10 * 8


def test_usd_per_million_tokens() -> None:
    assert usd_per_million(3.6, 1000.0) == pytest.approx(1.0)


def test_price_is_that_of_the_smallest_machine_with_enough_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert choose_price(2, None).machine == "c7a.large"
    assert choose_price(3, None).machine == "c7a.xlarge"
    with pytest.raises(ShipwayError, match="--price"):
        choose_price(10_000, None)


def test_price_can_be_a_number_or_a_row() -> None:
    assert choose_price(2, "0.5").usd_per_hour == 0.5
    assert choose_price(2, "m7g.xlarge").usd_per_hour == 0.1632
    for wrong in ("cheap", "0", "-1", "nan", "inf"):
        with pytest.raises(ShipwayError, match="--price"):
            choose_price(2, wrong)


def test_price_says_where_it_comes_from_and_whether_that_was_checked() -> None:
    assert "2026-06-17" in choose_price(1, "m7g.large").source
    assert "not checked" in choose_price(1, "c7a.large").source
