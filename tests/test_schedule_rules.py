"""The CPU schedule rules: they apply to what they are for, and what they schedule still computes the same."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("tvm") is None:
    pytest.skip("needs tvm: pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1", allow_module_level=True)

import tvm
from tvm import te, tirx

from shipway.schedule.cpu_rules import CPU_RULES, GEMM, GEMV, Elementwise, RowReduction

TARGETS = {
    "this CPU": {"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": 2},
    "any CPU": {"kind": "llvm", "num-cores": 2},
}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> tvm.target.Target:
    return tvm.target.Target(TARGETS[request.param])


def size(value: int | str) -> Any:
    return tirx.Var(value, "int64") if isinstance(value, str) else tirx.IntImm("int64", value)


def linear(rows: int | str, columns: int, depth: int, dtype: str = "float32", epilogue: bool = False) -> tirx.PrimFunc:
    """``x [rows, depth]`` times ``w [columns, depth]`` transposed, with a residual where asked."""
    m, n, d = size(rows), size(columns), size(depth)
    x, w = te.placeholder((m, d), dtype, "x"), te.placeholder((n, d), dtype, "w")
    a = te.compute((m, d), lambda i, k: x[i, k].astype("float32"), "a")
    b = te.compute((n, d), lambda j, k: w[j, k].astype("float32"), "b")
    k = te.reduce_axis((0, d), "k")
    y = te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[j, k], axis=k), "product")
    if not epilogue:
        return te.create_prim_func([x, w, y])
    residual = te.placeholder((m, n), "float32", "residual")
    out = te.compute((m, n), lambda i, j: y[i, j] + residual[i, j], "out")
    return te.create_prim_func([x, w, residual, out])


def weighted_sums(rows: int | str, columns: int) -> tirx.PrimFunc:
    """``p [batch, rows, depth]`` times ``v [batch, depth, columns]``, batch and depth open: attention times values."""
    b, m, t, n = size("batch"), size(rows), size("depth"), size(columns)
    p, v = te.placeholder((b, m, t), "float32", "p"), te.placeholder((b, t, n), "float32", "v")
    kept = te.compute((b, t, n), lambda i, k, j: v[i, k, j].astype("float32"), "kept")
    k = te.reduce_axis((0, t), "k")
    y = te.compute((b, m, n), lambda h, i, j: te.sum(p[h, i, k] * kept[h, k, j], axis=k), "product")
    return te.create_prim_func([p, v, y])


def chosen(function: tirx.PrimFunc, target: tvm.target.Target) -> str:
    return next(type(rule).__name__ for rule in CPU_RULES if rule.apply(function, target, False) is not None)


def run(
    rule: object, function: tirx.PrimFunc, target: tvm.target.Target, shape: tuple[int, ...], *inputs: np.ndarray
) -> np.ndarray:
    """Runs the scheduled function; what it leaves unwritten is NaN."""
    schedule = rule.apply(function, target, False)
    assert schedule is not None
    library = tvm.compile(schedule.mod, target=target)
    out = tvm.runtime.tensor(np.full(shape, np.nan, np.float32))
    library["main"](*(tvm.runtime.tensor(array) for array in inputs), out)
    return out.numpy()


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def assert_product(got: np.ndarray, a: np.ndarray, b: np.ndarray, plus: np.ndarray | float = 0) -> None:
    """Within a few roundings of the sum of magnitudes."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    bound = 4 * a.shape[-1] ** 0.5 * 2**-24 * (np.abs(wide_a) @ np.abs(wide_b) + np.abs(plus)) + 1e-30
    assert np.all(np.abs(got - (wide_a @ wide_b + plus)) <= bound)


@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (331, 100), (7, 37), (1, 1), (24, 48)])
@pytest.mark.parametrize("rows", [1, 3])
def test_gemv_equals_numpy_for_ragged_sizes(rows: int, columns: int, depth: int, target: tvm.target.Target) -> None:
    x, w, residual = draw(rows, depth), draw(columns, depth), draw(rows, columns)
    got = run(GEMV(), linear(rows, columns, depth, epilogue=True), target, (rows, columns), x, w, residual)
    assert_product(got, x, w.T, residual)


