"""Compiled models: a directory that holds a checkpoint, its route's artefact, and starts without compiling.

The directory is a Hugging Face checkpoint in the storage format the route reads (nothing is converted at load), beside
``compiled/``, the artefact, and ``shipway.json``, which says for what it was made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shipway.artefacts import ship
from shipway.client import Worker
from shipway.errors import CannotRunError, ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.export import write_directory
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import Prepared, RouteInfo, RunSpec

_MANIFEST, _ARTEFACT, _VERSION = "shipway.json", "compiled", 1


@dataclass(frozen=True)
class CompiledModel:
    """What ``shipway.json`` says.

    Attributes:
        route: The route it was compiled by.
        dtype: Activations and KV cache.
        weights: Storage format of the matrices.
        artefact: Directory of the artefact.
    """

    route: str
    dtype: str
    weights: str
    artefact: str


def read_compiled(path: Path) -> CompiledModel | None:
    """Returns what the compiled model in ``path`` was made for, or ``None`` when it is an ordinary checkpoint.

    Raises:
        ShipwayError: Its ``shipway.json`` is damaged, of another version, or names what no route compiles.
    """
    manifest = path / _MANIFEST
    if not manifest.is_file():
        return None
    try:
        said = json.loads(manifest.read_text())
        if said["version"] != _VERSION:
            raise ShipwayError(f"{manifest} is of version {said['version']}, not {_VERSION}: compile the model again")
        route, dtype, weights = said["route"], said["dtype"], said["weights"]
        info = ROUTES.get(route)
        if info is None or not info.ships or dtype not in info.dtypes or weights not in info.weight_formats:
            raise ShipwayError(
                f"{manifest} names what is never compiled: route {route}, dtype {dtype}, weights {weights}: "
                "compile the model again"
            )
        return CompiledModel(route, dtype, weights, str(path / _ARTEFACT))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShipwayError(f"{manifest} is damaged: compile the model again") from error


def compile_model(
    model: Path,
    info: RouteInfo,
    dtype: str,
    weights: str,
    threads: int,
    out: Path,
    progress: Callable[[str], None],
) -> Prepared:
    """Writes the compiled model into the new directory ``out``; nothing is left there when it fails.

    Args:
        model: A checkpoint.
        info: A route that ships its artefact.
        dtype: Activations and KV cache.
        weights: Storage format of the matrices.
        threads: CPU threads of the compilation.
        out: Must not exist, or be an empty directory.
        progress: Takes one line per step.

    Raises:
        ShipwayError: ``out`` is in the way or cannot be written, the model is not usable.
        CannotRunError: The route ships no artefact.
    """
    if not info.ships:
        raise CannotRunError(f"{info.name} has nothing to compile ahead of time")
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ShipwayError(f"{out} is in the way: name a directory that does not exist yet")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        progress(f"{weights} weights")
        write_directory(open_checkpoint(model), partial, weights)
        progress(f"{info.name} {dtype}: compiling")
        with Worker(info, threads) as worker:
            prepared = worker.prepare(RunSpec(str(partial), dtype, weights, threads=threads, max_context=16))
        assert prepared.artefact_path is not None
        ship(Path(prepared.artefact_path), info.name, partial / _ARTEFACT)
        manifest = {"version": _VERSION, "route": info.name, "dtype": dtype, "weights": weights}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise ShipwayError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return prepared
