import re

import numpy as np
import pytest

from shipway.errors import ShipwayError
from shipway.ops.sample import accepted
from shipway.sampler import Sampler, Sampling

RNG = np.random.default_rng(7)


def draws(logits: np.ndarray, count: int, **options: float) -> list[int]:
    sampler = Sampler(Sampling(**options), len(logits))
    return [sampler.choose(logits) for _ in range(count)]


def kept(logits: list[float], **options: float) -> list[int]:
    """Ids that may be chosen, most probable first."""
    ids, _ = Sampler(Sampling(temperature=1.0, **options), len(logits)).candidates(np.array(logits, np.float64))
    return ids.tolist()


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id() -> None:
    assert draws(np.array([1.0, 3.0, 3.0, 2.0]), 3) == [1, 1, 1]


def test_tiny_temperature_is_the_greedy_choice_without_overflow() -> None:
    logits = np.array([-1e30, 3e38, 2e38, 0.0], np.float32)
    with np.errstate(all="raise", under="ignore", over="raise"):
        assert draws(logits, 5, temperature=1e-300) == [1] * 5


def test_draws_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    counts = np.bincount(draws(logits, 20_000, temperature=1.0, seed=3), minlength=4) / 20_000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.015


def test_temperature_divides_the_logits() -> None:
    logits = np.log(np.array([0.8, 0.2]))
    warm = np.bincount(draws(logits, 20_000, temperature=2.0), minlength=2) / 20_000
    assert abs(warm[0] - 2 / 3) < 0.015  # sqrt(0.8) : sqrt(0.2) = 2 : 1


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id() -> None:
    assert kept([1, 2, 2, 2, 0], top_k=2) == [1, 2]
    assert kept([1, 2, 3], top_k=1) == [2]
    assert kept([1, 2, 3], top_k=99) == [2, 1, 0]
    assert kept([1, 2, 3], top_k=0) == [2, 1, 0]


def test_top_k_of_a_large_vocabulary_is_that_of_a_full_sort() -> None:
    logits = np.round(RNG.normal(size=50_000), 2)  # rounding makes ties
    expected = np.lexsort((np.arange(50_000), -logits))[:137].tolist()
    assert kept(logits.tolist(), top_k=137) == expected


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert kept(logits, top_p=0.49) == [0]
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]  # of the equal ones the lower id
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-12) == [0]


def test_top_p_counts_mass_after_top_k() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, top_k=2, top_p=0.55) == [0]  # 0.4 / 0.7 already exceeds it


def test_excluded_tokens_are_never_drawn() -> None:
    logits = RNG.normal(size=100)
    allowed = set(kept(logits.tolist(), top_k=20, top_p=0.8))
    assert set(draws(logits, 3000, temperature=1.0, top_k=20, top_p=0.8)) <= allowed


def test_seed_decides_the_sequence() -> None:
    logits = RNG.normal(size=1000)
    assert draws(logits, 20, temperature=1.0, seed=5) == draws(logits, 20, temperature=1.0, seed=5)
    assert draws(logits, 20, temperature=1.0, seed=5) != draws(logits, 20, temperature=1.0, seed=6)


@pytest.mark.parametrize("slot", [0, 1, 6])
def test_choice_does_not_depend_on_the_batch_slot(slot: int) -> None:
    row = RNG.normal(size=500).astype(np.float32)
    batch = RNG.normal(size=(500, 7)).astype(np.float32).T  # rows that are not contiguous either
    batch[slot] = row
    alone = Sampler(Sampling(temperature=0.9, top_p=0.9, seed=1), 500)
    inside = Sampler(Sampling(temperature=0.9, top_p=0.9, seed=1), 500)
    assert [alone.choose(row) for _ in range(30)] == [inside.choose(batch[slot]) for _ in range(30)]


def test_ids_past_the_vocabulary_are_never_chosen() -> None:
    logits = np.array([0.0, 1.0, 50.0, 60.0])
    assert Sampler(Sampling(), 2).choose(logits) == 1
    sampler = Sampler(Sampling(temperature=10.0), 2)
    assert {sampler.choose(logits) for _ in range(200)} == {0, 1}


@pytest.mark.parametrize("bad", [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_a_token(bad: list[float], temperature: float) -> None:
    with pytest.raises(ShipwayError, match="no token can be chosen"):
        Sampler(Sampling(temperature), 2).choose(np.array(bad))


def test_masked_logits_are_fine() -> None:
    assert set(draws(np.array([-np.inf, 0.0, -np.inf]), 50, temperature=1.0)) == {1}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_p": float("nan")},
        {"temperature": 1.0, "seed": -1},
        {"top_k": 5},
        {"top_p": 0.9},
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ShipwayError):
        Sampling(**options)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed"])
@pytest.mark.parametrize("value", ["1", None, True, [1], 1j])
def test_what_is_no_number_is_refused_with_its_value(name: str, value: object) -> None:
    options = {"temperature": 1.0} | {name: value}
    with pytest.raises(ShipwayError, match=f"{name.replace('_', '-')} must be.* not {re.escape(repr(value))}"):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_what_is_no_whole_number_is_refused(name: str) -> None:
    with pytest.raises(ShipwayError, match=r"a whole number .* not 2\.5"):
        Sampling(temperature=1.0, **{name: 2.5})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    Sampling(np.float32(0.5), np.int64(3), np.float64(0.9), np.int32(1))  # type: ignore[arg-type]


def test_every_draw_is_one_that_the_definition_accepts() -> None:
    for seed in range(60):
        logits = (RNG.standard_normal(90) * (1, 5)[seed % 2]).astype(np.float32)
        options = {
            "temperature": (0.3, 1.0, 1.7)[seed % 3],
            "top_k": (0, 1, 7)[seed % 3],
            "top_p": (1.0, 0.9, 0.5)[seed % 3],
        }
        sampler = Sampler(Sampling(seed=seed, **options), 80)
        uniform = float(np.random.default_rng(seed).random())
        assert accepted(logits, uniform, vocab=80, **options)[sampler.choose(logits)]
