"""The op verdict: formats, each of its rules on its own, and that each can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shipway.numerics.dtypes import BF16, DTYPES, F16, F32, DType, bf16_to_f32, f32_to_bf16, ulps
from shipway.numerics.verdict import judge, judge_exact

RNG = np.random.default_rng(0)
# Ties, overflow thresholds, the smallest normal and subnormal numbers of bf16 and f16.
TIES = (0.0, -0.0, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11)
LIMITS = (65504, 65519.9, 65520, 3.3895e38, 3.3961e38, 2.0**-126, 2.0**-133, 1.5 * 2.0**-133, 2.0**-134, 2.0**-24)
INTERESTING = np.array([*TIES, *LIMITS, 2.0**-25, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [(BF16, torch.bfloat16), (F16, torch.float16)])
def test_rounding_is_the_hardware_one(dtype: DType, torch_dtype: torch.dtype) -> None:
    x = np.concatenate([INTERESTING, -INTERESTING, (RNG.standard_normal(4000) * 10.0 ** RNG.integers(-40, 39, 4000))])
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).to(torch_dtype).float().numpy()
    np.testing.assert_array_equal(dtype.round(x), expected)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(dtype.round(x))[number], np.signbit(expected)[number])


def test_rounding_from_float64_happens_once() -> None:
    # Just above a tie of bf16: rounding to float32 first would land on the tie and then round down to even.
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    assert BF16.round(x)[0] == 1 + 2.0**-7
    assert BF16.round(x.astype(np.float32))[0] == 1
    many = RNG.standard_normal(1000)
    np.testing.assert_array_equal(F32.round(many), many.astype(np.float32))


def test_bf16_storage_round_trips() -> None:
    x = np.concatenate([INTERESTING, RNG.standard_normal(1000).astype(np.float32)])
    np.testing.assert_array_equal(bf16_to_f32(f32_to_bf16(x)), BF16.round(x))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_ulps_count_representable_steps(dtype: DType) -> None:
    x = dtype.round(np.array([1.0, 1.5, -3.0, 0.1]))
    step = dtype.spacing(x)
    np.testing.assert_allclose(ulps(x + 3 * step, x, dtype), 3)
    assert ulps(dtype.round(np.array([0.3])), np.array([0.3]), dtype)[0] <= 0.5
    assert np.isnan(ulps(np.array([np.nan]), np.array([1.0]), dtype)[0])


def sample(shape: tuple[int, ...] = (16, 32)) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape)


def test_correct_rounding_passes_and_records_half_an_ulp() -> None:
    ref = sample()
    for name, dtype in DTYPES.items():
        verdict = judge(dtype.round(ref), ref, dtype.round(ref), name)
        assert verdict.ok, verdict.reason
        assert 0.4 < verdict.max_ulps <= 0.5
        assert verdict.elements == ref.size


def test_one_wrong_element_fails_with_its_index() -> None:
    ref = sample()
    out = F32.round(ref)
    out[3, 5] += 1e-3
    verdict = judge(out, ref, F32.round(ref), "f32", magnitude=np.abs(ref), reduction=32)
    assert not verdict.ok
    assert verdict.worst == (3, 5)
    assert "(3, 5)" in verdict.reason


def test_twice_the_base_error_is_allowed_and_not_more() -> None:
    ref = np.full((8, 64), 1.0)
    base = ref + 1e-4
    assert judge(ref + 1.9e-4, ref, base, "bf16", out_dtype="f32").ok
    assert not judge(ref + 2.1e-4, ref, base, "bf16", out_dtype="f32").ok


def test_a_priori_bound_saves_a_lucky_base() -> None:
    # One output, a base that is exact by luck: only the a-priori bound can pass a correct reordering.
    ref, out = np.array([1.0]), np.array([1 + 1e-6])
    assert not judge(out, ref, ref, "f32").ok
    assert judge(out, ref, ref, "f32", magnitude=np.array([26.0]), reduction=1040).ok
    assert not judge(ref + 1e-3, ref, ref, "f32", magnitude=np.array([26.0]), reduction=1040).ok


def test_error_spread_thin_fails_the_cosine_alone() -> None:
    # Every element is within the base's (bad) error; only the relative root mean square gives it away.
    ref = sample((64, 64))
    base = ref.copy()
    base[0, 0] += 1.0
    verdict = judge(ref * 1.01, ref, base, "bf16")
    assert not verdict.ok
    assert "cosine" in verdict.reason
    assert verdict.cosine_diff == pytest.approx(5e-5, rel=0.02)


def test_few_outputs_are_judged_by_the_bound_not_by_their_cancellation() -> None:
    ref = np.array([1e-3])
    out = ref + 1e-6  # relative error 1e-3, but tiny beside the terms that cancelled
    assert judge(out, ref, None, "f32", magnitude=np.array([30.0]), reduction=1000).ok
    assert not judge(out, ref, None, "f32", magnitude=np.array([0.1]), reduction=1000).ok


def test_few_outputs_may_be_four_roundings_away_beside_a_lucky_base() -> None:
    ref, u = np.array([1.5e-3]), BF16.unit_roundoff
    lucky = ref * (1 + 1.9 * u)
    assert judge(lucky, ref, ref, "bf16").ok
    assert not judge(np.full(64, 1.0) * (1 + 1.9 * u), np.full(64, 1.0), np.full(64, 1.0), "bf16").ok
    assert not judge(ref * (1 + 4.1 * u), ref, ref * (1 + 2 * u), "bf16", magnitude=1e-9).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_where_the_reference_is_finite_fails(bad: float) -> None:
    ref = sample()
    out = F32.round(ref)
    out[2, 2] = bad
    verdict = judge(out, ref, F32.round(ref), "f32")
    assert not verdict.ok
    assert verdict.worst == (2, 2)


@pytest.mark.parametrize(("expected", "found"), [(np.nan, 0.0), (np.inf, -np.inf), (np.inf, 1e30), (np.nan, np.inf)])
def test_non_finite_positions_must_be_the_same(expected: float, found: float) -> None:
    ref = sample()
    ref[0, 0] = expected
    out = F32.round(ref)
    assert judge(out, ref, out, "f32").ok
    out[0, 0] = found
    assert not judge(out, ref, F32.round(ref), "f32").ok


def test_overflow_is_expected_where_the_dtype_overflows() -> None:
    ref = np.array([1e5, 1.0])
    assert judge(np.array([np.inf, 1.0]), ref, None, "f16", magnitude=1.0).ok
    assert not judge(np.array([65504.0, 1.0]), ref, None, "f16", magnitude=1.0).ok
    assert judge(np.array([1e5, 1.0]), ref, None, "f16", magnitude=1.0, out_dtype="f32").ok


def test_unwritten_output_fails() -> None:
    ref = np.zeros((4, 4))
    assert judge(np.zeros((4, 4)), ref, ref, "f32").ok  # two zero vectors are equal
    assert not judge(np.full((4, 4), np.nan), ref, ref, "f32").ok


def test_non_finite_base_does_not_widen_the_bound() -> None:
    ref = sample()
    base = F32.round(ref)
    base[1, 1] = np.nan
    out = F32.round(ref)
    assert judge(out, ref, base, "f32").ok
    out[1, 1] += 1e-3
    assert not judge(out, ref, base, "f32").ok


def test_wrong_shape_fails_and_a_bound_is_required() -> None:
    ref = sample()
    assert "shape" in judge(ref[:1], ref, ref, "f32").reason
    with pytest.raises(ValueError, match="base, magnitude"):
        judge(ref, ref, None, "f32")
    with pytest.raises(ValueError, match="base has shape"):
        judge(ref, ref, ref[:1], "f32")


def test_no_outputs_pass() -> None:
    empty = np.zeros((0, 5))
    assert judge(empty, empty, empty, "f32").ok


def test_exact_means_every_bit() -> None:
    ids = np.array([3, 1, 2])
    assert judge_exact(ids, ids).ok
    assert judge_exact(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])).ok
    verdict = judge_exact(np.array([3, 1, 4]), ids)
    assert not verdict.ok
    assert verdict.worst == (2,)


def test_correct_reordered_sums_are_never_flaky() -> None:
    # The measured flakiness of the 2x rule alone: K = 1040, one output. With the a-priori bound none of 500 fails.
    rng = np.random.default_rng(2)
    failed = 0
    for _ in range(500):
        a, b = (rng.standard_normal(1040).astype(np.float32) for _ in range(2))
        ref = np.array([a.astype(np.float64) @ b])
        blocked = np.array([np.add.reduce((a * b).reshape(8, 130), 1, dtype=np.float32).sum(dtype=np.float32)])
        base = np.array([np.add.accumulate(a * b, dtype=np.float32)[-1]])
        magnitude = np.array([np.abs(a).astype(np.float64) @ np.abs(b)])
        failed += not judge(blocked, ref, base, "f32", magnitude=magnitude, reduction=1040).ok
    assert failed == 0


def test_a_base_that_is_wrong_itself_excuses_nothing() -> None:
    # RMSNorm of values whose squares overflow: PyTorch gives 0 too.
    ref = np.linspace(1.0, 2.0, 34).reshape(2, 17)
    zero = np.zeros_like(ref)
    assert not judge(zero, ref, zero, "f32", magnitude=ref, reduction=17).ok
    assert not judge(zero, ref, zero, "f32").ok
