"""``shipway routes``."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import fake_routes
from command_line import Run
from shipway.routes.catalogue import ROUTES


def test_routes_are_listed_with_what_they_take(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("routes", "--json", tmp_path / "r.json")
    assert code == 0
    documents = {route["name"]: route for route in json.loads((tmp_path / "r.json").read_text())["routes"]}
    assert documents.keys() == ROUTES.keys()
    assert out.split()[:3] == ["route", "pole", "execution"]
    for name, info in ROUTES.items():
        assert re.search(rf"^{name} +{info.pole} +{info.rung} ", out, re.MULTILINE)
        assert documents[name]["dtypes"] == list(info.dtypes)


def test_route_whose_packages_are_missing_is_listed_with_its_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    info = dataclasses.replace(fake_routes.info("Good"), requires=("no_such_module",), remedy="pip install it")
    monkeypatch.setitem(ROUTES, "fake", info)
    _, out, _ = run("routes")
    assert "needs no_such_module: pip install it" in out
    code, out, _ = run("doctor")
    assert code == 0  # an extra that is not installed, while other routes run
    assert "pip install it" in out
    for name in set(ROUTES) - {"fake"}:
        monkeypatch.delitem(ROUTES, name)
    assert run("doctor")[0] == 3
