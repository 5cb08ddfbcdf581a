"""``shipway check``: its selection, its document, its exit codes, and that a dying kernel costs one line."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from command_line import Run
from processes import eventually, gone
from shipway.measure import checks
from shipway.measure.checks import campaign_document, lines_exit_code, mutants_exit_code
from shipway.numerics import isolated
from shipway.numerics.campaign import Failure, Line, Plan
from shipway.numerics.isolated import POISON, run_lines
from shipway.ops.implementations import SIMULATED
from shipway.report.checks import print_lines, print_mutants

PASSED = Line("linear", "torch", "f32", "PASS", False, "handled", 40, 0, 1.5, 1e-14)
BROKEN = Line(
    "linear", "mojo", "f32", "FAIL", True, "refused", failures=(Failure("reference", "T=2 N=1 K=9 seed=3", "off"),)
)
ABSENT = Line("linear", "tvm", "f32", "not run", False, "copied", reason="tvm not installed: pip install tvm")


def document(*lines: Line) -> dict[str, object]:
    return {"planned": len(lines), "lines": [asdict(line) for line in lines]}


def printed(*lines: Line) -> str:
    out = io.StringIO()
    print_lines(document(*lines), out)
    return out.getvalue()


def test_a_finding_is_printed_once_with_the_properties_that_show_it() -> None:
    race = "race: write of global memory unordered with the read (mojo/kernels/gpu/linear.mojo:9, linear_gemv@sm_80"
    out = printed(
        replace(
            BROKEN,
            failures=(
                Failure("reference", "T=2 N=1 K=9 seed=3", f"{race}, block 0 thread 3)"),
                Failure("repeatable", "T=1 N=1 K=9 seed=0", f"{race}, block 2 thread 0)"),
                Failure("row_alone", "T=1 N=1 K=1 seed=0", "off"),
                Failure("identity", "T=1 N=2 K=1 seed=0", f"{race}, block 2 thread 9)"),
            ),
        )
    )
    assert out.count("race: ") == 1
    assert "reference: race" in out
    assert "the same in repeatable, identity" in out
    assert "row_alone: off" in out


def test_a_small_campaign_passes_and_is_recorded(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    code, out, _ = run(
        *("check", "--op", "linear,gate_up_silu,greedy", "--impl", "torch", "--dtype", "f32"),
        *("--examples", 9, "--json", file),
    )
    assert code == 0, out
    found = json.loads(file.read_text())
    assert [line["op"] for line in found["lines"]] == ["linear", "gate_up_silu", "greedy"]
    assert {line["verdict"] for line in found["lines"]} == {"PASS"}
    assert all(line["examples"] >= 9 for line in found["lines"])
    assert found["environment"]["cpu"]
    assert "3 PASS" in out


def test_one_case_runs_alone(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    case = "T=3 N=5 K=33 seed=4 scale=1 distribution=spike layout=contiguous"
    code, out, _ = run("check", "--op", "linear", "--impl", "torch", "--dtype", "bf16", "--case", case, "--json", file)
    assert code == 0, out
    assert json.loads(file.read_text())["case"] == case


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--op", "lineer"], "--op lineer is none of embedding, rms_norm"),
        (["--impl", "cuda"], "--impl cuda is none of torch"),
        (["--dtype", "f64"], "--dtype f64 is none of f32"),
        (["--examples", "0"], "--examples must be from 1 to 1000000, not 0"),
        (["--case", "T=1 N=1 K=1"], "--case needs --op"),
        (["--op", "linear", "--case", "T=1 N=1"], "--case of linear takes T, N, K; given: T, N"),
        (["--op", "linear", "--case", "T=1 N=1 K=0"], "K goes from 1, not 0"),
        (["--op", "linear", "--case", "T=1 N=9999999 K=9999999"], "does not fit into this machine's memory"),
        (["--op", "linear", "--case", "T=1 N=1 K=x"], "--case: 'K=x': 'x' is not a number"),
        (["--op", "linear", "--case", "T=1 N=1 K=1 T=2"], "--case: T is given twice"),
        (["--op", "linear", "--case", "T=1,N=1,K=1,scale=nan"], "scale=nan is not in"),
        (["--op", "linear", "--case", "T=1 N=1 K=1 layout=diagonal"], "layout=diagonal is none of contiguous"),
        (["--mutants", "--impl", "mojo"], "--mutants takes --op"),
    ],
)
def test_bad_options_are_one_line(run: Run, options: list[str], words: str) -> None:
    code, out, err = run("check", *options)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_process_that_dies_is_one_failed_line_and_the_rest_runs() -> None:
    killed = []

    def show(doing: str) -> None:
        if doing.startswith("greedy") and not killed:
            (child,) = multiprocessing.active_children()
            child.kill()
            child.join()
            killed.append(doing)

    todo = [("linear", "torch", "f32"), ("greedy", "torch", "f32"), ("embedding", "torch", "f32")]
    first, second, third = run_lines(todo, Plan(examples=5), show)
    assert (first.verdict, third.verdict) == ("PASS", "PASS")
    assert second.verdict == "FAIL"
    assert "SIGKILL" in second.failures[0].reason
    assert second.failures[0].property


def test_a_process_that_does_not_go_on_is_ended_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "SILENCE_S", 0.0)
    (line,) = run_lines([("linear", "torch", "f32")], Plan(examples=5), lambda _: None)
    assert line.verdict == "FAIL"
    assert "did not go on for 0 s" in line.failures[0].reason
    assert not multiprocessing.active_children()


def test_simulated_devices_run_at_the_same_time_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(isolated, "SILENCE_S", 0.0)  # none gets as far as a compiler
    at_once: dict[str, int] = {}

    def show(doing: str) -> None:
        at_once[doing.split(", ")[1]] = len(multiprocessing.active_children())

    rows = ("torch", "mojo", "mojo@sm_80", "mojo@sm_90a", "mojo@gfx942")
    lines = list(run_lines([("greedy", row, "f32") for row in rows], Plan(examples=5), show))
    assert sorted(line.implementation for line in lines) == sorted(rows)
    assert list(at_once.values()) == [1, 1, 1, 2, 3]


def test_lines_stand_in_the_order_they_were_asked_for_whichever_ended_first() -> None:
    todo = [("linear", "mojo@sm_80", "f32"), ("linear", "mojo@gfx942", "f32")]
    ended = [Line(*task, "PASS", bitwise=False, strided="refused") for task in reversed(todo)]
    lines = campaign_document(todo, Plan(), ended)["lines"]
    assert [line["implementation"] for line in lines] == ["mojo@sm_80", "mojo@gfx942"]


def test_a_compiler_ends_with_the_line_it_compiled_for(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless, started = tmp_path / "cc", tmp_path / "pid"
    endless.write_text(f"#!/bin/sh\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 600\n")
    endless.chmod(0o755)
    monkeypatch.setenv("CC", str(endless))

    def kill_once_it_compiles() -> None:
        while not started.exists():
            time.sleep(0.05)
        for child in multiprocessing.active_children():
            child.kill()

    threading.Thread(target=kill_once_it_compiles, daemon=True).start()
    (line,) = run_lines([("greedy", "mojo@sm_80", "f32")], Plan(examples=5), lambda _: None)
    assert line.verdict == "FAIL"
    compiler = int(started.read_text())
    ended = eventually(lambda: gone(compiler))
    if not ended:
        os.kill(compiler, signal.SIGKILL)
    assert ended


def test_memory_of_a_campaign_is_full_of_large_numbers() -> None:
    code = "import torch; print(float(torch.empty(1000).min()), float(torch.empty(1000, dtype=torch.bfloat16).min()))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **POISON}, capture_output=True, text=True, check=True
    )
    assert all(float(value) > 1e38 for value in ran.stdout.split())
    assert not POISON.keys() & os.environ.keys()


def test_a_failure_prints_the_command_that_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = "check --op linear --impl mojo --dtype f32 --case 'T=2 N=1 K=9 seed=3'"
    monkeypatch.delenv("SHIPWAY_DEV", raising=False)
    out = printed(PASSED, BROKEN)
    assert f" shipway {again}" in out
    assert "1 PASS, 1 FAIL" in out
    monkeypatch.setenv("SHIPWAY_DEV", "1")  # under ./dev
    assert f" ./dev {again}" in printed(BROKEN)


def test_without_impl_only_what_runs_on_this_machine_is_checked(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    asked: list[isolated.Task] = []

    def remember(todo: list[isolated.Task], plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
        asked[:] = todo
        yield Line(*todo[0], "PASS", bitwise=True, strided="handled")

    monkeypatch.setattr(checks, "run_lines", remember)
    run("check", "--op", "greedy", "--dtype", "f32")
    assert [row for _, row, _ in asked] == ["torch", "mojo", "max", "jax", "tvm"]
    run("check", "--op", "greedy", "--dtype", "f32", "--impl", "mojo@*")
    assert [row for _, row, _ in asked] == [f"mojo@{target}" for target in SIMULATED]


def test_what_did_not_run_says_why_and_has_no_figures() -> None:
    out = printed(PASSED, ABSENT)
    assert "not run linear tvm f32: tvm not installed: pip install tvm" in out
    row = next(line for line in out.splitlines() if " tvm " in line)
    assert row.split()[5:7] == ["-", "-"]


@pytest.mark.parametrize(
    ("lines", "code"), [((PASSED,), 0), ((PASSED, ABSENT), 0), ((PASSED, BROKEN), 1), ((ABSENT,), 3), ((BROKEN,), 1)]
)
def test_exit_code_of_a_campaign(lines: tuple[Line, ...], code: int) -> None:
    assert lines_exit_code(document(*lines)) == code


def test_mutants_of_one_op_all_turn_red(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mutants.json"
    code, out, _ = run("check", "--mutants", "--op", "embedding", "--examples", 10, "--json", file)
    assert code == 0, out
    assert "5 of 5 broken variants turn red" in out
    assert json.loads(file.read_text())["untested"] == []


RED = {"property": "reference", "case": "T=1", "reason": "off"}


@pytest.mark.parametrize(
    ("mutants", "untested", "words"),
    [
        ([{"op": "linear", "defect": "tail", "red": []}], [], "SURVIVES linear: tail"),
        ([{"op": "linear", "defect": "", "red": [RED]}], [], "the unbroken form is red: off"),
        ([{"op": "linear", "defect": "tail", "red": [RED]}], [["linear", "row_alone"]], "UNTESTED linear"),
    ],
)
def test_a_survivor_a_red_original_and_an_untested_property_fail(
    mutants: list[dict[str, object]], untested: list[list[str]], words: str
) -> None:
    found = {"planned": len(mutants), "mutants": mutants, "untested": untested}
    out = io.StringIO()
    print_mutants(found, out)
    assert words in out.getvalue()
    assert mutants_exit_code(found) == 1


def test_stopped_mutants_keep_what_is_done(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    def one(todo: list[Any], examples: int, seed: int, done: list[dict[str, Any]], show: Any) -> None:
        done.append({"op": "embedding", "defect": "off", "red": [RED]})
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_mutants", one)
    file = tmp_path / "mutants.json"
    code, out, _ = run("check", "--mutants", "--op", "embedding", "--json", file)
    assert code == 130
    assert "stopped: 5 of 6 variants did not end" in out
    assert "UNTESTED" not in out
    assert len(json.loads(file.read_text())["mutants"]) == 1


def test_a_stopped_campaign_keeps_its_finished_lines(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    def two_of_three(todo: list[isolated.Task], plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
        for op, implementation, dtype in todo[:2]:
            yield Line(op, implementation, dtype, "PASS", bitwise=True, strided="handled", examples=1)
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_lines", two_of_three)
    file = tmp_path / "check.json"
    code, out, _ = run("check", "--op", "linear,greedy", "--impl", "torch", "--json", str(file))
    assert code == 130
    assert out.count("PASS") == 3
    assert "stopped: 2 of 4 lines did not end" in out
    assert len(json.loads(file.read_text())["lines"]) == 2
