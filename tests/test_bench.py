import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quick_bench import quick_bench
from shipway.errors import ShipwayError
from shipway.measure import bench as bench_module
from shipway.measure import verdicts
from shipway.measure.bench import Benchmark, Settings
from shipway.measure.result import Result
from shipway.report.decision import decide


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_bench(tmp_path_factory.mktemp("cache")):
        yield


def run(checkpoint: str, *routes: str, progress: Callable[[str], None] = lambda line: None, **changes: Any) -> Result:
    options: dict[str, Any] = {"rounds": 3, "prompt_tokens": 12, "new_tokens": 5, "threads": 1, "price": "1"} | changes
    settings = Settings(model=checkpoint, routes=routes, dtypes=options.pop("dtypes", ("f32",)), **options)
    return Benchmark(settings, progress).run()


def entries(result: Result) -> dict[str, Any]:
    return {entry["route"]: entry for entry in result["entries"]}


@pytest.fixture(scope="module")
def good(checkpoint: str, quick: None) -> Result:
    """One benchmark of the baseline and a route like it, in both dtypes, with a sweep."""
    return run(checkpoint, "Twin", "torch-eager", dtypes=("f32", "bf16"), contexts=(20, 40))


@pytest.fixture(scope="module")
def mixed(checkpoint: str, quick: None) -> Result:
    """One benchmark of routes that go wrong in every way there is, between two that do not."""
    routes = ("torch-eager", "Wrong", "CrashesLate", "Hangs", "Lacks", "absent", "CompilesOnce")
    return run(checkpoint, *routes, timeout_s=10.0)


def test_every_round_of_every_route_is_recorded(good: Result) -> None:
    assert [(entry["route"], entry["dtype"]) for entry in good["entries"]] == [
        ("torch-eager", "f32"),
        ("Twin", "f32"),
        ("torch-eager", "bf16"),
        ("Twin", "bf16"),
    ]
    for entry in good["entries"]:
        assert entry["status"] == "ok"
        assert [sample["round"] for sample in entry["samples"]] == [0, 1, 2]
        for sample in entry["samples"]:
            assert len(sample["times"]) == 5
            assert np.all(np.diff([0, *sample["times"]]) > 0)
        assert sorted(sample["prompt_tokens"] for sample in entry["sweep"]) == [20] * 3 + [40] * 3
        assert entry["peak_memory_bytes"] > 1 << 20
        assert entry["starts"][0]["total_s"] >= entry["starts"][0]["load_s"]


def test_rounds_are_interleaved_forth_and_back(good: Result) -> None:
    first = [entry["samples"][0]["position"] for entry in good["entries"]]
    second = [entry["samples"][1]["position"] for entry in good["entries"]]
    assert first == [0, 1, 2, 3]
    assert second == [3, 2, 1, 0]


def test_verdicts_hold_and_stand_beside_every_speed(good: Result) -> None:
    for entry in good["entries"]:
        assert entry["verdict"] is not None
        assert entry["verdict"]["ok"]


def test_result_says_what_it_was_made_with(good: Result) -> None:
    assert good["schema_version"] == 1
    assert good["environment"]["threads"] == 1
    assert good["environment"]["packages"]["torch"]
    assert good["workload"]["contexts"] == [20, 40]
    assert good["price"]["usd_per_hour"] == 1.0
    assert {sample["round"] for sample in good["probes"]} == {0, 1, 2}
    assert len(good["rounds"]) == 3
    json.dumps(good)


def test_wrong_route_fails_its_verdict_and_is_not_timed(mixed: Result) -> None:
    wrong = entries(mixed)["Wrong"]
    assert wrong["status"] == "fail"
    assert "KL" in wrong["reason"]
    assert wrong["samples"] == []


def test_crash_and_hang_are_named_and_end_with_the_route(mixed: Result) -> None:
    assert entries(mixed)["CrashesLate"]["status"] == "failed"
    assert "SIGSEGV" in entries(mixed)["CrashesLate"]["reason"]
    assert entries(mixed)["Hangs"]["status"] == "failed"
    assert "within 10 s" in entries(mixed)["Hangs"]["reason"]


