"""``shipway load-time``."""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shipway.cli.options import Json, Threads
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.environment import describe_environment
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.measure.stats import estimate

# Each start is a process of its own, timed from before the package is imported.
_START = """
import json, sys, time
began = time.perf_counter()
import shipway
model = shipway.load(sys.argv[1], threads=int(sys.argv[2]))
loaded = time.perf_counter()
next(iter(model.generate("The", max_new=1, greedy=True)))
first = time.perf_counter()
model.close()
print(json.dumps({"load_s": loaded - began, "first_token_s": first - began, "compiled": model.prepared.compile_cold}))
"""


def load_time(
    directory: Annotated[Path, typer.Argument(help="Directory made by shipway compile, or any checkpoint.")],
    limit: Annotated[float, typer.Option(help="Seconds a load may take; a longer median exits with 1.")] = 3.0,
    runs: Annotated[int, typer.Option(help="Starts to time.", min=1)] = 5,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Time shipway.load of a directory in fresh processes, import of the package included."""
    from shipway.api import check_threads

    threads = check_threads(threads)
    samples = []
    with progress() as show:
        for run in range(runs):
            show(f"start {run + 1} of {runs}")
            result = subprocess.run(
                [sys.executable, "-c", _START, str(directory), str(threads)], capture_output=True, text=True
            )
            if result.returncode:
                lines = result.stderr.strip().splitlines()
                raise ShipwayError(f"{directory} does not load: {lines[-1] if lines else 'no message'}")
            samples.append(json_format.loads(result.stdout.splitlines()[-1]))
    load = estimate([sample["load_s"] for sample in samples])
    first = estimate([sample["first_token_s"] for sample in samples])
    held = load.median <= limit
    if json is not None:
        document = {"path": str(directory), "limit_s": limit, "held": held, "samples": samples}
        document |= {"environment": describe_environment(threads)}
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "load-time", **document})
    print(f"load         {load.median:.2f} s (limit {limit:g} s: {'held' if held else 'missed'})")
    print(f"first token  {first.median:.2f} s")
    if any(sample["compiled"] for sample in samples):
        print("the first start compiled: its artefact was not in the cache")
    raise typer.Exit(0 if held else 1)
