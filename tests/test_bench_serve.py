"""How `bench-serve` judges and counts; servers and client are faked, but for one slow run of everything."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.measure import serving
from shipway.measure.serving import Contender, Load, bench_serving, judge_agreement
from shipway.report.serving import figures, print_serving
from shipway.serve.server import ServeSettings


def contender(
    name: str, ids: list[list[int]], margins: list[list[float]] | None = None, ttft: float = 0.5
) -> Contender:
    requests = [
        serving.Request(prompt_tokens=8, sent_s=sent, ttft_s=ttft, latency_s=ttft + 1.0) for sent in (0.0, 0.0, 2.5)
    ]
    return Contender(
        server=name,
        start_s=20.0,
        ids=ids,
        margins=margins or [[1.0] * len(row) for row in ids],
        rounds=[serving.Round(round=number, busy=0.0, requests=requests) for number in range(3)],
    )


def document(ours: Contender, stock: Contender) -> dict[str, Any]:
    workload = {"model": "m", "rounds": 3, "requests": 3, "concurrency": 2, "prompt_tokens": 8, "new_tokens": 11}
    return {
        "workload": workload | {"client": "max benchmark"},
        "verdict": judge_agreement(ours, stock),
        "servers": [ours, stock],
    }


def test_equal_tokens_pass() -> None:
    verdict = judge_agreement(contender("shipway", [[1, 2], [3, 4]]), contender("max-stock", [[1, 2], [3, 4]]))
    assert verdict["ok"]
    assert verdict["tokens"] == 4


def test_a_wrong_token_fails_and_what_follows_it_is_not_compared() -> None:
    verdict = judge_agreement(
        contender("shipway", [[1, 9, 9], [3, 4, 5]]),
        contender("max-stock", [[1, 2, 3], [3, 4, 5]], [[1.0, 0.4, 1e-6], [1.0] * 3]),
    )
    assert not verdict["ok"]
    assert verdict["largest_margin"] == 0.4
    assert verdict["tokens"] == 5
    assert verdict["first_apart"] == 1


def test_parting_at_a_near_tie_passes_and_is_counted() -> None:
    verdict = judge_agreement(contender("shipway", [[1, 9]]), contender("max-stock", [[1, 2]], [[1.0, 1e-5]]))
    assert verdict["ok"]
    assert verdict["first_apart"] == 1


def test_figures_count_generated_ids_and_keep_ttft_out_of_tpot() -> None:
    rows = figures(dict(contender("shipway", [[1]])), new_tokens=11)
    assert rows["requests_s"] == pytest.approx([3 / 4.0] * 3)  # the last of 3 is sent at 2.5 s and takes 1.5 s
    assert rows["tokens_s"] == pytest.approx([33 / 4.0] * 3)
    assert rows["ttft"] == pytest.approx([0.5] * 3)
    assert rows["tpot"] == pytest.approx([0.1] * 3)


def test_the_table_shows_both_servers_and_their_ratio() -> None:
    out = io.StringIO()
    print_serving(document(contender("shipway", [[1]]), contender("max-stock", [[1]], ttft=4.5)), out)
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("verdict: PASS")
    assert lines[3].split()[0] == "shipway"
    assert lines[4].split()[0] == "max-stock"
    assert "2.00 x max-stock" in lines[5]


def test_no_speed_is_printed_beside_a_failed_verdict() -> None:
    out = io.StringIO()
    print_serving(document(contender("shipway", [[7]]), contender("max-stock", [[1]])), out)
    assert "verdict: FAIL" in out.getvalue()
    assert "tok/s" not in out.getvalue()


def test_both_servers_get_the_same_seeds_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Fake:
        start_s, url, model, directory, max_length = 1.0, "http://h/v1", "m", Path(), 64

        def __init__(self, settings: ServeSettings, show: Any) -> None:
            self.stock = settings.stock

        def __enter__(self) -> Fake:
            events.append(("up", self.stock))
            return self

        def __exit__(self, *_: object) -> None:
            events.append(("down", self.stock))

    def one_round(server: Fake, load: Load, seed: int) -> list[serving.Request]:
        events.append((server.stock, seed))
        return [serving.Request(prompt_tokens=1, sent_s=0, ttft_s=1, latency_s=2)]

    monkeypatch.setattr(serving, "Server", Fake)
    monkeypatch.setattr(serving, "_round", one_round)
    monkeypatch.setattr(serving, "_answers", lambda server: ([[1]], [[1.0]]))
    result = bench_serving(ServeSettings("m"), Load(1, 1, 8, 8, 2), lambda line: None)
    one = [("up", False), (False, 1), (False, 2), ("down", False)]
    assert events == [*one, ("up", True), (True, 1), (True, 2), ("down", True)]
    assert result["schema_version"] == 1
    assert result["environment"]["cpu"]
    assert [server["server"] for server in result["servers"]] == ["shipway", "max-stock"]


def test_a_load_that_does_not_fit_the_length_is_refused() -> None:
    from shipway.cli.bench_serve import bench_serve

    with pytest.raises(ShipwayError, match="do not fit --max-length 100"):
        bench_serve("m", prompt_tokens=64, new_tokens=64, max_length=100)


@pytest.mark.slow
def test_the_command_measures_both_servers(tmp_path: Path) -> None:
    path = tiny_checkpoints.make("smollm2", tmp_path / "model")
    command = [sys.executable, "-m", "shipway.cli", "bench-serve", str(path), "--requests", "4", "--concurrency", "2"]
    command += ["--prompt-tokens", "20", "--new-tokens", "8", "--rounds", "1", "--max-length", "128", "--port", "8765"]
    done = subprocess.run([*command, "--json", str(tmp_path / "r.json")], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["verdict"]["ok"]
    assert all(len(server["rounds"][0]["requests"]) == 4 for server in result["servers"])
