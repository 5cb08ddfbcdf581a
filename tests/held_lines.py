"""A campaign's line in a test: skipped where it cannot run, red with the commands that run its failures again."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from shipway.numerics.campaign import Line
from shipway.report.checks import reproducer


def assert_holds(line: Line) -> None:
    if line.verdict == "not run":
        pytest.skip(line.reason)
    assert not line.failures, "\n".join(
        f"{failure.property}: {failure.reason}\n{reproducer(asdict(line), asdict(failure))}"
        for failure in line.failures
    )