def test_route_that_cannot_run_is_listed_with_its_reason(mixed: Result) -> None:
    for name, reason in (("absent", "needs no_such_module: pip install it"), ("Lacks", "needs a GPU: plug one in")):
        assert (entries(mixed)[name]["status"], entries(mixed)[name]["reason"]) == ("not run", reason)


def test_routes_that_hold_are_timed_whatever_happens_to_the_others(mixed: Result) -> None:
    for name in ("torch-eager", "CompilesOnce"):
        assert entries(mixed)[name]["status"] == "ok"
        assert len(entries(mixed)[name]["samples"]) == 3
    assert decide(mixed).count("is not ranked") == 3
    assert decide(mixed).count("was not run") == 2


def test_compiling_route_is_started_again_for_its_warm_cost(mixed: Result) -> None:
    starts = entries(mixed)["CompilesOnce"]["starts"]
    assert [start["compile_cold"] for start in starts] == [True, False]
    assert len(entries(mixed)["torch-eager"]["starts"]) == 1


def test_memory_of_the_compilation_is_kept_apart(mixed: Result) -> None:
    once, eager = entries(mixed)["CompilesOnce"], entries(mixed)["torch-eager"]
    assert once["cold_peak_memory_bytes"] - once["peak_memory_bytes"] > 150 << 20  # what its compiler took
    assert eager["cold_peak_memory_bytes"] is None


