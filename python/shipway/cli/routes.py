"""``shipway routes``."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from shipway.cli.options import Json
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.report.lines import print_table
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import RouteInfo


def state(info: RouteInfo) -> str:
    """Returns ``"runs here"``, or why the route cannot and what would make it run."""
    return info.why_not(info.dtypes[0], info.weight_formats[0], info.devices[0]) or "runs here"


def routes(json: Json = None) -> None:
    """List the routes: pole (who chooses the schedule), how kernels execute, what they take, whether they run here."""
    lines = [["route", "pole", "execution", "devices", "dtypes", "weights", "here", "what it is"]]
    documents: list[dict[str, Any]] = []
    for info in ROUTES.values():
        here = state(info)
        lists = [", ".join(values) for values in (info.devices, info.dtypes, info.weight_formats)]
        lines.append([info.name, info.pole, info.rung, *lists, here, info.summary])
        documents.append(dataclasses.asdict(info) | {"here": here})
    if json is not None:
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "routes", "routes": documents})
    print_table(lines, sys.stdout, figures=False)
