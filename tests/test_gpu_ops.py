"""The ops on this machine's GPU: what can be said of that without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from command_line import Run
from op_calls import SMALL, arguments_of
from shipway.model.config import ModelConfig
from shipway.numerics.campaign import missing
from shipway.ops.catalogue import OPS
from shipway.ops.op import Implementation
from shipway.targets.arch import ARCHS
from shipway.targets.graph import compile_route
from tiny_checkpoints import SPECS

MOJO = OPS["linear"].implementations["mojo"]
ON_GPU = [name for name, op in OPS.items() if "mojo-gpu" in op.implementations]


def row(op: str) -> Implementation:
    return OPS[op].implementations["mojo-gpu"]


def test_every_op_has_a_row_on_the_gpu() -> None:
    assert list(OPS) == ON_GPU
    assert row("linear_int4").dtypes == ("bf16",)
    assert row("linear").dtypes == ("f32", "bf16", "f16", "tf32")
    assert row("rms_norm").dtypes == ("f32", "bf16", "f16")


@pytest.mark.skipif(bool(missing(MOJO)), reason=missing(MOJO))
@pytest.mark.parametrize("op", [name for name, op in OPS.items() if "mojo" in op.implementations])
def test_an_op_elsewhere_brings_back_what_it_returns_and_writes(op: str) -> None:
    # The CPU, given copies of all arguments, stands for a device with a memory of its own.
    from max.driver import CPU

    here = OPS[op].implementations["mojo"].make("f32", SMALL["D"])
    there = type(here)(here._models, here._name, "f32", CPU())
    ours, theirs = arguments_of(op), arguments_of(op)
    assert torch.equal(there(*theirs.values()), here(*ours.values()))
    for name, value in ours.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(theirs[name], value), name
    if "cache" in OPS[op].mutates:
        assert not torch.equal(ours["cache"], arguments_of(op)["cache"])


@pytest.mark.skipif(bool(missing(MOJO)), reason=missing(MOJO))
@pytest.mark.skipif(not missing(row("linear")), reason="MAX finds a GPU here: this is what is said where it finds none")
def test_without_a_gpu_the_row_says_so(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("check", "--op", "linear", "--impl", "mojo-gpu", "--json", tmp_path / "check.json")
    assert code == 3
    said = "MAX finds no GPU here: one of NVIDIA's or AMD's with its driver would make it run"
    assert [line for line in out.splitlines() if line.startswith("not run")] == [f"not run 4 lines of mojo-gpu: {said}"]


@pytest.mark.skipif(bool(missing(MOJO)), reason=missing(MOJO))
def test_a_graph_calls_every_op_by_its_name_packed_or_not() -> None:
    from max.graph import DeviceRef

    from shipway.graphs.single_op import build_ops

    called = set(re.findall(r'symbol = "(\w+)"', str(build_ops(DeviceRef.GPU(0), "bf16", 64))))
    # Attention is one op that has two kernels; the MLP is two ops.
    assert called == {*OPS, "attention"} - {"attention_prefill", "attention_decode", "mlp"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"), [(t, d) for t in ("sm_90a", "gfx942") for d in ("f32", "bf16", "f16")] + [("sm_90a", "tf32")]
)
def test_every_op_compiles_for_a_virtual_device(target: str, dtype: str, own_cache: Path) -> None:
    config = ModelConfig.from_hf({**SPECS["llama3"], "architectures": ["LlamaForCausalLM"]})
    report = compile_route("ops", config, dtype, ARCHS[target])
    assert report.error == ""
    assert len(report.launches) >= sum(dtype in row(name).dtypes for name in ON_GPU)
