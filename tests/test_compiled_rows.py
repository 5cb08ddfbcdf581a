"""What properties do not show of the rows ``jax`` and ``tvm``: which code a call takes, bound calls, compilations."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from shipway.numerics.campaign import missing, smallest
from shipway.numerics.check import OpRunner
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case

ROWS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=missing(row)))
    for name, row in OPS["linear"].implementations.items()
    if name in ("jax", "tvm")
]
JAX, TVM = ([row] for row in ROWS)


def runner(op: str, row: str, dtype: str = "f32") -> OpRunner:
    return OpRunner(OPS[op], OPS[op].implementations[row], dtype)


def arguments(run: OpRunner, case: Case) -> dict[str, Any]:
    return run.arguments(run.inputs(case))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op", ["linear", "rms_norm", "sample"])
def test_bound_call_computes_what_the_call_does(op: str, row: str) -> None:
    run = runner(op, row)
    given = arguments(run, smallest(op))
    function = run.implementation.make("f32", 64)
    bound = from_dlpack(function.bind(*given.values())())
    expected = function(*given.values())
    assert torch.equal(bound[tuple(slice(size) for size in expected.shape)], expected)


@pytest.mark.parametrize("row", ROWS)
def test_bound_append_writes_the_cache(row: str) -> None:
    run = runner("qkv_rope_append", row)
    case = smallest("qkv_rope_append")
    bound, called = arguments(run, case), arguments(run, case)
    bound["cache"] = bound["cache"].clone()  # PyTorch's own memory starts on a cache line
    function = run.implementation.make("f32", 64)
    function.bind(*bound.values())()
    function(*called.values())
    assert torch.equal(bound["cache"].nan_to_num(), called["cache"].nan_to_num())


@pytest.mark.parametrize("row", TVM)
@pytest.mark.parametrize("shift", range(1, 17))
def test_tvm_writes_a_cache_wherever_it_starts(row: str, shift: int) -> None:
    run = runner("qkv_rope_append", row)
    given = arguments(run, smallest("qkv_rope_append"))
    expected = {**given, "cache": given["cache"].clone()}
    memory = torch.empty(given["cache"].numel() + 16)
    given["cache"] = memory[shift:][: given["cache"].numel()].view(given["cache"].shape).copy_(given["cache"])
    function = run.implementation.make("f32", 64)
    function(*given.values())
    function(*expected.values())
    assert torch.equal(given["cache"].nan_to_num(), expected["cache"].nan_to_num())


@pytest.mark.parametrize("row", TVM)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("sum_of", [33, 576, 1536])
@pytest.mark.parametrize("op", ["linear", "linear_residual", "gate_up_silu", "lm_head"])
def test_tvm_has_a_function_for_one_row(op: str, sum_of: int, dtype: str, row: str) -> None:
    run = runner(op, row, dtype)
    one = "R" if op == "lm_head" else "T"
    function = run.implementation.make(dtype, 64)
    taken = []
    for rows in (1, 2):
        case = smallest(op).with_dims(K=sum_of, **{one: rows}).with_dims(**{"V" if op == "lm_head" else "N": 65})
        assert not run.against(run.inputs(case))
        taken.append(function.bind(*arguments(run, case).values()).func)
    assert taken[0] is not taken[1]


@pytest.mark.parametrize("row", TVM)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("group", range(1, 9))
def test_tvm_decode_agrees_for_every_group(group: int, dtype: str, row: str) -> None:
    run = runner("attention_decode", row, dtype)
    assert not run.against(run.inputs(smallest("attention_decode").with_dims(start=40, group=group)))


@pytest.mark.parametrize("row", TVM)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tvm_projections_and_mlp_of_one_row(dtype: str, row: str) -> None:
    case = smallest("qkv_rope_append").with_dims(B=1, length=1, K=576)
    for bias in (0, 1):
        for norm in (0, 1):
            run = runner("qkv_rope_append", row, dtype)
            assert not run.against(run.inputs(case.with_dims(bias=bias, norm=norm)))
    for inner in (65, 1536):
        run = runner("mlp", row, dtype)
        assert not run.against(run.inputs(smallest("mlp").with_dims(T=1, K=576, N=inner)))


@pytest.mark.parametrize("row", JAX)
def test_jax_compiles_a_handful_of_shapes(row: str) -> None:
    from shipway.ops import jax_ops

    run, before = runner("linear", row), jax_ops._linear._cache_size()
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, columns, depth = (int(rng.integers(1, most)) for most in (70, 200, 1100))
        assert not run.against(run.inputs(Case({"T": rows, "N": columns, "K": depth})))
    assert jax_ops._linear._cache_size() - before <= 2


@pytest.mark.parametrize("row", JAX)
@pytest.mark.parametrize("op", [name for name, op in OPS.items() if "jax" in op.implementations])
def test_jax_alone_computes_the_op_in_its_own_sizes(op: str, row: str) -> None:
    run = runner(op, row)
    make = run.implementation.alone
    assert make is not None
    inputs = run.inputs(smallest(op))
    given = run.arguments(inputs)
    result = make("f32", 64)(*given.values())
    assert not run.judge(inputs, run.outputs(given, result))
