"""``shipway inspect``."""

import json
from pathlib import Path

from command_line import Run, assert_one_line
from shipway.routes.catalogue import ROUTES


def test_inspect_says_what_a_checkpoint_is(run: Run, checkpoint: str, tmp_path: Path) -> None:
    code, out, _ = run("inspect", checkpoint, "--context", 100, "--json", tmp_path / "i.json")
    assert code == 0
    document = json.loads((tmp_path / "i.json").read_text())
    assert document["architecture"] == "llama"
    assert f"{document['parameters']:,} parameters" in out
    assert "100 tokens" in out
    for name in ROUTES:
        assert name in out


def test_inspect_of_nothing_is_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run("inspect", tmp_path)
    assert_one_line(code, 2, err)


def test_inspect_refuses_an_empty_name_and_a_context_the_model_has_not(run: Run, checkpoint: str) -> None:
    code, _, err = run("inspect", "")
    assert_one_line(code, 2, err, "name is empty")
    code, _, err = run("inspect", checkpoint, "--context", 257)
    assert_one_line(code, 2, err, "257", "256")
