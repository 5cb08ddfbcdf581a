import copy
import errno
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Run
from shipway.errors import ShipwayError
from shipway.measure.result import Entry, Result, check_writable, read_result, write_json
from shipway.report.decision import decide
from shipway.report.summary import summarise
from shipway.report.table import print_result

START = {
    "total_s": 2.0,
    "import_s": 1.0,
    "load_s": 0.5,
    "compile_s": 0.25,
    "compile_cold": False,
    "cold_compile_s": 14.0,
    "cold_date": "2026-01-02",
    "artefact_bytes": 3 << 20,
    "notes": [],
}

VERDICT = {
    "ok": True,
    "reason": "",
    "positions": 64,
    "kl_mean": 1e-12,
    "delta_nll_mean": 2e-6,
    "base_kl_mean": None,
    "base_delta_nll_mean": None,
    "agreement": 1.0,
    "first_divergence": None,
}


def entry(route: str, tpots: list[float], ttft: float = 0.2, dtype: str = "f32", **changes: Any) -> Entry:
    """A route whose rounds took ``ttft`` s to the first and ``tpots[r]`` s to each of two further tokens."""
    samples = [
        {"round": r, "position": 0, "prompt_tokens": 100, "times": [ttft, ttft + tpot, ttft + 2 * tpot]}
        for r, tpot in enumerate(tpots)
    ]
    fields = {
        "route": route,
        "dtype": dtype,
        "weights": dtype,
        "status": "ok",
        "reason": None,
        "verdict": VERDICT,
        "starts": [START],
        "install_bytes": 5 << 30,
        "lock_in": "open (MIT)",
        "peak_memory_bytes": 700 << 20,
        "decode_bytes": 1e9,
        "prefill_flops": 2e10,
        "ids": [1, 2, 3],
        "samples": samples,
        "sweep": [],
        "sweep_decode_bytes": {},
    }
    return fields | changes  # type: ignore[return-value]


def result(*entries: Entry, rounds: int = 5) -> Result:
    probes = []
    for number in range(rounds):
        probes += [
            {"round": number, "pattern": "weak", "kind": "read bytes/s", "value": 1e10},
            {"round": number, "pattern": "strong", "kind": "read bytes/s", "value": 4e10},
            {"round": number, "pattern": "gemm", "kind": "f32 GEMM FLOP/s", "value": 2e11},
        ]
    return {
        "schema_version": 1,
        "command": "bench",
        "created": "2026-01-02T03:04:05+0000",
        "environment": {
            "cpu": "a CPU",
            "threads": 2,
            "cores": 2,
            "memory_bytes": 24 << 30,
            "gpu": "none",
            "packages": {"torch": "2.13.0"},
        },
        "workload": {
            "model": "tiny",
            "architecture": "llama",
            "parameters": 1_000_000,
            "prompt_tokens": 100,
            "new_tokens": 3,
            "batch": 1,
            "rounds": rounds,
            "contexts": [],
            "sweep_new_tokens": 16,
            "verdict_tokens": 64,
            "device": "cpu",
            "baseline": "torch-eager",
        },
        "price": {"usd_per_hour": 0.36, "machine": "a machine", "source": "a list, 2026"},
        "rounds": [{"round": number, "busy_share": 0.0} for number in range(rounds)],
        "probes": probes,  # type: ignore[typeddict-item]
        "entries": list(entries),
        "warnings": ["round 2: 30% of the CPU was in use by others"],
    }


SLOW, FAST = [0.1, 0.11, 0.1, 0.12, 0.1], [0.05, 0.05, 0.055, 0.05, 0.06]


def printed(document: Result) -> str:
    out = io.StringIO()
    print_result(document, out)
    return out.getvalue()


def test_figures_follow_the_definitions() -> None:
    row = summarise(result(entry("torch-eager", [0.1] * 5)))[0]
    assert row.decode is not None
    assert row.decode.median == pytest.approx(10)  # 1 / TPOT
    assert row.ttft_s is not None
    assert row.ttft_s.median == pytest.approx(0.2)
    assert row.prefill is not None
    assert row.prefill.median == pytest.approx(500)  # 100 / 0.2: TTFT is no inter-token interval
    assert row.usd_out == pytest.approx(10.0)  # 0.36 / (10 * 3600) * 1e6
    assert row.usd_in == pytest.approx(0.2)
    assert row.decode_share is not None
    assert row.decode_share.median == pytest.approx(0.25)  # 1e9 B * 10/s of the best pattern's 4e10 B/s
    assert row.prefill_share is not None
    assert row.prefill_share.median == pytest.approx(0.5)