def test_reduced_precision_is_judged_beside_torch_even_when_it_is_not_timed(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = []
    judge = verdicts.judge_route

    def spy(logits: Any, reference: Any, base: Any, tokens: Any, dtype: str) -> dict[str, Any]:
        bases.append(base)
        return judge(logits, reference, base, tokens, dtype)

    monkeypatch.setattr(bench_module, "judge_route", spy)
    result = run(checkpoint, "Twin", dtypes=("bf16",))
    assert entries(result)["Twin"]["status"] == "ok"
    assert len(bases) == 1
    assert bases[0] is not None
    assert bases[0].shape[1] == 320


def test_workers_take_turns_when_memory_is_short(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    peak = 0
    start, close = bench_module.Contender.start, bench_module.Contender.close

    def started(self: Any, prompts: Any) -> None:
        nonlocal peak
        start(self, prompts)
        alive.append(id(self))
        peak = max(peak, len(alive))

    def closed(self: Any) -> None:
        if self.worker is not None and id(self) in alive:
            alive.remove(id(self))
        close(self)

    monkeypatch.setattr(bench_module.Contender, "start", started)
    monkeypatch.setattr(bench_module.Contender, "close", closed)
    monkeypatch.setattr(bench_module, "memory_available", lambda: 0)
    result = run(checkpoint, "torch-eager", "Twin", rounds=2)
    assert peak == 1
    for entry in result["entries"]:
        assert len(entry["samples"]) == 2
        assert entry["peak_memory_bytes"] > 1 << 20


def test_only_the_timed_worker_runs(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[list[str]] = []
    benchmark = Benchmark(
        Settings(
            checkpoint, ("torch-eager", "Twin"), ("f32",), threads=1, rounds=2, prompt_tokens=8, new_tokens=3, price="1"
        ),
        lambda line: None,
    )
    time_run = bench_module.Contender.time_run

    def spy(self: Any, *arguments: Any) -> Any:
        others = [one.worker for one in benchmark._contenders if one is not self]
        assert all(other is not None for other in others)
        states.append([Path(f"/proc/{o.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for o in others if o])
        return time_run(self, *arguments)

    monkeypatch.setattr(bench_module.Contender, "time_run", spy)
    benchmark.run()
    assert states == [["T"]] * 4


def test_broken_probe_costs_the_limits_only(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(bench_module.PROBE, factory="fake_models:BrokenProbe")
    monkeypatch.setattr(bench_module, "PROBE", broken)
    result = run(checkpoint, "torch-eager", rounds=1)
    assert result["probes"] == []
    assert any("no % of limit" in warning for warning in result["warnings"])
    assert len(entries(result)["torch-eager"]["samples"]) == 1


def test_busy_machine_is_a_warning(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "wait_until_idle", lambda limit_s: 0.5)
    result = run(checkpoint, "torch-eager", rounds=1)
    for when in ("before the first start", "round 1"):
        assert f"{when}: 50% of the CPU was in use by others" in result["warnings"]


def test_waiting_for_an_idle_machine_is_bounded_over_the_whole_run(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    clock = itertools.count(0.0, 10.0)  # a wait takes all it is given
    benchmark = Benchmark(Settings(checkpoint, ("torch-eager",), ("f32",), threads=1, price="1"), lambda line: None)

    def waits(limit_s: float) -> float:
        limits.append(limit_s)
        return 0.5

    monkeypatch.setattr(bench_module, "wait_until_idle", waits)
    monkeypatch.setattr(bench_module.time, "monotonic", lambda: next(clock))
    for number in range(6):
        benchmark._wait_until_idle(f"round {number}")
    assert limits == [10.0, 10.0, 10.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"device": "cuda"}, "runs on cpu"), ({"weights": "bf16"}, "activation dtype")],
)
def test_nothing_is_measured_when_no_route_can_run(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    def unexpected(*arguments: object, **options: object) -> None:
        raise AssertionError("work without a route")

    for name in ("cached_reference_logits", "Worker", "wait_until_idle"):
        monkeypatch.setattr(bench_module, name, unexpected)
    result = run(checkpoint, "torch-eager", **options)
    assert reason in entries(result)["torch-eager"]["reason"]
    assert result["rounds"] == result["probes"] == []


def test_nothing_is_timed_when_no_route_holds(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Benchmark, "_start_probe", lambda self: pytest.fail("probes without a route"))
    result = run(checkpoint, "Wrong", "Lacks")
    assert [entry["status"] for entry in result["entries"]] == ["fail", "not run"]
    assert result["rounds"] == []


def test_reference_that_cannot_be_kept_is_a_warning(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(file: Any, array: Any) -> None:
        file.write(b"x")
        raise OSError("Not enough free space to write 9 bytes")  # numpy gives no errno

    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts.np, "save", full)
    result = run(checkpoint, "Wrong")
    assert entries(result)["Wrong"]["verdict"] is not None
    assert any(str(tmp_path) in line and "Not enough free space" in line for line in result["warnings"])
    assert list((tmp_path / "reference").iterdir()) == []


def test_full_cache_ends_the_benchmark_with_its_place(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shipway.client.shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(ShipwayError, match=r"disk of the cache \S+ has 1.0 MB free.*Failed to compile") as caught:
        run(checkpoint, "Unprepared", "torch-eager")
    assert caught.value.exit_code == 2


def test_reference_logits_are_kept_between_runs(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(checkpoint, "Lacks")

    def unexpected(*arguments: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(verdicts.reference_model, "reference_logits", unexpected)
    run(checkpoint, "Lacks")


@pytest.mark.parametrize("left", [0, 20, 4000])
def test_kept_reference_that_was_cut_short_is_made_again(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int
) -> None:
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path))
    run(checkpoint, "Lacks")
    (kept,) = (tmp_path / "reference").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:left])
    run(checkpoint, "Lacks")
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rounds": 0}, "--rounds"),
        ({"new_tokens": 1}, "--new-tokens"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"contexts": (0,)}, "--contexts"),
        ({"prompt_tokens": 252}, "context of 257 tokens"),
        ({"contexts": (250,)}, "context of 266 tokens"),
        ({"price": "cheap"}, "--price"),
        ({"threads": 100_000}, "threads"),
        ({"dtypes": ()}, "dtype"),
        ({"dtypes": ("f32", "f8")}, "dtype 'f8'"),
        ({"dtypes": ("f16",)}, "dtype 'f16'"),
        ({"weights": "q4"}, "weight format 'q4'"),
        ({"device": "tpu"}, "device is called 'tpu'"),
    ],
)
def test_settings_no_benchmark_can_be_made_with_are_refused(
    checkpoint: str, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ShipwayError, match=part):
        run(checkpoint, "torch-eager", **changes)
