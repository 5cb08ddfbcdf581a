"""Surroundings in which a benchmark takes seconds, and has routes that behave in one way each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fake_models
from shipway.measure import bench as bench_module
from shipway.routes.catalogue import ROUTES

BASELINE = ROUTES["torch-eager"]


@contextmanager
def quick_bench(cache: Path) -> Iterator[None]:
    """Benchmarks neither wait for an idle machine nor probe with large buffers; ``cache`` is theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPWAY_CACHE", str(cache))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setattr(bench_module, "wait_until_idle", lambda limit_s: 0.0)
        patch.setattr(bench_module, "PROBE", dataclasses.replace(bench_module.PROBE, factory="fake_models:Probe"))
        for name in fake_models.NAMES:
            patch.setitem(ROUTES, name, dataclasses.replace(BASELINE, name=name, factory=f"fake_models:{name}"))
        absent = dataclasses.replace(BASELINE, name="absent", requires=("no_such_module",), remedy="pip install it")
        patch.setitem(ROUTES, "absent", absent)
        patch.setitem(ROUTES, "CompilesOnce", dataclasses.replace(ROUTES["CompilesOnce"], rung="graph"))
        yield