def test_share_above_the_limit_is_printed_and_not_clipped() -> None:
    assert "120" in printed(result(entry("torch-eager", [1 / 48] * 5)))


def test_ratio_to_the_baseline_is_taken_per_round_and_within_one_dtype() -> None:
    rows = summarise(
        result(
            entry("torch-eager", SLOW),
            entry("mojo-graph", [tpot / 2 for tpot in SLOW]),
            entry("mojo-graph", FAST, dtype="bf16"),
        )
    )
    assert rows[1].ratio_decode is not None
    assert (rows[1].ratio_decode.low, rows[1].ratio_decode.high) == pytest.approx((2.0, 2.0))
    assert rows[2].ratio_decode is None


def test_decision_ranks_what_lies_outside_the_interval() -> None:
    text = decide(result(entry("torch-eager", SLOW), entry("mojo-graph", FAST)))
    assert text.startswith("In f32 ship mojo-graph for decode: 20.0 decode tokens/s")
    assert "2.00x torch-eager" in text
    assert "for prefill torch-eager and mojo-graph tie" in text


def test_difference_inside_the_interval_is_called_a_tie() -> None:
    text = decide(
        result(
            entry("torch-eager", [0.10, 0.11, 0.10, 0.12, 0.10]), entry("mojo-graph", [0.11, 0.10, 0.10, 0.11, 0.10])
        )
    )
    assert "tie for decode" in text
    assert "ship" not in text


def test_decode_and_prefill_may_go_to_different_routes() -> None:
    text = decide(result(entry("torch-eager", SLOW, ttft=0.1), entry("mojo-graph", FAST, ttft=0.3)))
    assert "ship mojo-graph for decode" in text
    assert "prefill goes to torch-eager, 3.00x mojo-graph" in text


@pytest.mark.parametrize(("status", "word"), [("fail", "its numerics fail"), ("failed", "it broke")])
def test_failed_route_is_shown_but_neither_timed_nor_ranked(status: str, word: str) -> None:
    verdict = VERDICT | {"ok": status != "fail", "reason": "token 3 differs"}
    bad = entry("mojo-graph", FAST, status=status, reason="token 3 differs", verdict=verdict)
    document = result(entry("torch-eager", SLOW), bad)
    text = decide(document)
    assert "only torch-eager qualifies" in text
    assert f"mojo-graph f32 is not ranked, {word}: token 3 differs." in text
    line = next(line for line in printed(document).splitlines() if line.startswith("mojo-graph"))
    assert "FAIL" in line
    assert "20.0" not in line


def test_failed_baseline_is_nobodys_yardstick() -> None:
    document = result(entry("torch-eager", SLOW, status="failed", reason="died"), entry("mojo-graph", FAST))
    assert summarise(document)[1].ratio_decode is None


def test_route_that_did_not_run_is_listed_with_its_remedy() -> None:
    absent = entry(
        "mojo-graph", [], status="not run", reason="needs max: pip install max==1", verdict=None, starts=[], ids=[]
    )
    document = result(entry("torch-eager", SLOW), absent)
    assert "mojo-graph f32 was not run: needs max: pip install max==1." in decide(document)
    assert any(line.split()[:4] == ["mojo-graph", "f32", "not", "run"] for line in printed(document).splitlines())


def test_first_divergent_token_is_printed_with_its_margin() -> None:
    first = {"position": 17, "reference": 5, "route": 9, "margin": 0.01, "top2_margin": 0.0123}
    document = result(entry("torch-eager", SLOW, verdict=VERDICT | {"first_divergence": first, "agreement": 0.99}))
    assert "first divergence at 17: 9 for 5, top-2 margin 0.012" in printed(document)
    assert "99.0% of greedy tokens agree" in printed(document)


def test_nothing_is_ranked_without_an_interval() -> None:
    document = result(entry("torch-eager", SLOW[:2]), entry("mojo-graph", FAST[:2]), rounds=2)
    assert "nothing is ranked" in decide(document)


def test_nothing_can_be_shipped_when_every_route_failed() -> None:
    assert "nothing can be shipped" in decide(result(entry("torch-eager", SLOW, status="fail", reason="x")))


