"""Messages that say what to install name the Python that is in use."""

import os
import sys
from pathlib import Path

import pytest

from shipway.errors import ShipwayError, this_python


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