@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (331, 37), (7, 100), (1, 1), (33, 48)])
@pytest.mark.parametrize("epilogue", [False, True])
def test_gemm_equals_numpy_for_every_number_of_rows(
    columns: int, depth: int, epilogue: bool, target: tvm.target.Target
) -> None:
    function = linear("rows", columns, depth, epilogue=epilogue)
    schedule = GEMM().apply(function, target, False)
    assert schedule is not None
    library = tvm.compile(schedule.mod, target=target)
    for rows in (1, 2, 7, 8, 9, 17, 64):
        x, w, residual = draw(rows, depth), draw(columns, depth), draw(rows, columns)
        inputs = (x, w, residual) if epilogue else (x, w)
        out = tvm.runtime.tensor(np.full((rows, columns), np.nan, np.float32))
        library["main"](*(tvm.runtime.tensor(array) for array in inputs), out)
        assert_product(out.numpy(), x, w.T, residual if epilogue else 0)


@pytest.mark.parametrize(("rule", "rows"), [(GEMV(), 3), (GEMM(), "rows")])
@pytest.mark.parametrize("columns", [20, 64])
def test_weighted_sums_equal_numpy_for_every_depth(
    rule: object, rows: int | str, columns: int, target: tvm.target.Target
) -> None:
    for batch, depth in ((1, 1), (2, 5), (3, 33)):
        p, v = draw(batch, rows if isinstance(rows, int) else 13, depth), draw(batch, depth, columns)
        got = run(rule, weighted_sums(rows, columns), target, (*p.shape[:2], columns), p, v)
        assert_product(got, p, v)


@pytest.mark.parametrize(("rule", "rows"), [(GEMV(), 1), (GEMM(), "rows")])
def test_bf16_operands_have_a_float32_sum(rule: object, rows: int | str, target: tvm.target.Target) -> None:
    count, columns, depth = 5 if isinstance(rows, str) else rows, 40, 96
    x, w = (draw(count, depth).view(np.uint32) >> 16), (draw(columns, depth).view(np.uint32) >> 16)
    import ml_dtypes

    inputs = [a.astype(np.uint16).view(ml_dtypes.bfloat16) for a in (x, w)]
    got = run(rule, linear(rows, columns, depth, "bfloat16"), target, (count, columns), *inputs)
    assert_product(got, *(a.astype(np.float32) for a in (inputs[0], inputs[1].T)))


def test_rules_apply_to_what_they_are_for(target: tvm.target.Target) -> None:
    assert chosen(linear(1, 64, 64), target) == "GEMV"
    assert chosen(linear(9, 64, 64), target) == "GEMM"
    assert chosen(linear("rows", 64, 64), target) == "GEMM"
    assert chosen(weighted_sums(3, 64), target) == "GEMV"
    assert chosen(weighted_sums("rows", 64), target) == "GEMM"
    x = te.placeholder((size("rows"), size(40)), "float32", "x")
    weight = te.placeholder((size(40),), "float32", "weight")
    assert chosen(te.create_prim_func([x, tvm.topi.nn.softmax(x)]), target) == "RowReduction"
    assert chosen(te.create_prim_func([x, weight, tvm.topi.nn.rms_norm(x, weight, [1])]), target) == "RowReduction"
    assert chosen(te.create_prim_func([x, tvm.topi.nn.relu(x)]), target) == "Elementwise"


def test_rules_leave_other_targets_alone() -> None:
    gpu = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "host": "llvm"})
    assert all(rule.apply(linear(1, 64, 64), gpu, False) is None for rule in CPU_RULES)


@pytest.mark.parametrize("width", [1, 37, 40])
def test_softmax_and_norm_equal_numpy(width: int, target: tvm.target.Target) -> None:
    x = te.placeholder((size("rows"), size(width)), "float32", "x")
    weight = te.placeholder((size(width),), "float32", "weight")
    for rows in (1, 5):
        data, scale = draw(rows, width), draw(width)
        got = run(RowReduction(), te.create_prim_func([x, tvm.topi.nn.softmax(x)]), target, data.shape, data)
        powers = np.exp(data.astype(np.float64) - data.max(-1, keepdims=True))
        np.testing.assert_allclose(got, powers / powers.sum(-1, keepdims=True), rtol=1e-5)
        norm = te.create_prim_func([x, weight, tvm.topi.nn.rms_norm(x, weight, [1], 1e-5)])
        got = run(RowReduction(), norm, target, data.shape, data, scale)
        mean = np.mean(np.square(data.astype(np.float64)), -1, keepdims=True)
        np.testing.assert_allclose(got, data / np.sqrt(mean + 1e-5) * scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("width", [1, 37, 40])
def test_elementwise_stages_are_one(width: int, target: tvm.target.Target) -> None:
    x = te.placeholder((size("rows"), size(width)), "float32", "x")
    function = te.create_prim_func([x, tvm.topi.nn.relu(tvm.topi.add(x, tirx.const(1, "float32")))])
    data = draw(3, width)
    np.testing.assert_array_equal(run(Elementwise(), function, target, data.shape, data), np.maximum(data + 1, 0))
