"""``shipway doctor``."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import typer

from shipway.cli.options import Json
from shipway.errors import this_python
from shipway.measure import environment
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.model.resolve import cache_dir
from shipway.report.lines import print_table
from shipway.routes.catalogue import ROUTES

_PINNED = ("max", "mojo", "torch")
_IMPORT_LIMIT_S = 120
_MEMORY_NEEDED = 3 << 30  # the default benchmark: two routes in two dtypes and the probe, none of them alone
_DISK_NEEDED = 1 << 30  # the default model, its reference logits and the compiled artefacts


@dataclass(frozen=True)
class Check:
    """One thing looked at: ``ok``, ``warn`` (slower or less than it could be) or ``fail``, and what would cure it."""

    name: str
    status: str
    found: str
    remedy: str = ""


def _gibibytes(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def pins() -> dict[str, str]:
    """Returns the exact versions this package requires, from its own metadata."""
    found = (re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in metadata.requires("shipway") or ())
    return {match[1]: match[2] for match in found if match}


def _package_checks() -> Iterator[Check]:
    wanted, installed = pins(), environment.package_versions()
    for name in _PINNED:
        want, have = wanted[name], installed.get(name)
        remedy = this_python(f"-m pip install {name}=={want}")
        if have is None:
            yield Check(name, "fail", f"not installed, {want} wanted", remedy)
        elif have.split("+")[0] != want:  # torch adds the kind of build: 2.13.0+cpu
            yield Check(name, "fail", f"{have} installed, {want} wanted", remedy)
        else:
            yield Check(name, "ok", have)


def _machine_checks() -> Iterator[Check]:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    yield Check("Python", "ok" if good else "fail", version, "" if good else "use Python 3.11 to 3.14")
    features = environment.cpu_features()
    plain = platform.machine() == "x86_64" and "avx2" not in features
    yield Check(
        "CPU",
        "warn" if plain else "ok",
        f"{environment.cpu_model()}, {os.cpu_count()} cores, {' '.join(features) or 'no vector features'}",
        "kernels are slow without AVX2" if plain else "",
    )
    yield Check("GPU", "ok", environment.gpu())
    available = environment.memory_available()
    short = available < _MEMORY_NEEDED
    yield Check(
        "memory",
        "warn" if short else "ok",
        f"{_gibibytes(available)} available of {_gibibytes(environment.memory_total())}",
        f"free some: the default benchmark takes up to {_gibibytes(_MEMORY_NEEDED)}" if short else "",
    )
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    yield Check(
        "C++ compiler",
        "ok" if compiler else "warn",
        compiler or "none",
        "" if compiler else "apt install g++: `mojo build` links with it (the routes do without)",
    )


def _cache_checks() -> Iterator[Check]:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Check("cache", "fail", f"{folder}: {error.strerror}", "set SHIPWAY_CACHE to a writable folder")
        return
    yield Check("cache", "ok", str(folder))
    free = shutil.disk_usage(folder).free
    short = free < _DISK_NEEDED
    remedy = f"free {_gibibytes(_DISK_NEEDED)}, or set SHIPWAY_CACHE to another disk" if short else ""
    yield Check("disk", "warn" if short else "ok", f"{_gibibytes(free)} free", remedy)


def _import_error(module: str) -> str | None:
    """Imports ``module`` in a process of its own; returns the last line of what went wrong, or ``None``."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"takes more than {_IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]


def _route_checks() -> Iterator[Check]:
    broken: dict[str, str | None] = {}
    for info in ROUTES.values():
        if (reason := info.why_not(info.dtypes[0], info.weight_formats[0], info.devices[0])) is not None:
            # Its packages are an extra: their absence is a choice, unless no route is left (see `doctor`).
            yield Check(f"route {info.name}", "warn", f"does not run: {reason.split(':')[0]}", info.remedy)
            continue
        for module in info.requires:
            if module not in broken:
                broken[module] = _import_error(module)
        errors = [f"import {module}: {broken[module]}" for module in info.requires if broken[module]]
        if errors:
            yield Check(f"route {info.name}", "fail", "; ".join(errors), f"{info.remedy} --force-reinstall")
        else:
            yield Check(f"route {info.name}", "ok", f"runs in {', '.join(info.dtypes)}")


def doctor(json: Json = None) -> None:
    """Check this machine and environment; say what is missing and what would cure it.

    Exits with 3 when something that is needed is missing, or when no route runs.
    """
    checks = [*_machine_checks(), *_package_checks(), *_cache_checks(), *_route_checks()]
    if json is not None:
        document = {"schema_version": SCHEMA_VERSION, "command": "doctor"}
        write_json(json, document | {"checks": [dataclasses.asdict(check) for check in checks]})
    lines = [["check", "", "found", "remedy"]]
    lines += [[check.name, check.status, check.found, check.remedy] for check in checks]
    print_table(lines, sys.stdout, figures=False)
    some_route_runs = any(check.name.startswith("route ") and check.status == "ok" for check in checks)
    if not some_route_runs or any(check.status == "fail" for check in checks):
        raise typer.Exit(3)
