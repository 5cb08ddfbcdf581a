"""Compiled models: they start without compiling, and only where they were made for."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_routes
import readme_results
import shipway
import tiny_checkpoints
from command_line import Run, assert_one_line
from shipway.compiled import compile_model, read_compiled
from shipway.errors import CannotRunError, ShipwayError, program
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import Prepared

PROMPT, NEW = "def main(", 12
AGAIN = re.escape(f"{program()} compile")


def text(model: shipway.Model) -> str:
    return "".join(token.text for token in model.generate(PROMPT, max_new=NEW, greedy=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.make("llama3", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compiled") / "model"
    compile_model(checkpoint, ROUTES["mojo-graph"], "bf16", "bf16", 1, out, lambda line: None)
    return out


def test_starts_from_its_own_artefact_and_says_the_same(
    checkpoint: Path, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shipway.load(checkpoint, dtype="bf16", threads=1) as model:
        expected = text(model)
    moved = tmp_path / "moved"
    compiled.rename(moved)
    try:
        monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "empty"))  # nothing to fall back on
        with shipway.load(moved, threads=1) as model:
            assert model.route == "mojo-graph"
            assert not model.prepared.compile_cold
            assert text(model) == expected
        assert not (tmp_path / "empty" / "artefacts").exists()
    finally:
        moved.rename(compiled)


@pytest.mark.parametrize(("part", "named"), [("target", "another-cpu"), ("max", "25.1"), ("sources", "0123")])
def test_one_made_for_something_else_is_refused_by_name(compiled: Path, part: str, named: str) -> None:
    record = compiled / "compiled" / "artefact.json"
    kept = record.read_text()
    changed = json.loads(kept)
    changed["parts"][part] = named
    record.write_text(json.dumps(changed))
    try:
        with pytest.raises(ShipwayError, match=f"{part} {named}.*{AGAIN}"):
            shipway.load(compiled, threads=1)
    finally:
        record.write_text(kept)


def test_edited_setting_of_the_model_is_named_alone(compiled: Path) -> None:
    config = compiled / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"rms_norm_eps": 0.25}))
    try:
        with pytest.raises(
            ShipwayError, match=r"compiled was compiled for config.rms_norm_eps \S+, here 0.25: make it"
        ):
            shipway.load(compiled, threads=1)
    finally:
        config.write_text(kept)


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "added"])
def test_damaged_artefact_is_refused_by_its_file(compiled: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(compiled, copy)
    (file,) = (path for path in (copy / "compiled").iterdir() if path.name != "artefact.json")
    content = file.read_bytes()
    if damage == "changed":
        file.write_bytes(content[:-100] + bytes(4) + content[-96:])
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        file.unlink()
    else:
        file = file.with_name("other")
        file.touch()
    how = {"gone": "is missing", "added": "does not belong there"}.get(damage, "is damaged")
    with pytest.raises(ShipwayError, match=f"{file.name} {how}: make the compiled model again with {AGAIN}"):
        shipway.load(copy, threads=1)


@pytest.mark.parametrize(
    ("name", "damage", "how"),
    [
        ("model.safetensors", lambda data: data[:-2000] + bytes(2000), "is damaged"),
        ("tokenizer.json", lambda data: data + b" ", "is damaged"),
        ("tokenizer_config.json", None, "is missing"),
    ],
)
def test_checkpoint_of_a_compiled_model_that_was_changed_is_refused_by_its_file(
    compiled: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, how: str
) -> None:
    copy = shutil.copytree(compiled, tmp_path / "copy")
    if damage is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(damage((copy / name).read_bytes()))
    with pytest.raises(ShipwayError, match=f"{name} {how}: make the compiled model again with {AGAIN}"):
        shipway.load(copy, threads=1)


def test_compiled_model_without_its_manifest_is_no_ordinary_checkpoint(compiled: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(compiled, tmp_path / "copy")
    (copy / "shipway.json").unlink()
    with pytest.raises(ShipwayError, match=r"is a compiled model without its shipway\.json: compile the model again"):
        shipway.load(copy, threads=1)


@pytest.mark.parametrize("field", ["compile_s", "made", "parts", "files"])
def test_record_of_an_artefact_without_a_field_is_refused(compiled: Path, tmp_path: Path, field: str) -> None:
    copy = shutil.copytree(compiled, tmp_path / "copy")
    record = copy / "compiled" / "artefact.json"
    said = json.loads(record.read_text())
    del said[field]
    record.write_text(json.dumps(said))
    with pytest.raises(ShipwayError, match=f"compiled holds no compiled model: make it again with {AGAIN}"):
        shipway.load(copy, threads=1)


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ("torch-eager", "shipway.json names what is never compiled: route torch-eager, .* compile the model again"),
        ("max-graph", f"compiled for route mojo-graph, here max-graph.*{AGAIN}"),
    ],
)
def test_another_route_cannot_take_it_over(compiled: Path, route: str, said: str) -> None:
    manifest = compiled / "shipway.json"
    kept = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(kept) | {"route": route}))
    try:
        with pytest.raises(ShipwayError, match=said):
            shipway.load(compiled, threads=1)
    finally:
        manifest.write_text(kept)


def test_generate_takes_route_and_dtype_from_the_directory(compiled: Path) -> None:
    command = [sys.executable, "-m", "shipway.cli", "generate", "--model", str(compiled), "--prompt", "def"]
    result = subprocess.run([*command, "--max-new", "2", "--threads", "1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_other_routes_are_not_run_and_no_failure_when_all_are_compared(run: Run, compiled: Path) -> None:
    code, out, _ = run("generate", "--model", compiled, "--prompt", "def", "--max-new", 2, "--route", "all")
    assert code == 0
    lines = out.splitlines()
    at = lines.index("== torch-eager bf16")
    assert lines[at + 1] == f"not run: {compiled} was compiled for route mojo-graph, not torch-eager"
    assert "failed" not in out


def test_load_time_names_the_model_and_the_dtype(run: Run, compiled: Path, checkpoint: Path, tmp_path: Path) -> None:
    code, _, _ = run("load-time", compiled, "--runs", 1, "--limit", 600, "--json", tmp_path / "l.json")
    assert code == 0
    document = json.loads((tmp_path / "l.json").read_text())
    assert (document["model"], document["dtype"]) == (checkpoint.name, "bf16")
    assert f"({checkpoint.name}, bf16)" in readme_results.load_lines(tmp_path / "l.json", document)


@pytest.mark.parametrize("route", [name for name, info in ROUTES.items() if not info.ships])
def test_route_that_cannot_be_compiled_names_every_one_that_can(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str
) -> None:
    monkeypatch.setitem(ROUTES, "newest", dataclasses.replace(fake_routes.info("Good"), ships=True))
    ships = " or ".join(name for name, info in ROUTES.items() if info.ships)
    assert "mojo-graph" in ships
    code, _, err = run("compile", "--route", route, "--out", tmp_path / "out")
    assert_one_line(code, 3, err, f"{route} has nothing to compile", f": pass --route {ships}\n")
    assert "newest" in err


def test_contradicting_arguments_are_refused(compiled: Path) -> None:
    with pytest.raises(ShipwayError, match="compiled for dtype bf16, not f32"):
        shipway.load(compiled, dtype="f32")
    with pytest.raises(ShipwayError, match="compiled for route mojo-graph"):
        shipway.load(compiled, route="torch-eager")


def test_damaged_manifest_is_one_clear_line(tmp_path: Path) -> None:
    assert read_compiled(tmp_path) is None
    made = '{"version": 2, "route": %s, "dtype": %s, "weights": %s, "model": "m", "files": {}}'
    wrong = [
        made % values for values in (("null", '"f32"', '"f32"'), ('"mojo-graph"', '"f8"', '"f32"'), ("[]", "{}", "7"))
    ]
    deep = "[" * 99_999
    for damage in ("{", "{}", '{"version": 99}', "[]", deep, *wrong, made % ('"mojo-graph"', '"f32"', "7")):
        (tmp_path / "shipway.json").write_text(damage)
        with pytest.raises(ShipwayError, match="compile the model again"):
            read_compiled(tmp_path)


def test_nothing_is_left_behind_when_compiling_fails(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ShipwayError, match="in the way"):
        compile_model(checkpoint, ROUTES["mojo-graph"], "f32", "f32", 1, tmp_path / "full", lambda line: None)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ShipwayError, match="in the way"):
        compile_model(checkpoint, ROUTES["mojo-graph"], "f32", "f32", 1, tmp_path / "link", lambda line: None)
    for out, said in ((tmp_path / ("n" * 300), "File name too long"), (Path("/"), "in the way")):
        with pytest.raises(ShipwayError, match=said):
            compile_model(checkpoint, ROUTES["mojo-graph"], "f32", "f32", 1, out, lambda line: None)
    with pytest.raises(CannotRunError, match="nothing to compile"):
        compile_model(checkpoint, ROUTES["torch-eager"], "f32", "f32", 1, tmp_path / "new", lambda line: None)
    with pytest.raises(ShipwayError):
        compile_model(tmp_path, ROUTES["mojo-graph"], "f32", "f32", 1, tmp_path / "new", lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link"]


def test_nothing_is_left_behind_when_compiling_is_ended(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "shipway.cli", "compile", "--model", str(checkpoint), "--out", tmp_path / "out"]
    with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "f32 weights\n"
        assert process.stderr.readline() == "mojo-graph f32: compiling\n"
        process.terminate()
        assert process.wait(timeout=60) == 143
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_command_that_is_shown_can_be_pasted(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared(0.0, 0.0, 0.0, compile_cold=False)
    monkeypatch.setattr("shipway.compiled.compile_model", lambda *arguments: prepared)
    out = tmp_path / "a b's"
    code, said, _ = run("compile", "--model", checkpoint, "--out", out)
    assert code == 0
    assert shlex.split(said.splitlines()[-1].removeprefix("start it with: "))[3] == str(out)
