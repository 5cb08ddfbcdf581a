"""Fixtures that several test files share, and the ledger.

Each test's seconds are charged to its part of the ledger; the account is printed before pytest's summary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import fake_routes
from command_line import Fakes, Run
from ledger import MINUTES, overdrawn, part_of
from shipway.cli.main import main
from shipway.routes.catalogue import ROUTES

# Compilers started by the tests neither phone home nor install crash handlers.
os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "false")
os.environ.setdefault("MODULAR_CRASH_REPORTING_ENABLED", "false")

SECONDS = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    # .ci/run says how many seconds went, and on what, before pytest started.
    config.stash[SECONDS] = defaultdict(float, json.loads(os.environ.get("SHIPWAY_SPENT", "{}")))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    yield
    item.config.stash[SECONDS][part_of(Path(item.path))] += call.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = config.stash[SECONDS]
    terminalreporter.section("ledger")
    for part, minutes in MINUTES.items():
        if part in seconds:
            terminalreporter.write_line(f"{part:<24}{seconds[part] / 60:6.1f} of {minutes} minutes")
    for line in overdrawn(seconds):
        terminalreporter.write_line(line, red=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and os.environ.get("CI") and overdrawn(session.config.stash[SECONDS]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of random weights that every route serves; copy it before changing it."""
    import tiny_checkpoints  # torch and transformers, seconds that most tests need not wait for

    return str(tiny_checkpoints.make("llama3", tmp_path_factory.mktemp("llama3")))


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the handlers back that the command line sets: Ctrl-C ends pytest. A test's first signal is a first one."""
    monkeypatch.setattr("shipway.cli.main._answered", -math.inf)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, not yet made; workers find the fake routes."""
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return tmp_path / "cache"


@pytest.fixture
def run(own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shipway", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Replaces the catalogue by fake routes of the given classes."""

    def use(*names: str) -> None:
        for name in list(ROUTES):
            monkeypatch.delitem(ROUTES, name)
        for name in names:
            monkeypatch.setitem(ROUTES, name, dataclasses.replace(fake_routes.info(name), name=name))

    return use


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """PyTorch's and MAX's pools both spin: on two cores they would stop each other for seconds."""
    import torch  # seconds that most tests need not wait for

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
