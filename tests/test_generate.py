"""``shipway generate``: the text of one route, and all routes compared."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_routes
from command_line import Fakes, Run, assert_one_line
from shipway.routes.catalogue import ROUTES

Compare = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def common(checkpoint: str) -> list[object]:
    return ["generate", "--threads", 1, "--model", checkpoint]


@pytest.fixture
def compare(run: Run, fakes: Fakes, common: list[object], tmp_path: Path) -> Compare:
    """Generates 5 tokens through every one of the fake routes; returns exit code, stdout and the written result."""

    def call(*names: str) -> tuple[int, str, dict[str, Any]]:
        fakes(*names)
        file = tmp_path / "g.json"
        code, out, _ = run(*common, "--prompt", "a", "--max-new", 5, "--route", "all", "--json", file)
        return code, out, json.loads(file.read_text())

    return call


def test_generate_streams_text_and_records_it(run: Run, common: list[object], tmp_path: Path) -> None:
    options = ("--route", "torch-eager", "--prompt", "The end", "--max-new", 6, "--greedy")
    code, out, _ = run(*common, *options, "--json", tmp_path / "g.json")
    assert code == 0
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["schema_version"] == 1
    assert document["routes"][0]["text"] + "\n" == out
    assert 1 <= len(document["routes"][0]["ids"]) <= 6
    assert document["same_ids"] is None
    assert document["environment"]["packages"]["torch"]


def test_generate_reads_a_file_or_standard_input(run: Run, common: list[object], tmp_path: Path) -> None:
    common = [*common, "--route", "torch-eager", "--max-new", 5]
    (tmp_path / "p.txt").write_text("The end")
    _, expected, _ = run(*common, "--prompt", "The end")
    _, out, _ = run(*common, "--prompt-file", tmp_path / "p.txt")
    assert out == expected
    done = subprocess.run(
        [sys.executable, "-m", "shipway.cli", *map(str, common), "--prompt-file", "-"],
        input="The end", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == expected


def test_chat_goes_through_the_template(run: Run, common: list[object], tmp_path: Path) -> None:
    common = [*common, "--route", "torch-eager", "--max-new", 1, "--prompt", "hello"]
    run(*common, "--json", tmp_path / "plain.json")
    run(*common, "--chat", "--json", tmp_path / "chat.json")
    plain, chat = (json.loads((tmp_path / name).read_text())["prompt_ids"] for name in ("plain.json", "chat.json"))
    assert len(chat) > len(plain)


def test_sampling_repeats_with_its_seed(run: Run, common: list[object]) -> None:
    options = ("--route", "torch-eager", "--prompt", "a", "--max-new", 20, "--temperature", 1.5, "--top-p", 0.99)

    def sample(seed: int) -> str:
        return run(*common, *options, "--seed", seed)[1]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_all_routes_are_compared(compare: Compare) -> None:
    code, out, document = compare("Good", "Slow")
    assert code == 0
    assert "same 5 ids from Good, Slow" in out
    assert document["same_ids"] is True
    assert document["divergence"] is None


def test_first_divergent_token_comes_with_the_margin_of_each_route(compare: Compare) -> None:
    code, out, document = compare("Good", "Wanders")
    assert code == 0
    assert "first divergent token: new token 3" in out
    assert document["same_ids"] is False
    divergence = document["divergence"]
    assert divergence["index"] == 2
    good, wanders = (record["ids"] for record in document["routes"])
    assert good[:2] == wanders[:2]
    for name, ids in (("Good", good), ("Wanders", wanders)):
        side = divergence["routes"][name]
        assert side["id"] == ids[2] == side["top_2"]["ids"][0]  # the margin is that of the very token that was chosen
        assert side["top_2"]["margin"] == pytest.approx(np.subtract(*side["top_2"]["logits"]))
    assert divergence["routes"]["Wanders"]["top_2"]["margin"] == 0.5


def test_failed_and_absent_routes_do_not_hide_the_others(compare: Compare) -> None:
    code, out, document = compare("Good", "Segfaults", "Lacks")
    assert code == 1
    records = {record["route"]: record for record in document["routes"]}
    assert [records[name]["status"] for name in ("Good", "Segfaults", "Lacks")] == ["ok", "failed", "not run"]
    assert "SIGSEGV" in records["Segfaults"]["reason"]
    assert "not run: needs a GPU: plug one in" in out


def test_route_that_breaks_is_one_line(run: Run, common: list[object], fakes: Fakes) -> None:
    fakes("Segfaults")
    code, _, err = run(*common, "--prompt", "a", "--route", "Segfaults")
    assert_one_line(code, 1, err, "SIGSEGV", "log: ")


@pytest.mark.parametrize(("options", "part"), [((), "plug one in"), (("--weights", "f16"), "--weights")])
def test_route_that_cannot_run_here_exits_with_3(
    run: Run, common: list[object], fakes: Fakes, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], part: str
) -> None:
    fakes("Lacks")
    takes_f16 = dataclasses.replace(fake_routes.info("Good"), weight_formats=("f16",))
    monkeypatch.setitem(ROUTES, "Good", takes_f16)  # one that no route takes would be a usage error
    code, _, err = run(*common, "--prompt", "a", "--route", "Lacks", *options)
    assert_one_line(code, 3, err, part)


@pytest.mark.parametrize("route", ["Unprepared", "all"])
def test_full_cache_is_named_when_a_route_breaks_while_preparing(
    run: Run, checkpoint: str, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, own_cache: Path, route: str
) -> None:
    fakes("Unprepared")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shipway.client.shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    code, _, err = run("generate", "--model", checkpoint, "--prompt", "a", "--route", route)
    assert_one_line(code, 2, err, f"the disk of the cache {own_cache} has 1.0 MB free")
