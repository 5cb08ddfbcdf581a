"""``shipway load-time``."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shipway.cli.options import Json, Threads
from shipway.cli.progress import progress
from shipway.errors import CannotRunError, ShipwayError, program
from shipway.measure.environment import describe_environment
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.measure.stats import estimate

# Each start is a process of its own, timed from before the package is imported.
_START = """
import json, sys, time
began = time.perf_counter()
import shipway
from shipway.errors import ShipwayError
try:
    model = shipway.load(sys.argv[1], threads=int(sys.argv[2]))
    loaded = time.perf_counter()
    next(iter(model.generate("The", max_new=1, greedy=True)))
    first = time.perf_counter()
    model.close()
except ShipwayError as error:
    print(" ".join(str(error).split()), file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps({"load_s": loaded - began, "first_token_s": first - began, "compiled": model.prepared.compile_cold}))
"""


def _start(path: Path, threads: int) -> dict[str, Any]:
    """Times one start; an error of it is raised here, as what it was there."""
    from shipway.client import WorkerError

    command = [sys.executable, "-c", _START, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        kinds = {kind.exit_code: kind for kind in (ShipwayError, CannotRunError)}
        raise kinds.get(done.returncode, WorkerError)(f"{path} does not load: {reason}")
    sample: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
    return sample


def load_time(
    directory: Annotated[Path, typer.Argument(help=f"Directory made by {program()} compile, or any checkpoint.")],
    limit: Annotated[float, typer.Option(help="Seconds a load may take; a longer median exits with 1.")] = 3.0,
    runs: Annotated[int, typer.Option(help="Starts to time.", min=1)] = 5,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Time shipway.load of a directory in fresh processes, import of the package included."""
    from shipway.api import check_threads
    from shipway.compiled import read_compiled
    from shipway.model.checkpoint import open_checkpoint
    from shipway.model.resolve import resolve

    if not limit >= 0:  # NaN as well
        raise ShipwayError(f"--limit must be seconds >= 0, not {limit}")
    threads = check_threads(threads)
    path = resolve(directory)
    compiled = read_compiled(path)
    open_checkpoint(path)  # what holds no model is refused before anything is started
    samples = []
    with progress() as show:
        for run in range(runs):
            show(f"start {run + 1} of {runs}")
            samples.append(_start(path, threads))
    load = estimate([sample["load_s"] for sample in samples])
    first = estimate([sample["first_token_s"] for sample in samples])
    held = load.median <= limit
    if json is not None:
        document = {"path": str(directory), "limit_s": limit, "held": held, "samples": samples}
        document |= {"model": compiled.model if compiled else path.name, "dtype": compiled.dtype if compiled else "f32"}
        document |= {"environment": describe_environment(threads)}
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "load-time", **document})
    print(f"load         {load.median:.2f} s (limit {limit:g} s: {'held' if held else 'missed'})")
    print(f"first token  {first.median:.2f} s")
    if any(sample["compiled"] for sample in samples):
        print("the first start compiled: its artefact was not in the cache")
    raise typer.Exit(0 if held else 1)
