"""The README check runs every block and turns red when one fails; the README and CONTRIBUTING name what exists."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import readme_check
import readme_results
from shipway.measure.result import Result

ROOT = Path(__file__).resolve().parent.parent


def checked(folder: Path, markdown: str) -> int:
    """Runs the check on a README of ``markdown`` in ``folder``, where ``./dev python FILE`` is plain Python."""
    (folder / "README.md").write_text(markdown)
    dev = folder / "dev"
    dev.write_text('#!/bin/sh\nshift\nexec python3 "$@"\n')
    dev.chmod(0o755)
    return readme_check.run(folder / "README.md", dict(os.environ))


def test_blocks_run_in_order_in_the_readme_s_folder(tmp_path: Path) -> None:
    markdown = "```sh\necho one >log\n```\ntext\n```python\nopen('log', 'a').write('two')\n```\n"
    assert checked(tmp_path, markdown) == 0
    assert (tmp_path / "log").read_text() == "one\ntwo"


@pytest.mark.parametrize("block", ["```sh\nfalse\ntrue\n```\n", "```python\nraise SystemExit(3)\n```\n"])
def test_failing_block_is_named_with_its_line(tmp_path: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(tmp_path, "# Title\n\n" + block) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"README.md:3: (sh|python) block: FAILED with exit code [13] after", last)


def test_block_that_is_not_run_is_listed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(tmp_path, "<!-- not run: needs a GPU -->\n\n```sh\nfalse\n```\n```sh\ntrue\n```\n") == 0
    assert "README.md:3: sh block: not run: needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("markdown", ["```bash\nfalse\n```\n", "```\nfalse\n```\n", "```sh\nfalse\n"])
def test_block_that_would_escape_is_refused(markdown: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        readme_check.blocks(markdown)


def test_readme_s_blocks_are_found() -> None:
    found = readme_check.blocks((ROOT / "README.md").read_text())
    assert any("./dev bench" in block.text for block in found if block.not_run is None)
    assert any(block.language == "python" for block in found if block.not_run is None)


def result(status: str) -> Result:
    """A result of two routes in three rounds: the baseline at 10 tokens/s, the other, with ``status``, at 20."""

    def entry(route: str, status: str, tpot: float) -> dict[str, Any]:
        samples = [
            {"round": number, "position": 0, "prompt_tokens": 128, "times": [0.5, 0.5 + tpot, 0.5 + 2 * tpot]}
            for number in range(3)
        ]
        return {
            "route": route,
            "dtype": "f32",
            "weights": "f32",
            "status": status,
            "reason": "max error 7" if status != "ok" else None,
            "verdict": None,
            "starts": [{"total_s": 20.0, "compile_cold": True}, {"total_s": 2.0, "compile_cold": False}],
            "install_bytes": None,
            "lock_in": "open (MIT)",
            "peak_memory_bytes": None,
            "decode_bytes": 1e9,
            "prefill_flops": 1e9,
            "ids": [1, 2, 3],
            "samples": samples,
            "sweep": [],
            "sweep_decode_bytes": {},
        }

    made: Any = {
        "workload": {
            "model": "tiny",
            "parameters": 1_000_000,
            "prompt_tokens": 128,
            "new_tokens": 3,
            "batch": 1,
            "rounds": 3,
            "baseline": "torch-eager",
        },
        "environment": {"cpu": "a CPU", "threads": 2, "packages": {"max": "1"}, "git_revision": "a" * 40},
        "price": {"usd_per_hour": 0.1, "machine": "a machine"},
        "created": "2026-01-02T03:04:05",
        "rounds": [],
        "probes": [],
        "entries": [entry("torch-eager", "ok", 0.1), entry("mojo-graph", status, 0.05)],
    }
    return made


def test_results_section_shows_the_figures_of_a_pass() -> None:
    text = readme_results.section(Path("r.json"), result("ok"))
    row = next(line for line in text.splitlines() if line.startswith("| `mojo-graph`"))
    assert row.startswith("| `mojo-graph` | f32 | PASS | 20.0 (20.0 to 20.0) | 2.00 (2.00 to 2.00) |")
    assert "20.0 / 2.0" in row
    assert "2026-01-02, revision aaaaaaaaaaaa" in text


@pytest.mark.parametrize(("status", "word"), [("fail", "FAIL"), ("failed", "broke"), ("not run", "not run")])
def test_results_section_shows_no_figure_without_a_pass(status: str, word: str) -> None:
    text = readme_results.section(Path("r.json"), result(status))
    row = next(line for line in text.splitlines() if line.startswith("| `mojo-graph`"))
    assert row.startswith(f"| `mojo-graph` | f32 | {word} | - |")
    assert not any(digit in row.split(word)[1] for digit in "0123456789")


def recorded() -> list[Path]:
    return sorted((ROOT / "bench/results").glob("*.json"))


def test_results_section_is_what_the_recorded_results_say() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme_results.filled(readme, recorded()) == readme


def test_edited_results_section_is_seen() -> None:
    readme = (ROOT / "README.md").read_text()
    edited = readme.replace("<!-- results:end -->", "and 900 tokens/s\n<!-- results:end -->")
    assert readme_results.filled(edited, recorded()) == readme


def test_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        readme_results.filled("# Title\n", [])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_tasks_and_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    tasks = tomllib.loads((ROOT / "pixi.toml").read_text())["tasks"]
    assert set(re.findall(r"\./dev ([a-z][\w-]*)", text)) <= set(tasks)
    for name in re.findall(r"`((?:mojo|graphs|python|tests|bench|\.ci)/[\w/.-]*)`(?!, a new file)", text):
        assert "OP" in name or (ROOT / name).exists(), name
