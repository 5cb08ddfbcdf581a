"""The command ``bench``: what it prints, what it writes, how it exits."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example_results import entry, result
from quick_bench import quick_bench
from shipway.cli.bench import bench as bench_command
from shipway.cli.main import main
from shipway.errors import ShipwayError
from shipway.measure import bench as bench_module
from shipway.measure.bench import Benchmark
from shipway.measure.result import Result, read_result


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_bench(tmp_path_factory.mktemp("cache")):
        yield


def command(monkeypatch: pytest.MonkeyPatch, checkpoint: str, *arguments: object) -> int:
    common = ["bench", "--model", checkpoint, "--threads", 1, "--rounds", 3, "--prompt-tokens", 8, "--new-tokens", 3]
    monkeypatch.setattr(sys, "argv", ["shipway", *map(str, [*common, "--price", 1, *arguments])])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_command_prints_the_table_of_the_file_it_writes(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    code = command(monkeypatch, checkpoint, "--routes", "torch-eager,Twin", "--dtype", "f32", "--json", path)
    out = capsys.readouterr().out
    assert code == 0
    assert "PASS" in out
    assert "In f32 " in out
    monkeypatch.setattr(sys, "argv", ["shipway", "report", str(path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == out


def interrupt(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, round_number: int, position: int) -> None:
    """Sends this process a signal just before a route is timed at ``position`` of a round."""
    time_run = bench_module.Contender.time_run

    def pressed(self: Any, prompt: Any, new_tokens: int, *when: int) -> Any:
        if when == (round_number, position):
            os.kill(os.getpid(), number)
        return time_run(self, prompt, new_tokens, *when)

    monkeypatch.setattr(bench_module.Contender, "time_run", pressed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_benchmark_keeps_the_rounds_that_every_route_ended(
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    interrupt(monkeypatch, number, round_number=2, position=1)  # one of two routes is timed in the third round
    path = tmp_path / "r.json"
    options = ("--routes", "torch-eager,Twin", "--dtype", "f32", "--contexts", "20", "--rounds", 4, "--json", path)
    assert command(monkeypatch, checkpoint, *options) == code
    out, err = capsys.readouterr()
    assert "stopped: 2 of 4 rounds ended\n" in out
    assert "\nStopped after 2 of 4 rounds. In f32 " in out
    assert err.splitlines()[-1] == f"shipway: {'interrupted' if number == signal.SIGINT else 'terminated'}"
    kept = read_result(path)
    assert kept["stopped"] == {"planned_rounds": 4}
    assert (kept["workload"]["rounds"], len(kept["rounds"])) == (2, 2)
    assert {sample["round"] for sample in kept["probes"]} == {0, 1}
    for one in kept["entries"]:
        assert [sample["round"] for sample in one["samples"]] == [0, 1]
        assert [sample["round"] for sample in one["sweep"]] == [0, 1]
    monkeypatch.setattr(sys, "argv", ["shipway", "report", str(path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == out


def test_benchmark_stopped_in_its_first_round_is_one_line(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    interrupt(monkeypatch, signal.SIGINT, round_number=0, position=1)
    path = tmp_path / "r.json"
    options = ("--routes", "torch-eager,Twin", "--dtype", "f32", "--json", path)
    assert command(monkeypatch, checkpoint, *options) == 130
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1], path.exists()) == ("", "shipway: interrupted", False)


def test_exit_code_says_whether_all_held(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, checkpoint, "--routes", "Wrong", "--dtype", "f32") == 1
    assert command(monkeypatch, checkpoint, "--routes", "Lacks", "--dtype", "f32") == 3
    assert command(monkeypatch, checkpoint, "--routes", "no-such", "--dtype", "f32") == 2
    assert command(monkeypatch, checkpoint, "--routes", "torch-eager", "--contexts", "a") == 2


def test_table_and_file_do_not_lose_each_other(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Benchmark, "run", lambda self: result(entry("torch-eager", [0.1] * 5)))
    path = tmp_path / "r.json"

    def full(path: Path, document: object) -> None:
        raise ShipwayError(f"cannot write {path}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shipway.cli.bench.write_json", full)
        assert command(monkeypatch, checkpoint, "--routes", "torch-eager", "--json", path) == 2
    assert "In f32 " in capsys.readouterr().out

    def gone(result: Result, out: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("shipway.report.table.print_result", gone)
    with pytest.raises(BrokenPipeError):
        bench_command(checkpoint, routes="torch-eager", threads=1, price="1", json=path)
    assert read_result(path)["entries"]


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--dtype", "f32", "--weights", "bf16")])
def test_command_lists_what_cannot_run_and_exits_with_3(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(bench_module, "Worker", lambda *arguments, **more: pytest.fail("a worker was started"))
    assert command(monkeypatch, checkpoint, "--routes", "torch-eager", *options) == 3
    assert "torch-eager f32 was not run: " in capsys.readouterr().out
