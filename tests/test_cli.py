"""What every command has in common: its help, and how it ends."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.text import Text
from typer.main import get_group

from command_line import Run, assert_one_line
from shipway.cli.app import app

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("command", sorted(get_group(app).commands))
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--help" in out


def test_help_loses_no_brackets(run: Run) -> None:
    for name, command in get_group(app).commands.items():
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            written = text or ""
            assert Text.from_markup(written).plain == written.replace("\\[", "["), f"{name}: write \\\\[ in {text!r}"
    assert "'rms_norm[bf16]'" in run("targets", "--help")[1]


def test_help_shows_every_default(run: Run) -> None:
    for command, defaults in {
        "bench": ["SmolLM2-135M-Instruct", "torch-eager", "f32,bf16", "128", "64", "default: 5", "cpu"],
        "generate": ["SmolLM2-135M-Instruct", "default: (mojo-graph)", "default: 128", "default: 0.0", "default: 1.0"],
    }.items():
        _, out, _ = run(command, "--help")
        for default in defaults:
            assert default in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--no-such-option"], "No such option: --no-such-option: see shipway generate -h"),
        (["no-such-command"], "No such command 'no-such-command': see shipway -h"),
        (["targets", "--dtype"], "Option '--dtype' requires an argument: see shipway targets -h"),
        (["--no-such-option"], "No such option: --no-such-option: see shipway -h"),
        (["check", "--examples", "x"], "'--examples': Input should be a valid integer"),
        (["inspect"], "Missing argument 'path': see shipway inspect -h"),
        (["routes", "extra"], "unexpected extra argument(s) (extra): see shipway routes -h"),
    ],
)
def test_wrong_use_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.delenv("SHIPWAY_DEV", raising=False)
    code, _, err = run(*arguments)
    assert_one_line(code, 2, err, said)


def test_no_arguments_print_the_help(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "targets" in out


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("path", ["/proc/shipway.json", "n" * 256])
def test_json_path_that_cannot_be_made_is_found_before_the_work(run: Run, command: str, path: str) -> None:
    code, _, err = run(command, "--model", "no-such-model", "--json", path)
    assert_one_line(code, 2, err, "cannot write", path)


def test_json_path_that_looks_like_standard_output_names_it(run: Run) -> None:
    code, _, err = run("routes", "--json", "-")
    assert_one_line(code, 2, err, "--json takes a path, not -: /dev/stdout")


def test_unforeseen_error_is_one_line_and_its_traceback_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(path: object) -> None:
        raise KeyError("a bug\nof two lines")

    monkeypatch.setattr("shipway.cli.report.read_result", breaks)
    code, _, err = run("report", "r.json")
    assert_one_line(code, 1, err, "KeyError", "traceback: ")
    log = Path(re.search(r"traceback: (\S+)", err)[1])  # type: ignore[index]
    assert "in breaks" in log.read_text()


def test_characters_the_terminal_cannot_show_are_replaced() -> None:
    code = (
        "import sys; sys.argv = ['shipway', 'report', 'r.json']; import shipway.cli.report as command;"
        "command.read_result = lambda path: sys.stdout.write('caf\\xe9 \\U0001f600 \\udcff\\n') and sys.exit(0);"
        "from shipway.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ? ?\n", "")


def start(checkpoint: str, max_new: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shipway.cli", "generate", "--threads", "1", "--model", checkpoint]
    command += ["--route", "torch-eager", "--prompt", "a", "--max-new", str(max_new), "--temperature", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def test_reader_that_goes_away_ends_the_command_quietly(checkpoint: str) -> None:
    process = start(checkpoint, max_new=200)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGINT, 1, 130), (signal.SIGINT, 6, 130), (signal.SIGTERM, 1, 143), (signal.SIGHUP, 1, 129)],
)
def test_signal_ends_the_command_and_its_worker(checkpoint: str, number: signal.Signals, times: int, code: int) -> None:
    process = start(checkpoint, max_new=250)
    assert process.stderr is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for _ in range(times):  # impatience changes nothing
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait(timeout=60) == code
    said = process.stderr.read()
    assert said.startswith("shipway: ")
    assert said.count("\n") == 1
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize("module", ["typer", "numpy", "shipway.cli.generate"])
def test_ctrl_c_while_loading_is_one_line(module: str) -> None:
    code = (
        "import importlib.abc, os, signal, sys, time\n"
        "class Pressed(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "sys.argv = ['shipway', 'routes']\n"
        "from shipway.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "shipway: interrupted\n")


def test_ignored_signals_stay_ignored() -> None:
    code = (
        "import os, signal, sys; import shipway.cli.report as command\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv = ['shipway', 'report', 'r.json']\n"
        "command.read_result = lambda path: os.kill(os.getpid(), signal.SIGHUP) or sys.exit(7)\n"
        "from shipway.cli.main import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("routes >&-", 2, "standard output is closed"),
        ("-h >&-", 2, "standard output is closed"),
        ("routes >&- 2>&-", 2, ""),
        ("routes >/dev/full", 2, "cannot write standard output: No space left on device"),
        ("-h >/dev/full", 2, "cannot write standard output: No space left on device"),
        ("routes -h >/dev/full", 2, "cannot write standard output: No space left on device"),
        ("report no.json 2>/dev/full", 2, ""),
        ("report no.json 2>&-", 2, ""),
        ("routes <&- >/dev/null", 0, ""),
        ("generate --prompt-file - <&-", 2, "standard input is closed"),
    ],
)
def test_standard_streams_that_are_closed_or_full_are_one_line(line: str, code: int, said: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m shipway.cli {line}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    if said:
        assert_one_line(done.returncode, code, done.stderr, said)
    else:
        assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "-h"], ["routes"]])
def test_reader_that_went_away_before_the_first_line_is_no_failure(arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shipway.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""


def test_panic_of_a_rust_library_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panics(path: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("shipway.cli.report.read_result", panics)
    code, _, err = run("report", "r.json")
    assert_one_line(code, 1, err, "broke: PanicException: index out of bounds; traceback: ")
