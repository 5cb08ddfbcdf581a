"""Charges each test's seconds to its part of the ledger and prints the account before pytest's summary."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger import MINUTES, overdrawn, part_of

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
