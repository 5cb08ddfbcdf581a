"""Whole graphs compiled for a GPU that is not there: what is launched, what was fused, which kernels there are."""

import json
from pathlib import Path

import pytest

from command_line import Run, assert_one_line
from shipway.errors import ShipwayError
from shipway.measure import targets as measured
from shipway.model.config import ModelConfig
from shipway.targets import graph
from shipway.targets.arch import ARCHS, Arch
from shipway.targets.compiler import OBJECT
from shipway.targets.emit import emit
from shipway.targets.figures import Usage
from shipway.targets.graph import GraphReport, compile_graph, read_kernels
from shipway.targets.virtual_device import launches
from targets_kernels import WIDE, put
from tiny_checkpoints import SPECS

PROGRAM = """
 %0:3 = "mgp.generic.execute"(%arg1) <{aRuntimeSlot = 0 : ui64, dSummary = "Sequence(mgp.tensor.extract.tensor_spec, \
index.mul, mgp.buffer.plan)", eIsAsync = false}> : (!mgp.context) -> index
 %1 = "mgp.generic.execute"(%arg1) <{aRuntimeSlot = 0 : ui64, dSummary = "mgp.buffer.alloc"}> : () -> index
 %2:2 = "mgp.generic.execute"(%arg1) <{dSummary = "Sequence(pop.cast_from_builtin, mo.reduce.rms_norm, \
Prologue(View(mo.static.broadcast_to, Elementwise(mo.mul, mo.add)), mo.reduce.softmax, operandIndices=[0, 1]), \
index.casts, linear, kgen.param.constant, mo.add)", eIsAsync = true}> : () -> !mef.chain
 %3 = "mgp.generic.execute"(%arg1) <{dSummary = "linear"}> : () -> !mef.chain
"""


def test_launches_are_read_with_what_was_fused() -> None:
    assert launches(PROGRAM) == [
        "mo.reduce.rms_norm",
        "Prologue(View(mo.static.broadcast_to, Elementwise(mo.mul, mo.add)), mo.reduce.softmax, operandIndices=[0, 1])",
        "linear",
        "mo.add",
        "linear",
    ]


