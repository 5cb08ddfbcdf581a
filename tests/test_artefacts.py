"""The store of compiled artefacts: what is damaged in it is made again, and stands in nobody's way."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Run
from shipway import artefacts
from shipway.artefacts import artefact

pytestmark = pytest.mark.usefixtures("own_cache")


def build(directory: Path) -> None:
    (directory / "code").write_bytes(b"compiled" * 100)
    (directory / "more").mkdir()
    (directory / "more" / "data").write_text("1")


def record(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        said = json.loads((path / "artefact.json").read_text())
        change(said)
        (path / "artefact.json").write_text(json.dumps(said))

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "record empty": lambda path: (path / "artefact.json").write_text(""),
    "record of another kind": lambda path: (path / "artefact.json").write_text("[]"),
    "record gone": lambda path: (path / "artefact.json").unlink(),
    "record without time": record(lambda said: said.pop("compile_s")),
    "record without date": record(lambda said: said.pop("made")),
    "record without files": record(lambda said: said.pop("files")),
    "time a text": record(lambda said: said.update(compile_s="1")),
    "file empty": lambda path: (path / "code").write_bytes(b""),
    "file cut": lambda path: (path / "code").write_bytes(b"compiled"),
    "file of the same size": lambda path: (path / "code").write_bytes(b"Compiled" * 100),
    "file gone": lambda path: (path / "code").unlink(),
    "file within gone": lambda path: shutil.rmtree(path / "more"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_artefact_is_made_again_once_and_breaks_nothing_else(name: str, run: Run) -> None:
    made = artefact("one", {"a": 1}, build)
    assert made.cold
    assert not artefact("one", {"a": 1}, build).cold
    DAMAGE[name](made.path)
    assert artefact("two", {"b": 1}, build).cold
    code, out, _ = run("cache")
    assert code == 0
    assert out.count(" two ") == 1
    again = artefact("one", {"a": 1}, build)
    assert again.cold
    assert again.path == made.path
    assert (again.path / "code").read_bytes() == b"compiled" * 100
    assert not artefact("one", {"a": 1}, build).cold


def test_files_a_compiler_adds_later_are_no_damage() -> None:
    made = artefact("one", {"a": 1}, build)
    (made.path / "later").touch()
    assert not artefact("one", {"a": 1}, build).cold


def test_damaged_record_is_listed_as_such_and_counts_for_the_bound(run: Run, tmp_path: Path) -> None:
    made = artefact("one", {"a": 1}, build)
    (made.path / "artefact.json").write_text("{")
    code, out, _ = run("cache", "--json", tmp_path / "c.json")
    assert code == 0
    assert "damaged" in out
    (listed,) = json.loads((tmp_path / "c.json").read_text())["artefacts"]
    assert (listed["kind"], listed["size"], listed["compile_s"]) == ("one", 802, None)
    artefacts._forget_beyond(0, keep=tmp_path)
    assert not made.path.exists()


def test_the_store_stays_within_its_size_while_one_process_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of one to spare: a record says how long it took, in more digits or fewer.
    monkeypatch.setattr(artefacts, "MOST_BYTES", artefact("one", {"a": 10}, build).size * 11 // 2)
    for number in range(11, 22):
        artefact("one", {"a": number}, build)
    assert len(artefacts.stored()) == 5
    assert not artefact("one", {"a": 21}, build).cold


def test_reading_a_record_takes_no_more_memory_than_it_has() -> None:
    made = artefact("one", {"a": 1}, build)
    tracemalloc.start()
    try:
        artefact("one", {"a": 1}, build)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert made.size < 1 << 12