def test_one_time_cost_shows_when_a_recorded_compilation_was_made() -> None:
    text = printed(result(entry("mojo-graph", FAST)))
    assert "14.0 (2026-01-02)" in text
    compiled_now = START | {"compile_s": 11.0, "compile_cold": True}
    text = printed(result(entry("mojo-graph", FAST, starts=[compiled_now, START])))
    assert "11.0" in text
    assert "2026-01-02" not in text


def test_table_is_made_from_the_file_alone(tmp_path: Path) -> None:
    document = result(entry("torch-eager", SLOW), entry("mojo-graph", FAST))
    path = tmp_path / "r.json"
    write_json(path, document)
    assert printed(read_result(path)) == printed(document)
    changed = copy.deepcopy(document)
    changed["entries"][1]["samples"][0]["times"][-1] += 1
    assert printed(changed) != printed(document)


def test_plain_output_is_aligned_and_free_of_control_characters() -> None:
    text = printed(result(entry("torch-eager", SLOW), entry("mojo-graph", FAST)))
    assert "\x1b" not in text
    assert not any("│" in line or "┃" in line for line in text.splitlines())
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("route") and "decode tok/s" in line)
    end = header.index("decode tok/s") + len("decode tok/s")
    for line in lines[lines.index(header) + 1 :][:2]:
        assert line[end - 1] == "]"
        assert line[end] == " "


def test_warnings_are_printed() -> None:
    assert "warning: round 2: 30%" in printed(result(entry("torch-eager", SLOW)))


def test_sweep_has_a_column_per_length() -> None:
    document = result(
        entry("torch-eager", SLOW, sweep=[{"round": 0, "position": 0, "prompt_tokens": 512, "times": [1, 1.5]}])
    )
    document["workload"]["contexts"] = [512]
    assert "decode tok/s at 512" in printed(document)
    assert "2.0" in printed(document)


def test_cold_and_warm_start_are_printed_apart_and_so_is_their_memory() -> None:
    compiled_now = START | {"total_s": 33.5, "compile_s": 11.0, "compile_cold": True}
    document = result(
        entry("torch-eager", SLOW),
        entry("mojo-graph", FAST, starts=[compiled_now, START], cold_peak_memory_bytes=1800 << 20),
    )
    lines = [re.split(r"  +", line) for line in printed(document).splitlines()]
    titles = next(line for line in lines if "cold start s" in line)
    rows = {line[0]: dict(zip(titles, line, strict=True)) for line in lines if len(line) == len(titles)}
    assert rows["mojo-graph"]["cold start s"] == "33.5"
    assert rows["mojo-graph"]["warm start s"] == "2.0"
    assert rows["mojo-graph"]["cold peak"] == "1.76 GiB"
    assert rows["mojo-graph"]["peak memory"] == "700.0 MiB"
    assert rows["torch-eager"]["cold start s"] == rows["torch-eager"]["cold peak"] == "-"
    assert rows["torch-eager"]["warm start s"] == "2.0"


def test_readme_explains_every_column_that_is_printed_and_no_other() -> None:
    document = result(entry("torch-eager", SLOW))
    document["workload"]["contexts"] = [512]
    lines = [re.split(r"  +", line) for line in printed(document).splitlines()]
    titles = {title.replace("512", "N") for line in lines if line[:2] == ["route", "dtype"] for title in line[2:]}
    section = (Path(__file__).parent.parent / "README.md").read_text().partition("## Reading the table")[2]
    rows = re.findall(r"^\| ([^|]+) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert sorted(name for row in rows if row != "column" for name in row.split(", ")) == sorted(titles)


def test_dtype_without_a_probe_has_no_share_of_a_limit() -> None:
    row = summarise(result(entry("torch-eager", SLOW, dtype="f8")))[0]
    assert row.prefill_share is None
    assert row.prefill is not None


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


def test_decision_says_that_the_machine_was_busy() -> None:
    document = result(entry("torch-eager", SLOW), entry("mojo-graph", FAST))
    assert decide(document).startswith("In f32 ship mojo-graph")
    for timed in document["rounds"][:4]:
        timed["busy_share"] = 0.5
    document["rounds"][1]["busy_share"] = 1.0
    assert decide(document).startswith(
        "Measured on a busy machine (4 of 5 rounds with up to 100% of the CPU in use by others), run it again on "
        "an idle one: In f32 ship mojo-graph"
    )


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
