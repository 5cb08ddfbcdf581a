"""The table, the figures and the decision that are made from a result."""

import copy
import re
from pathlib import Path

import pytest

from example_results import FAST, SLOW, START, VERDICT, entry, printed, result
from shipway.measure.result import read_result, write_json
from shipway.report.decision import decide
from shipway.report.summary import summarise


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
