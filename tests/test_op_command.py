"""``shipway op``: what it refuses, how implementations that fail are shown, what it counts, and the loop of an edit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_ops
from command_line import Run, assert_one_line
from shipway.errors import ShipwayError
from shipway.graphs import extension
from shipway.measure import op_bench, op_edit
from shipway.measure.op_work import SHAPES, Work, work_of
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case
from shipway.report.op_table import limit_of, summarise

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("linear", "--shape", "T=2,N=64,K=512")


@pytest.fixture
def fake_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """``linear`` with the rows of ``fake_ops``, short rounds, and a probe that measures nothing."""
    fake_ops.add(monkeypatch)
    info = op_bench._worker_info
    monkeypatch.setattr(op_bench, "_worker_info", lambda name: replace(info(name), factory="fake_ops:Target"))
    monkeypatch.setattr(op_bench, "PROBE", replace(op_bench.PROBE, factory="fake_models:Probe"))
    monkeypatch.setattr(op_bench, "ROUNDS", 3)
    monkeypatch.setattr(op_bench, "_BLOCK_S", 0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no_such_op"], ["no op is called 'no_such_op'", "attention_decode"]),
        (["linear", "--impl", "mojo,cuda"], ["no implementation 'cuda'", "torch"]),
        (["linear", "--dtype", "f64"], ["no dtype 'f64'", "bf16"]),
        (["linear", "--dtype", ","], ["at least one dtype"]),
        (["linear", "--shape", "M=3"], ["no dim 'M'", "T, N, K"]),
        (["linear", "--shape", "T"], ["T=1,K=576", "'T'"]),
        (["linear", "--shape", "T=x"], ["'T=x'"]),
        (["linear", "--shape", "T=99999999999"], ["is not in 0..1048576"]),
        (["linear", "--shape", "T=1048576,K=1048576"], ["does not fit into this machine's memory"]),
        (["linear", "--shape", "K=0"], ["K goes from 1, not 0"]),
        (["linear", "--shape", "T=0"], ["nothing to time", "T from 1"]),
        (["attention_decode", "--shape", "head_dim=1024"], ["head_dim goes from 16 to", "not 1024"]),
        (["qkv_rope_append", "--shape", "rotary_quarters=5"], ["rotary_quarters goes from 1 to 4"]),
        (["linear", "--watch", "--time-edit"], ["exclude each other"]),
        (["linear", "--impl", "torch", "--time-edit"], ["put mojo among"]),
    ],
)
def test_bad_argument_is_one_line(run: Run, arguments: list[str], named: list[str]) -> None:
    code, out, err = run("op", *arguments)
    assert out == ""
    assert_one_line(code, 2, err, *named)


def lines_of(out: str) -> dict[str, list[str]]:
    """Cells of the table's lines by implementation."""
    cells = (re.split(r"\s{2,}", line) for line in out.splitlines())
    return {row[0]: row for row in cells if len(row) > 5}


