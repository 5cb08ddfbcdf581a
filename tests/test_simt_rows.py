"""The Mojo GPU kernels as rows of the catalogue: the properties and traps of every op, on simulated targets.

CI takes every op on one target, and the two that use most of a target on one of the other vendor, in bf16, and one
in tf32; ``-m slow`` all targets and dtypes.
"""

from __future__ import annotations

import pytest

from held_lines import assert_holds
from shipway.numerics.campaign import FEWEST, Plan, chosen, run_line
from shipway.ops.catalogue import OPS
from shipway.ops.implementations import SIMULATED
from shipway.ops.op import Implementation, Op
from shipway.targets.kernels import KERNELS

LINES = [(op, row, dtype) for op, row, dtype in chosen(list(OPS), [], []) if row.device == "simulated"]
IN_CI = {f"{op}-mojo@sm_90a-bf16" for op in OPS} | {f"{op}-mojo@gfx942-bf16" for op in ("linear", "attention_prefill")}
IN_CI |= {"linear-mojo@sm_90a-tf32"}
HEAD_DIM = 64
MANY = 60  # cases of each property in the long profile

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def name_of(line: tuple[Op, Implementation, str]) -> str:
    op, row, dtype = line
    return f"{op.name}-{row.name}-{dtype}"


@pytest.mark.parametrize("line", [line for line in LINES if name_of(line) in IN_CI], ids=name_of)
def test_properties_hold(line: tuple[Op, Implementation, str]) -> None:
    ran = run_line(*line, Plan(examples=1, head_dims=(HEAD_DIM,)))
    assert_holds(ran)
    assert ran.examples >= FEWEST


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=name_of)
def test_properties_hold_over_many_cases(line: tuple[Op, Implementation, str]) -> None:
    assert_holds(run_line(*line, Plan(examples=MANY)))


def test_every_op_that_has_gpu_kernels_has_a_row_on_every_simulated_target() -> None:
    launched = {op for kernel in KERNELS for op in kernel.ops}
    assert {(op.name, row.name) for op, row, _ in LINES} == {
        (op, f"mojo@{target}") for op in launched for target in SIMULATED
    }


def test_tf32_is_a_dtype_of_ops_with_products_on_nvidia() -> None:
    assert {(op.name, row.name) for op, row, dtype in LINES if dtype == "tf32"} == {
        (op, f"mojo@{target}")
        for op in ("linear", "linear_residual", "gate_up_silu", "mlp", "lm_head", "qkv_rope_append")
        for target in ("sm_80", "sm_90a")
    }


def test_ci_takes_the_lines_it_names() -> None:
    assert {name_of(line) for line in LINES} >= IN_CI
