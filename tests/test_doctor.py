"""``shipway doctor``."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import fake_routes
from command_line import Run
from shipway.cli import doctor
from shipway.errors import this_python
from shipway.routes.catalogue import ROUTES


def test_doctor_finds_wrong_and_missing_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = doctor.pins()
    versions: dict[str, Any] = pins | {"torch": pins["torch"] + "+cpu", "max": "1.0"}
    del versions["mojo"]
    monkeypatch.setattr("shipway.measure.environment.package_versions", lambda: versions)
    checks = {check.name: check for check in doctor._package_checks()}
    assert checks["torch"].status == "ok"
    assert checks["max"].status == "fail"
    assert checks["max"].remedy == this_python(f"-m pip install max=={pins['max']}")
    assert checks["mojo"].status == "fail"


def test_doctor_finds_a_package_that_cannot_be_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_module.py").write_text("raise ImportError('libnone.so: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ROUTES, "fake", dataclasses.replace(fake_routes.info("Good"), requires=("broken_module",)))
    code, out, _ = run("doctor")
    assert code == 3
    assert "libnone.so: not found" in out


def test_doctor_finds_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "file" / "cache"))
    check = next(doctor._cache_checks())
    assert check.status == "fail"
    assert "SHIPWAY_CACHE" in check.remedy