def test_each_implementation_has_a_line_and_what_is_asked_for_alone_is_shown(
    run: Run, fake_rows: None, tmp_path: Path
) -> None:
    code, out, err = run("op", *SMALL, "--impl", "right", "--dtype", "f32", "--json", tmp_path / "r.json")
    assert code == 0, err
    lines = lines_of(out)
    assert sorted(lines) == ["impl", "right"]
    assert "right: each call includes converting its arguments" in out
    assert lines["right"][1:4] == ["T=2 N=64 K=512", "f32", "PASS"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert [entry["implementation"] for entry in result["entries"]] == ["torch", "right"]
    for entry in result["entries"]:
        blocks = [(sample["round"], sample["cache"]) for sample in entry["samples"]]
        assert blocks == [(number, cache) for number in range(3) for cache in ("cold", "warm")]
        assert all(seconds > 0 for sample in entry["samples"] for seconds in sample["seconds"])
        assert entry["copies"] * entry["bytes"] > 2 * result["cache_bytes"]
    # A B, B A, A B: drift hits both alike.
    positions = [[sample["position"] for sample in entry["samples"][::2]] for entry in result["entries"]]
    assert positions == [[0, 1, 0], [1, 0, 1]]
    assert result["environment"]["threads"] >= 1


def test_what_fails_is_neither_timed_nor_a_traceback(run: Run, fake_rows: None, tmp_path: Path) -> None:
    code, out, err = run("op", *SMALL, "--dtype", "bf16", "--json", tmp_path / "r.json")
    assert code == 1
    assert "Traceback" not in out + err
    verdicts = {name: cells[3] for name, cells in lines_of(out).items()}
    assert verdicts == {
        "impl": "verdict",
        "torch": "PASS",
        "right": "PASS",
        "wrong": "FAIL",
        "dies": "FAILED",
        "raises": "FAILED",
        "uncompiled": "FAILED",
        "absent": "not run",
        "single": "not run",
        "stale": "FAIL",
    }
    for name in ("wrong", "dies", "raises", "uncompiled", "absent", "single", "stale"):
        assert set(lines_of(out)[name][4:]) == {"-"}
    for line in (
        r"wrong FAIL \(bf16 given\): reference: .* \[T=2 N=64 K=512 seed=0",
        r"dies FAILED \(bf16 given\): dies died of SIGABRT during `prepare`",
        r"raises FAILED \(bf16 given\): raises failed in `prepare`: RuntimeError: a bug; traceback: ",
        rf"uncompiled FAILED \(bf16 given\): {re.escape(fake_ops.COMPILE_ERROR)}",
        r"absent not run \(bf16 given\): no_such_module not installed: \S+ -m pip install no-such-package==1",
        r"single not run \(bf16 given\): runs in f32 only",
        r"stale FAIL \(bf16 given\): identity_returns_x: declared KNOWN \(columns are added up\) but it passes",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), f"{line}\n{out}"
    entries = {entry["implementation"]: entry for entry in json.loads((tmp_path / "r.json").read_text())["entries"]}
    assert all(bool(entry["samples"]) == (entry["status"] == "ok") for entry in entries.values())


def test_nothing_that_runs_exits_with_3(run: Run, fake_rows: None) -> None:
    code, out, _ = run("op", *SMALL, "--impl", "absent", "--dtype", "f32")
    assert code == 3
    assert "absent not run" in out


def test_every_op_has_work_and_shapes_of_its_own_dims() -> None:
    assert SHAPES.keys() == OPS.keys()
    for op in OPS.values():
        for dims in SHAPES[op.name].values():
            assert dims.keys() == op.dims.keys()
        small = {name: max(dim.low, 2) if dim.high > 1 else 0 for name, dim in op.dims.items()}
        inputs = op.draw(Case({**small, **({"head_dim": 16} if "head_dim" in small else {})}), np.random.default_rng(0))
        assert work_of(op.name, inputs, "f32").bytes > work_of(op.name, inputs, "bf16").bytes / 2 > 0


@pytest.mark.parametrize(
    ("op", "dims", "dtype", "expected"),
    [
        # ids and a row of the table read, a float32 row written
        ("embedding", {"T": 1, "V": 100, "K": 8}, "bf16", Work(4 + 8 * 2 + 8 * 4, 0)),
        ("rms_norm", {"T": 2, "K": 8}, "bf16", Work(2 * 8 * 4 + 8 * 4 + 2 * 8 * 2, 4 * 16)),
        ("linear", {"T": 2, "N": 3, "K": 8}, "bf16", Work(2 * (16 + 24) + 4 * 6, 2 * 2 * 3 * 8)),
        ("linear_residual", {"T": 2, "N": 3, "K": 8}, "f32", Work(4 * (16 + 24 + 6 + 6), 2 * 2 * 3 * 8 + 6)),
        ("gate_up_silu", {"T": 1, "N": 3, "K": 8}, "f32", Work(4 * (8 + 2 * 24 + 3), 4 * 24 + 4 * 3)),
        ("mlp", {"T": 1, "N": 3, "K": 8}, "f32", Work(4 * (8 + 3 * 24 + 8 + 8), 6 * 24 + 4 * 3 + 8)),
        ("lm_head", {"T": 5, "V": 7, "K": 8, "R": 1}, "f32", Work(4 * (8 + 7 * 8 + 7 + 1), 2 * 7 * 8)),
        ("greedy", {"R": 2, "V": 7}, "f32", Work(4 * (14 + 2), 14)),
        # one query over 4 keys; 2 kv_heads of 16, 2 queries each
        (
            "attention_decode",
            {"B": 1, "start": 3, "window": 0, "kv_heads": 2, "group": 2, "head_dim": 16},
            "bf16",
            Work(2 * (2 * 64 + 2 * 4 * 32), 4 * 4 * 64),
        ),
        # a window of 2 leaves 2 of the 4
        (
            "attention_decode",
            {"B": 1, "start": 3, "window": 2, "kv_heads": 2, "group": 2, "head_dim": 16},
            "bf16",
            Work(2 * (2 * 64 + 2 * 2 * 32), 4 * 2 * 64),
        ),
        # 3 queries see 1 + 2 + 3 keys, of which there are 3
        (
            "attention_prefill",
            {"B": 1, "length": 3, "start": 0, "window": 0, "kv_heads": 1, "group": 1, "head_dim": 16},
            "f32",
            Work(4 * (2 * 3 * 16 + 2 * 3 * 16), 4 * 6 * 16),
        ),
    ],
)
def test_bytes_and_flops_are_those_of_the_definition(op: str, dims: dict[str, int], dtype: str, expected: Work) -> None:
    inputs = OPS[op].draw(Case(dims), np.random.default_rng(0))
    assert work_of(op, inputs, dtype) == expected


def entry_of(**changed: Any) -> op_bench.Entry:
    verdict = {"ok": True, "known": [], "max_ulps": 1.0}
    entry = {"implementation": "mojo", "dtype": "f32", "shape": "decode", "dims": {}, "status": "ok", "reason": ""}
    return {**entry, "verdict": verdict, "bytes": 4e6, "flops": 1e6, "copies": 2, **changed}  # type: ignore[return-value]


def samples_of(cold: list[float], warm: list[float]) -> list[dict[str, Any]]:
    return [
        {"round": number, "position": 0, "cache": cache, "seconds": [seconds, seconds, 9.0 * seconds]}
        for cache, times in (("cold", cold), ("warm", warm))
        for number, seconds in enumerate(times)
    ]


def result_of(*entries: op_bench.Entry) -> op_bench.OpResult:
    probes = [
        {
            "round": number,
            "dtype": "f32",
            "shape": "decode",
            "pattern": "p",
            "kind": kind,
            "value": value / (number + 1),
        }
        for number in (0, 1)
        for kind, value in (("read bytes/s", 40e9), ("f32 GEMM FLOP/s", 100e9))
    ]
    return {"entries": list(entries), "probes": probes, "baseline": "torch"}  # type: ignore[typeddict-item,return-value]


def test_figures_come_from_the_cold_calls_and_ratios_from_the_rounds() -> None:
    # Both drift by the same factor from round to round: the ratio of each round is 2.
    base = entry_of(implementation="torch", samples=samples_of([4e-4, 8e-4, 2e-4], [2e-4, 4e-4, 1e-4]))
    ours = entry_of(samples=samples_of([2e-4, 4e-4, 1e-4], [1e-4, 2e-4, 5e-5]))
    _, row = summarise(result_of(base, ours))
    assert row.cold_s is not None
    assert row.ratio_cold is not None
    assert row.ratio_warm is not None
    assert (row.cold_s.median, row.cold_s.low, row.cold_s.high) == (2e-4, 1e-4, 4e-4)
    assert (row.ratio_cold.median, row.ratio_cold.low, row.ratio_cold.high) == pytest.approx((2, 2, 2))
    assert row.ratio_warm.median == pytest.approx(2)
    assert row.bytes_s == pytest.approx(20e9)
    assert row.flops_s == pytest.approx(5e9)
    assert (row.share, row.bound) == (pytest.approx(0.5), "memory")


def test_the_slower_limit_binds() -> None:
    assert limit_of(result_of(), entry_of(bytes=40e6, flops=1e6)) == (pytest.approx(1e-3), "memory")
    assert limit_of(result_of(), entry_of(bytes=1e6, flops=1e9)) == (pytest.approx(1e-2), "compute")
    assert limit_of(result_of(), entry_of(shape="prefill")) is None


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_to_edit(op: str, tmp_path: Path) -> None:
    source = extension.KERNELS / op_edit.kernel_file(op)
    copy = tmp_path / source.name
    shutil.copy(source, copy)
    op_edit.edit(copy)
    before, after = source.read_text().splitlines(), copy.read_text().splitlines()
    added = [line.strip() for line in after if line not in before]
    assert len(after) == len(before) + 2
    assert re.fullmatch(r"var edited = \d+", added[0])


def test_edited_kernels_compile_and_a_mistake_is_one_line_with_its_place(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(extension.KERNELS, kernels)
    monkeypatch.setattr(extension, "KERNELS", kernels)
    for name in {op_edit.kernel_file(op) for op in OPS}:
        op_edit.edit(kernels / name)
    assert extension.kernels_extension().is_file()
    path = kernels / "rms_norm.mojo"
    path.write_text(path.read_text().replace("var i = 0", 'var i: Int = "x"', 1))
    line = 1 + path.read_text().splitlines().index('    var i: Int = "x"')
    with pytest.raises(ShipwayError) as caught:
        extension.kernels_extension()
    message = str(caught.value)
    assert "\n" not in message
    assert f"{path}:{line}:18: error: cannot implicitly convert" in message


def test_error_of_an_instantiation_names_what_failed() -> None:
    output = """error: function instantiation failed
<unknown>:129:29: note: call expansion failed
k/register/rms_norm.mojo:45:29: note: call expansion failed with parameter value(s): (...)
k/rms_norm.mojo:24:5: note: function instantiation failed
k/rms_norm.mojo:45:5: note: constraint failed: bad dtype
error: function instantiation failed
k/linear.mojo:9:5: note: constraint failed: another
"""
    assert extension.first_error(output) == "k/rms_norm.mojo:45:5: error: constraint failed: bad dtype"
    assert extension.first_error("warning: w\na.mojo:1:2: error: e\nb.mojo:3:4: error: f") == "a.mojo:1:2: error: e"
    assert extension.first_error("killed") == "killed"
    assert extension.first_error("") == "no output"


class Saves:
    """A bench whose sources are saved a moment after each run, until it is interrupted in the third."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []

    def run(self) -> op_bench.OpResult:
        self.ran.append("run")
        if self.ran.count("run") == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)  # never over: the signal unwinds it
        text = f"# {len(self.ran)}\n" * len(self.ran)
        threading.Timer(0.3, lambda: (self.folder / "linear.mojo").write_text(text)).start()
        return result_of()

    def sources_changed(self) -> None:
        self.ran.append("changed")

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, *error: object) -> None:
        self.ran.append("closed")


def test_watch_runs_again_after_each_save_until_interrupted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.txt").write_text("no source")
    bench = Saves(tmp_path)
    monkeypatch.setattr(op_bench, "OpBench", lambda *arguments: bench)
    monkeypatch.setattr(op_edit, "kernel_folders", lambda: (tmp_path,))
    monkeypatch.setattr("shipway.report.op_table.print_op", lambda *arguments: None)
    code, _, err = run("op", "linear", "--watch")
    assert code == 130
    assert bench.ran == ["run", "changed", "run", "changed", "run", "closed"]
    assert err.count("saved: linear.mojo") == 2
    assert err.splitlines()[-1] == "shipway: interrupted"


def test_only_workers_that_hold_our_sources_end_with_a_save(run: Run, fake_rows: None) -> None:
    settings = op_bench.OpSettings("linear", ("right",), ("f32",), {"T": 1, "N": 2, "K": 3}, 1)
    with op_bench.OpBench(settings, lambda line: None) as bench:
        bench.run()
        torch, right = bench._workers["torch"], bench._workers["right"]
        rows = {**OPS["linear"].implementations, "right": replace(fake_ops.ROWS["right"], requires=("max",))}
        bench._op = replace(OPS["linear"], implementations=rows)
        bench.sources_changed()
        assert bench._workers == {"torch": torch}
        assert not Path(f"/proc/{right.pid}").exists()
        assert Path(f"/proc/{torch.pid}").exists()
    assert not Path(f"/proc/{torch.pid}").exists()


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shipway.cli", "op", "rms_norm", "--shape", "T=2,K=64", "--dtype", "f32"]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_timed_edit_is_compiled_and_leaves_the_checkout_alone(tmp_path: Path) -> None:
    kernels = {path: path.read_bytes() for path in sorted(extension.KERNELS.rglob("*.mojo"))}
    process = start("--impl", "mojo", "--time-edit", "--json", str(tmp_path / "r.json"))
    out, err = process.communicate(timeout=600)
    result = json.loads((tmp_path / "r.json").read_text())
    edit = result["time_edit"]
    assert process.returncode == (0 if edit["held"] else 1), err
    assert edit["held"] == (edit["seconds"] <= 60)
    assert f"{edit['seconds']:.1f} s from saving rms_norm.mojo to its line" in out
    (mojo,) = (entry for entry in result["entries"] if entry["implementation"] == "mojo")
    assert mojo["status"] == "ok", mojo["reason"]
    assert edit["seconds"] > mojo["load_s"] > 1.0  # compiled, not found
    assert {path: path.read_bytes() for path in sorted(extension.KERNELS.rglob("*.mojo"))} == kernels


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_ctrl_c_ends_the_command_and_its_workers(own_cache: Path) -> None:
    process = start("--impl", "torch")
    assert process.stderr is not None
    assert "torch" in process.stderr.readline()
    worker = ""
    while "shipway.worker" not in command_of(worker):
        worker = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split(" ")[0]
    time.sleep(0.5)  # the driver waits for its answer
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    assert process.stderr.read().splitlines()[-1] == "shipway: interrupted"
    assert code == 130
    assert command_of(worker) == ""
