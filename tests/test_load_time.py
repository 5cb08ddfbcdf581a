"""``shipway load-time``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Run, assert_one_line
from shipway.cli import load_time


@pytest.fixture
def start_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adds arguments to the ``shipway.load`` of the processes that are timed: the default route compiles first."""

    def change(arguments: str) -> None:
        call = "shipway.load(sys.argv[1], "
        assert load_time._START.count(call) == 1
        monkeypatch.setattr(load_time, "_START", load_time._START.replace(call, f"{call}{arguments}, "))

    return change


@pytest.mark.parametrize(("limit", "code"), [(600, 0), (0, 1)])
def test_limit_decides_the_exit_code(
    run: Run, checkpoint: str, start_with: Callable[[str], None], tmp_path: Path, limit: int, code: int
) -> None:
    start_with('route="torch-eager"')
    file = tmp_path / "l.json"
    ended, out, _ = run("load-time", checkpoint, "--runs", 2, "--threads", 1, "--limit", limit, "--json", file)
    assert ended == code
    assert ("held" if code == 0 else "missed") in out
    document = json.loads(file.read_text())
    assert document["held"] is (code == 0)
    assert (document["model"], document["dtype"]) == (Path(checkpoint).name, "f32")
    assert len(document["samples"]) == 2
    for sample in document["samples"]:
        assert 0 < sample["load_s"] < sample["first_token_s"]


@pytest.mark.parametrize("limit", ["nan", "-1", "-inf"])
def test_limit_that_is_none_is_refused(run: Run, checkpoint: str, limit: str) -> None:
    code, _, err = run("load-time", checkpoint, "--limit", limit)
    assert_one_line(code, 2, err, f"--limit must be seconds >= 0, not {float(limit)}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "is neither a path here nor a model name"),
        ("config.json", "is one file of a checkpoint: pass its directory"),
    ],
)
def test_what_is_no_model_is_one_line_before_anything_starts(run: Run, checkpoint: str, name: str, said: str) -> None:
    path = Path(checkpoint) / name
    code, _, err = run("load-time", path)
    assert_one_line(code, 2, err, f"shipway: {path} {said}")
    assert "Error" not in err


@pytest.mark.parametrize(
    ("arguments", "expected", "said"),
    [
        ('route="none-such"', 2, "no route is called 'none-such'"),
        ('route="torch-eager", weights="bf16"', 3, "torch-eager stores weights in the activation dtype"),
        ("route=1 / 0", 1, "ZeroDivisionError: division by zero"),  # what nobody foresaw keeps its name
        ("route=__import__('os')._exit(7)", 1, "ended with code 7"),
    ],
)
def test_start_that_fails_says_why_and_keeps_its_exit_code(
    run: Run, checkpoint: str, start_with: Callable[[str], None], arguments: str, expected: int, said: str
) -> None:
    start_with(arguments)
    code, _, err = run("load-time", checkpoint)
    progress, line = err.splitlines()
    assert progress == "start 1 of 5"
    assert_one_line(code, expected, line, f"shipway: {checkpoint} does not load: {said}")
    assert "ShipwayError" not in line
    assert "CannotRunError" not in line
