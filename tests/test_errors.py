"""Messages that say what to type name the program and the Python that are in use."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import typer

from command_line import Run
from shipway import artefacts
from shipway.cli.app import app
from shipway.errors import ShipwayError, this_python
from shipway.routes.route import Prepared


@pytest.mark.parametrize(
    ("below", "folder", "said"),
    [
        (".venv/bin/python", ".", ".venv/bin/python -m pip install max"),
        (".venv/bin/python", "work", "{root}/.venv/bin/python -m pip install max"),
        ("my envs/bin/python", ".", "'my envs/bin/python' -m pip install max"),
    ],
)
def test_python_in_use_is_named_as_it_is_typed_here(
    below: str, folder: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr(sys, "executable", str(tmp_path / below))
    assert this_python("-m pip install max") == said.format(root=tmp_path)


def test_folder_that_is_gone_does_not_hide_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert this_python("-m pip install max") == f"{tmp_path}/python -m pip install max"


def test_message_stays_one_line_whatever_it_quotes() -> None:
    assert (
        str(ShipwayError("m.gguf: key 'a\n\x1b[31mb\u2028c' is not known")) == "m.gguf: key 'a  [31mb c' is not known"
    )
    assert str(ShipwayError("x" * 5000)) == "x" * 1000 + " ..."


COMMANDS = "|".join(typer.main.get_group(app).commands)


def test_commands_that_are_printed_begin_as_they_are_typed() -> None:
    for path in (Path(__file__).parent.parent / "python/shipway").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                named = re.search(rf"\bshipway ({COMMANDS})\b", node.value)
                assert named is None, f"{path}, line {node.lineno}: write {{program()}} instead of shipway"


@pytest.mark.parametrize(("dev", "name"), [("1", "./dev"), (None, "shipway")])
def test_advice_names_the_program_as_it_was_typed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dev: str | None, name: str
) -> None:
    if dev is None:
        monkeypatch.delenv("SHIPWAY_DEV", raising=False)
    else:
        monkeypatch.setenv("SHIPWAY_DEV", dev)
    (tmp_path / "r.json").write_text("{")
    assert run("report", tmp_path / "r.json")[2].endswith(
        f"is not JSON: give a file written by `{name} bench --json`\n"
    )
    (tmp_path / "r.json").write_text("{}")
    assert run("report", tmp_path / "r.json")[2].endswith(f"give a file written by `{name} bench --json`\n")
    with pytest.raises(ShipwayError, match=f"holds no compiled model: make it again with {re.escape(name)} compile"):
        artefacts.shipped(tmp_path, "mojo-graph", {})
    prepared = Prepared(0.0, 0.0, 0.0, compile_cold=False)
    monkeypatch.setattr("shipway.compiled.compile_model", lambda *arguments: prepared)
    said = run("compile", "--model", "m", "--out", "new")[1]
    assert said.splitlines()[-1].startswith(f"start it with: {name} generate --model new ")
