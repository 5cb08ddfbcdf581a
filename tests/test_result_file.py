"""The result file: written whole or not at all, and refused in one line where it is damaged."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Run
from example_results import SLOW, VERDICT, entry, printed, result
from shipway.errors import ShipwayError
from shipway.measure.result import check_writable, read_result, write_json


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"command": "generate"}', '{"command": "bench", "schema_version": 99}', "\xff"]
)
def test_file_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ShipwayError):
        read_result(path)


def test_truncated_result_is_refused(tmp_path: Path) -> None:
    document: dict[str, Any] = dict(result())
    del document["probes"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ShipwayError, match="probes"):
        read_result(path)


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    document = json.loads(json.dumps(result(entry("torch-eager", SLOW))))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda d: d.update(entries=[{}]), r"entries\[0\] lacks decode_bytes, dtype"),
        (lambda d: d.update(entries={}), "entries is {}"),
        (lambda d: d.update(entries=[None]), r"entries\[0\] is null"),
        (lambda d: d.update(environment=[]), r"environment is \[\]"),
        (lambda d: d.update(warnings="none"), 'warnings is "none"'),
        (lambda d: d["environment"].update(packages={"torch": 2}), "environment.packages.torch is 2"),
        (lambda d: d["environment"].pop("cpu"), "environment lacks cpu"),
        (lambda d: d["workload"].update(parameters="many"), 'workload.parameters is "many"'),
        (lambda d: d["workload"].update(contexts=[1.5]), r"workload.contexts\[0\] is 1.5"),
        (lambda d: d["workload"].update(rounds=7), "timed in rounds"),
        (lambda d: d.update(stopped={"planned_rounds": 5}), "stopped.planned_rounds is 5, of which 5 ended"),
        (lambda d: d.update(stopped=True), "stopped is true"),
        (lambda d: d["workload"].update(parameters=-1), "workload.parameters is -1"),
        (lambda d: d["workload"].update(parameters=10**400), "workload.parameters is 1000"),
        (lambda d: d["workload"].update(rounds=-5), "workload.rounds is -5"),
        (lambda d: d["price"].update(usd_per_hour=0), "usd_per_hour"),
        (lambda d: d["price"].update(usd_per_hour=float("inf")), "usd_per_hour is Infinity"),
        (lambda d: d["price"].update(usd_per_hour="inf"), "usd_per_hour is inf"),
        (lambda d: d["entries"].append(d["entries"][0]), r"entries\[1\] is a second one of torch-eager f32"),
        (lambda d: d["entries"][0].update(decode_bytes=0), "decode_bytes is 0"),
        (lambda d: d["entries"][0].update(prefill_flops=-1), "prefill_flops is -1"),
        (lambda d: d["entries"][0]["samples"][0].update(prompt_tokens=0), "prompt_tokens is 0"),
        (
            lambda d: d["entries"][0]["verdict"].update(ok=False),
            "status is 'ok' and not fail or failed, as its verdict",
        ),
        (lambda d: d["entries"][0].update(verdict=None), "status is 'ok' and not failed or not run, as its verdict"),
        (lambda d: d["entries"][0].update(status="fail"), "status is 'fail' and not ok or failed, as its verdict"),
        (lambda d: d["probes"][0].update(value=0), r"probes\[0\].value"),
        (lambda d: d["probes"][0].update(value="fast"), r"probes\[0\].value"),
        (lambda d: d["entries"][0].update(status="good"), "status is 'good'"),
        (lambda d: d["entries"][0].update(starts=[{}]), r"starts\[0\] lacks"),
        (lambda d: d["entries"][0].update(verdict={}), "verdict lacks"),
        (lambda d: d["entries"][0].update(verdict=True), "verdict is true"),
        (lambda d: d["entries"][0].update(peak_memory_bytes=True), "peak_memory_bytes is true"),
        (lambda d: d["entries"][0]["samples"].pop(), "timed in rounds"),
        (lambda d: d["entries"][0]["samples"][0].update(times=[]), "times"),
        (lambda d: d["entries"][0]["samples"][0].update(times=[1.0]), "times"),
        (lambda d: d["entries"][0]["samples"][0].update(times=[1.0, 1.0]), "times"),
        (lambda d: d["entries"][0]["samples"][0].update(times=[1.0, "nan"]), "times"),
        (lambda d: d["entries"][0].update(sweep=[{"round": 0}]), r"sweep\[0\] lacks"),
    ],
)
def test_damaged_result_is_refused_with_the_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], part: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(damaged(change))
    with pytest.raises(ShipwayError, match=part) as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


def test_text_of_a_file_commands_no_terminal(run: Run, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["workload"]["model"] = "\x1b[31mred\nline"
        document["environment"]["packages"] = {"\x1b]0;title\x07": "1"}

    (tmp_path / "r.json").write_text(damaged(change))
    code, out, _ = run("report", tmp_path / "r.json")
    assert code == 0
    assert out.startswith("?[31mred?line: llama")
    assert "?]0;title? 1" in out
    assert "\x1b" not in out


def test_nan_and_infinities_of_a_verdict_survive_the_file(tmp_path: Path) -> None:
    broken = VERDICT | {"ok": False, "reason": "NaN", "kl_mean": float("nan"), "delta_nll_mean": float("inf")}
    document = result(entry("torch-eager", SLOW), entry("mojo-graph", [], status="fail", reason="nan", verdict=broken))
    path = tmp_path / "r.json"
    write_json(path, document)
    read = read_result(path)
    assert printed(read) == printed(document)
    assert "mean KL nan and mean |delta NLL| inf" in printed(read)
    assert read["entries"][1]["reason"] == "nan"  # what was text stays text


def test_json_path_is_checked_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    long = tmp_path / ("n" * 255)
    check_writable(long)
    write_json(long, {})
    long.unlink()
    (tmp_path / "file").touch()
    for bad in (
        tmp_path,
        tmp_path / "none" / "r.json",
        tmp_path / "file" / "r.json",
        tmp_path / ("n" * 256),
        Path("/proc/shipway.json"),
        Path("/proc/version"),
    ):
        with pytest.raises(ShipwayError, match="cannot write"):
            check_writable(bad)
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ShipwayError, match="permission"):
            check_writable(tmp_path / "new.json")


def test_numbers_json_lacks_are_written_by_name(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [float("inf"), float("nan"), 1.0]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": ["inf", "nan", 1.0]}


def test_failed_writing_leaves_the_old_file_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(self: Path, text: str) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ShipwayError, match="No space left"):
        write_json(path, {"a": 1})
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


def test_writing_leaves_no_partial_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
