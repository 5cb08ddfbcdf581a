"""The float64 references against facts that do not come from them: PyTorch in float64, complex numbers, hand counts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from shipway.numerics.check import OpRunner
from shipway.numerics.dtypes import BF16
from shipway.ops import data
from shipway.ops.attention_reference import attend, visible
from shipway.ops.catalogue import OPS
from shipway.ops.gate_up_silu import silu
from shipway.ops.greedy import reference as greedy_reference
from shipway.ops.implementations import SIMULATED
from shipway.ops.op import Case
from shipway.ops.packed import pack, unpacked
from shipway.ops.qkv_rope_append import positions_of
from shipway.ops.rms_norm import rms_norm
from shipway.ops.rope import rotate, table_of
from shipway.signature import MATRICES, WORDS

RNG = np.random.default_rng(0)
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def default_case(name: str, **dims: int) -> Case:
    drawn = {key: max(dim.low, min(3, dim.high)) for key, dim in OPS[name].dims.items()}
    return Case({**drawn, **({"head_dim": 16} if "head_dim" in drawn else {}), **dims}, seed=1)


def test_the_catalogue_holds_every_op_with_its_rows() -> None:
    assert list(OPS) == [
        "embedding",
        "rms_norm",
        "rope",
        "qkv_rope_append",
        "attention_prefill",
        "attention_decode",
        "linear",
        "linear_residual",
        "gate_up_silu",
        "mlp",
        "lm_head",
        "greedy",
        "sample",
        *(f"{op}_{word}" for word in WORDS for op in MATRICES),
    ]
    for name, op in OPS.items():
        assert op.name == name
        if name.endswith(WORDS):  # GPU kernels only
            assert set(op.implementations) == {"torch", "mojo-gpu", *(f"mojo@{target}" for target in SIMULATED)}
            continue
        assert set(op.implementations) >= {"torch", "mojo"}
        assert op.implementations["mojo"].known == (), "our own kernels have no known failures"
        assert op.implementations["mojo"].bitwise


def test_what_a_row_asks_to_install_is_what_the_project_pins() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    pins = {*project["dependencies"], *(pin for extra in project["optional-dependencies"].values() for pin in extra)}
    for op in OPS.values():
        for row in op.implementations.values():
            assert row.install
            assert set(row.install.split()) <= pins, row.name


def test_rms_norm_is_pytorchs_in_float64() -> None:
    x, weight = RNG.standard_normal((5, 37)), RNG.standard_normal(37)
    expected = functional.rms_norm(torch.from_numpy(x), (37,), torch.from_numpy(weight), 1e-3).numpy()
    np.testing.assert_allclose(rms_norm(x, weight, 1e-3), expected, **CLOSE)


def test_silu_is_pytorchs_in_float64_and_survives_large_arguments() -> None:
    a = np.concatenate([RNG.standard_normal(100) * 10, [0.0, 800.0, -800.0]])
    np.testing.assert_allclose(silu(a), functional.silu(torch.from_numpy(a)).numpy(), **CLOSE)


def test_visible_counts_by_hand() -> None:
    # Rows: queries; bottom-right: the last query sees the last key.
    assert visible(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(2, 4, window=2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert visible(3, 2).sum(1).tolist() == [0, 1, 2]
    assert visible(4, 20).sum(1).tolist() == [17, 18, 19, 20]
    assert visible(10, 4).sum(1).tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert visible(2, 3, causal=False).all()
    for window in (7, 8, 9):  # a context of 8 reaches a window of 8 exactly
        assert visible(8, 8, window)[-1].sum() == min(window, 8)


@pytest.mark.parametrize(("queries", "keys"), [(10, 4), (4, 20), (1, 1), (7, 7), (1, 9)])
@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_attend_is_pytorchs_in_float64_under_the_same_mask(queries: int, keys: int, window: int) -> None:
    q, k, v = (RNG.standard_normal((n, h, 16)) for n, h in ((queries, 6), (keys, 2), (keys, 2)))
    mask = visible(queries, keys, window)
    tensors = [torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k.repeat(3, 1), v.repeat(3, 1))]
    expected = functional.scaled_dot_product_attention(*tensors, torch.from_numpy(mask), scale=0.3)[0]
    out = attend(q, k, v, 0.3, window)
    seen = mask.any(1)
    np.testing.assert_allclose(out[seen], expected.transpose(0, 1).numpy()[seen], **CLOSE)
    assert (out[~seen] == 0).all()


def test_attend_ignores_nan_that_no_query_sees() -> None:
    q, k, v = (RNG.standard_normal((n, 2, 16)) for n in (2, 5, 5))
    k[4], v[4] = np.nan, np.nan  # seen by the last query only
    out = attend(q, k, v, 0.25)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x = RNG.standard_normal((4, 3, 16))
    angle = RNG.uniform(0, 6, (9, 8))
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    at = np.array([0, 8, 3, 3])
    expected = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle[at])[:, None]
    np.testing.assert_allclose(rotate(x, table, at), np.concatenate([expected.real, expected.imag], -1), **CLOSE)


def test_partial_rotary_passes_the_rest_through() -> None:
    x = RNG.standard_normal((2, 1, 16))
    out = rotate(x, table_of(5, 8, 1e4), np.array([0, 4]))
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(out[0], x[0])
    assert not np.allclose(out[1, :, :8], x[1, :, :8])


def test_rope_table_turns_the_first_pair_by_one_radian_per_position() -> None:
    table = table_of(4, 6, 1e4)
    np.testing.assert_allclose(table[3, [0, 3]], [np.cos(3), np.sin(3)], rtol=1e-6)
    np.testing.assert_allclose(table[3, [2, 5]], [np.cos(3 * 1e4 ** (-4 / 6)), np.sin(3 * 1e4 ** (-4 / 6))], rtol=1e-6)


def test_positions_continue_each_sequence() -> None:
    assert positions_of(np.array([0, 2, 2, 5]), np.array([7, 9, 0])).tolist() == [7, 8, 0, 1, 2]


def test_greedy_by_hand() -> None:
    nan, inf = np.nan, np.inf
    rows = np.array([[1, 3, 3], [nan, -5, nan], [nan, nan, nan], [-inf, -inf, -inf], [-inf, nan, 0], [1, inf, inf]])
    assert greedy_reference(rows)["ids"].value.tolist() == [1, 1, 0, 0, 2, 1]


def test_matrix_ops_on_integers_are_exact() -> None:
    x, w = (RNG.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 7), (5, 7)))
    residual = RNG.integers(-9, 9, (3, 5)).astype(np.float32)
    product = torch.from_numpy(x).long() @ torch.from_numpy(w).long().T
    np.testing.assert_array_equal(OPS["linear"].reference(x, w)["out"].value, product)
    with_residual = OPS["linear_residual"].reference(x, w, residual)["out"].value
    np.testing.assert_array_equal(with_residual, product + torch.from_numpy(residual))
    rows = np.array([2, 0, 2])
    np.testing.assert_array_equal(OPS["lm_head"].reference(x, w, rows)["out"].value, product[rows])


def test_packed_elements_by_hand() -> None:
    scales = np.array([[0.5, 2.0]], np.float16)
    bytes_ = np.zeros((1, 33), np.int8)
    bytes_[0, [0, 31, 32]] = -128, 3, -1
    assert unpacked(33, bytes_, scales)[0, [0, 31, 32]].tolist() == [-64, 1.5, -2]
    halves = np.zeros((1, 17), np.uint8)
    halves[0, [0, 15, 16]] = 0x2F, 0x10, 0xF7  # the low half first; the last high half is of nothing
    zeros = np.array([[8, 200]], np.uint8)
    assert unpacked(33, halves, scales, zeros)[0, [0, 1, 31, 32]].tolist() == [3.5, -3, -3.5, -386]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("columns", [1, 31, 32, 65])
def test_packing_is_about_a_step_off_at_most(word: str, columns: int) -> None:
    w = RNG.standard_normal((9, columns)).astype(np.float32)
    w[0] = 0
    packed = pack(w, word)
    steps = np.repeat(packed[1].astype(np.float64), 32, axis=1)[:, :columns]
    # Half for the element, half for int4's zero point or for +128, which int8 lacks; the float16 scale is rounded.
    assert (np.abs(unpacked(columns, *packed) - w) <= 1.1 * steps).all()


@pytest.mark.parametrize("name", OPS)
def test_float32_pytorch_stays_within_the_a_priori_bound(name: str) -> None:
    # Two independent derivations of one op: the float64 reference and the PyTorch row agree to float32's last bits.
    runner = OpRunner(OPS[name], OPS[name].implementations["torch"], "f32")
    inputs = runner.inputs(default_case(name))
    verdict = runner.judged(inputs, runner(inputs))
    assert verdict.ok, verdict.reason
    assert verdict.max_ulps < 20


def test_qkv_reference_is_the_transformers_formula() -> None:
    op = OPS["qkv_rope_append"]
    case = default_case("qkv_rope_append", rotary_quarters=4, bias=1, norm=1, B=1, length=4, start=2)
    inputs = OpRunner(op, op.implementations["torch"], "f32").inputs(case)
    t = {name: torch.from_numpy(x).double() if isinstance(x, np.ndarray) else x for name, x in inputs.items()}
    half = t["table"].shape[1] // 2
    cos, sin = (t["table"][2:6, part].repeat(1, 2)[:, None] for part in (slice(half), slice(half, None)))

    def heads(name: str) -> torch.Tensor:
        return (t["x"] @ t[f"w{name}"].T + t[f"bias_{name}"]).unflatten(1, (-1, 16))

    def rotated(name: str) -> torch.Tensor:
        y = functional.rms_norm(heads(name), (16,), t[f"norm_{name}"], inputs["eps"])
        turned = torch.cat([-y[..., half:], y[..., :half]], -1)  # rotate_half
        return y * cos + turned * sin

    found = op.reference(**inputs)
    np.testing.assert_allclose(found["q"].value, rotated("q"), **CLOSE)
    cache, layer = found["cache"].value, inputs["layer"]
    np.testing.assert_allclose(cache[0, layer, 0, 2:6], rotated("k"), **CLOSE)
    np.testing.assert_allclose(cache[0, layer, 1, 2:6], heads("v"), **CLOSE)
    assert np.isfinite(cache[0, layer, :, :6]).all()
    assert np.isnan(cache[0, layer, :, 6:]).all()


@pytest.mark.parametrize("name", OPS)
def test_drawn_activations_hold_only_values_of_the_dtype(name: str) -> None:
    op = OPS[name]
    inputs = OpRunner(op, op.implementations["torch"], "bf16").inputs(default_case(name))
    for argument in op.activations:
        np.testing.assert_array_equal(inputs[argument], BF16.round(inputs[argument]))


def test_unwritten_cache_slots_are_poisoned() -> None:
    inputs = OPS["attention_decode"].draw(default_case("attention_decode", B=2), np.random.default_rng(4))
    cache, start, layer = inputs["cache"], inputs["start"], inputs["layer"]
    for b in range(2):
        assert np.isfinite(cache[b, layer, :, : start[b] + 1]).all()
        assert np.isnan(cache[b, layer, :, start[b] + 1 :]).all()
        assert np.isnan(np.delete(cache[b], layer, axis=0)).all()


def test_case_line_round_trips() -> None:
    case = Case({"T": 3, "K": 576}, 7, 1e-4, "spike", "transposed")
    assert str(case) == "T=3 K=576 seed=7 scale=0.0001 distribution=spike layout=transposed"
    assert Case.parse(str(case)) == case
    assert Case.parse("T=3,K=576 seed=7") == Case({"T": 3, "K": 576}, 7)
    with pytest.raises(ValueError, match="name=value"):
        Case.parse("T=3 oops")


@pytest.mark.parametrize("distribution", data.FILLS)
def test_fills_are_reproducible_finite_and_scale(distribution: str) -> None:
    once, again, wider = (data.fill(np.random.default_rng(5), (4, 9), distribution, scale) for scale in (1.0, 1.0, 4.0))
    np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(wider, 4 * once)
    assert once.dtype == np.float32
    assert np.isfinite(once).all()
    assert once.any()


@pytest.mark.parametrize("layout", data.LAYOUTS)
def test_layouts_keep_the_values(layout: str) -> None:
    x = torch.randn(3, 4)
    laid = data.lay_out(x, layout)
    assert torch.equal(laid, x)
    assert laid.is_contiguous() == (layout == "contiguous")