def test_kernels_are_read_out_of_a_compiled_graph(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "kernels", monkeypatch)
    mef = b"\x7fELF\x02 of the host"
    for arch in ("sm_90a", "gfx942"):
        for emitted in emit(WIDE.every(), arch, OBJECT).values():
            mef += bytes(5) + emitted.files[OBJECT].read_bytes() + b"text between"
    kernels = read_kernels(mef)
    assert [(kernel.stack, kernel.shared) for kernel in kernels] == [(0, 1200), (0, 1200)]
    assert all("wide" in kernel.name and 0 < kernel.registers < 33 for kernel in kernels)
    assert read_kernels(mef + mef) == kernels  # of two parts of a graph that launch the same
    assert read_kernels(b"nothing") == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("build_wrong", "k.mojo:1:2: error: no such op"),
        ("build_nothing", "no kernel of that name"),
        ("build_dead", "the compiler crashed (exit code -6): it said this"),
    ],
)
def test_graph_that_does_not_compile_is_one_line(build: str, message: str, own_cache: Path) -> None:
    with pytest.raises(ShipwayError) as caught:
        compile_graph(f"small_graph:{build}", (), {}, ARCHS["sm_90a"])
    assert str(caught.value) == f"the graph does not compile for sm_90a: {message}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_stock_graph_compiles_for_a_virtual_device(target: str, own_cache: Path) -> None:
    report = compile_graph("small_graph:build", (64,), {}, ARCHS[target])
    assert report.cold
    assert any("mo.reduce.rms_norm" in launch for launch in report.launches)
    assert any("Elementwise(" in launch for launch in report.launches)
    assert len(report.launches) <= 3  # of six ops
    assert len(report.kernels) >= len(report.launches)
    assert all(0 < kernel.registers <= 255 for kernel in report.kernels)
    again = compile_graph("small_graph:build", (64,), {}, ARCHS[target])
    assert (again.cold, again.launches, again.kernels) == (False, report.launches, report.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_decoder_over_pages_compiles_for_a_virtual_device(target: str, own_cache: Path) -> None:
    config = ModelConfig.from_hf({**SPECS["llama3"], "architectures": ["LlamaForCausalLM"]})
    launched = compile_graph("shipway.targets.graph:paged_decoder", (config, "bf16"), {}, ARCHS[target]).launches
    ours = [launch for launch in launched if launch.startswith("custom__")]
    assert ours == ["custom__embedding", "custom__decoder_layers_paged", "custom__rms_norm", "custom__lm_head"]
    assert all(launch.startswith(("mo.cast", "View(")) for launch in launched if launch not in ours)


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Stands in for the compiler; remembers what was asked of it."""
    asked: list[tuple[str, str, str]] = []

    def compile_route(route: str, config: object, dtype: str, arch: Arch, show: object) -> GraphReport:
        asked.append((route, dtype, arch.name))
        return GraphReport(arch, 40.0, True, ("linear", "mo.add", "linear"), (Usage("k", 99, 0, 1024),))

    monkeypatch.setattr(measured, "compile_route", compile_route)
    return asked


def test_a_graph_that_fails_fails_the_command_and_loses_no_other(
    run: Run, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_graph(build: str, arguments: object, parts: object, arch: Arch) -> GraphReport:
        if arch.name == "sm_90a":
            raise ShipwayError("the graph does not compile for sm_90a: k.mojo:1:2: error: no such op")
        return GraphReport(arch, 40.0, True, ("linear",), (Usage("k", 99, 0, 1024),))

    monkeypatch.setattr(graph, "compile_graph", compile_graph)
    file = tmp_path / "g.json"
    code, out, _ = run("targets", "--graph", "sm_90a,gfx942", "--model", checkpoint, "--json", file)
    assert code == 1
    assert "FAIL mojo-graph bf16 sm_90a: the graph does not compile for sm_90a: k.mojo:1:2: error: no such op" in out
    assert "mojo-graph bf16 gfx942: 1 launches" in out
    assert [bool(entry["error"]) for entry in json.loads(file.read_text())["graphs"]] == [True, False]


def test_graph_prints_launches_and_kernels(
    run: Run, decoders: list[tuple[str, str, str]], checkpoint: str, tmp_path: Path
) -> None:
    code, out, err = run("targets", "--graph", "sm_90a,gfx942", "--model", checkpoint, "--json", tmp_path / "g.json")
    assert code == 0, err
    assert decoders == [("mojo-graph", "bf16", "sm_90a"), ("mojo-graph", "bf16", "gfx942")]
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["command"] == "targets-graph"
    assert [graph["target"] for graph in document["graphs"]] == ["sm_90a", "gfx942"]
    assert document["graphs"][0]["launches"] == ["linear", "mo.add", "linear"]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:4] == [
        "mojo-graph bf16 sm_90a: 3 launches, 2 different, 1 kernels, compiled in 40 s",
        "launches of",
        "2 linear",
        "1 mo.add",
    ]
    assert "k sm_90a 99 0 1024" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "sm_81"], "--graph sm_81 is none of sm_80"),
        (["--graph", "sm_90a", "--route", "xla"], "--route xla is none of mojo-graph, max-graph, serve, ops"),
        (["--graph", "sm_90a", "--dtype", "f64"], "--dtype f64 is none of f32, bf16, tf32"),
        (["--graph", "sm_90a", "--dtype", "tf32", "--route", "max-graph"], "--dtype tf32 is none of f32, bf16"),
        (["--graph", "sm_90a,gfx942", "--dtype", "tf32"], "--dtype tf32 is for NVIDIA's targets, not gfx942"),
        (["--graph", "sm_90a", "--target", "sm_80"], "--graph names the targets"),
    ],
)
def test_wrong_usage_of_graph_is_one_line(
    arguments: list[str], message: str, run: Run, decoders: list[tuple[str, str, str]]
) -> None:
    code, _, err = run("targets", *arguments)
    assert_one_line(code, 2, err, message)
    assert decoders == []
