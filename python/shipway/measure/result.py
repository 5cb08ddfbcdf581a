"""The result file of a benchmark: JSON with every raw sample, and the only thing tables are made from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypedDict

from shipway.errors import ShipwayError

SCHEMA_VERSION = 1


class Sample(TypedDict):
    """One timed run of one route: seconds from the call with the prompt to the choice of each token."""

    round: int
    position: int
    prompt_tokens: int
    times: list[float]


class ProbeSample(TypedDict):
    """What one pattern of the probe reached in one round, in units of ``kind``."""

    round: int
    pattern: str
    kind: str
    value: float


class Start(TypedDict):
    """One start of a route: seconds from starting the process to a callable model, and the fields of ``Prepared``."""

    total_s: float
    import_s: float
    load_s: float
    compile_s: float
    compile_cold: bool
    cold_compile_s: float | None
    cold_date: str | None
    artefact_bytes: int
    notes: list[str]


class Entry(TypedDict):
    """One route in one dtype.

    ``status`` is ``ok``, ``fail`` (verdict), ``failed`` (broke) or ``not run``. ``starts`` holds the first start in
    this run and, if that compiled anything, a second one that found it in the cache. ``lock_in`` says licence and
    openness of the route's compiler.
    """

    route: str
    dtype: str
    weights: str
    status: str
    reason: str | None
    verdict: dict[str, Any] | None
    starts: list[Start]
    install_bytes: int | None
    lock_in: str
    peak_memory_bytes: int | None
    decode_bytes: float
    prefill_flops: float
    ids: list[int]
    samples: list[Sample]
    sweep: list[Sample]
    sweep_decode_bytes: dict[str, float]


class Workload(TypedDict):
    """What was run."""

    model: str
    architecture: str
    parameters: int
    prompt_tokens: int
    new_tokens: int
    batch: int
    rounds: int
    contexts: list[int]
    sweep_new_tokens: int
    verdict_tokens: int
    device: str
    baseline: str


class Result(TypedDict):
    """A benchmark. ``rounds`` holds the busy share of the machine before each round, every route stopped."""

    schema_version: int
    command: str
    created: str
    environment: dict[str, Any]
    workload: Workload
    price: dict[str, Any]
    rounds: list[dict[str, float]]
    probes: list[ProbeSample]
    entries: list[Entry]
    warnings: list[str]


def check_writable(path: Path) -> None:
    """Raises a :class:`ShipwayError` when ``path`` cannot be written; asked before the work, not after it."""
    folder = path.parent
    if path.is_dir():
        raise ShipwayError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise ShipwayError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ShipwayError(f"cannot write {path}: permission denied")


def write_json(path: Path, document: Any) -> None:
    """Writes ``document`` to ``path``, whole or not at all.

    Raises:
        ShipwayError: It cannot be written.
    """
    text = json.dumps(_plain(document), indent=1, allow_nan=False) + "\n"
    try:
        if path.exists() and not path.is_file():  # /dev/stdout and the like cannot be replaced
            path.write_text(text)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise ShipwayError(f"cannot write {path}: {error.strerror}") from None


def _plain(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_result(path: Path) -> Result:
    """Returns the benchmark stored in ``path``.

    Raises:
        ShipwayError: It cannot be read, or is no benchmark of this schema.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ShipwayError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ShipwayError(f"{path} is not JSON: give a file written by `shipway bench --json`") from None
    if not isinstance(document, dict) or document.get("command") != "bench":
        raise ShipwayError(f"{path} is not a benchmark result: give a file written by `shipway bench --json`")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ShipwayError(
            f"{path} has schema_version {document.get('schema_version')}, this shipway reads {SCHEMA_VERSION}: "
            "run the benchmark again"
        )
    missing = Result.__required_keys__ - document.keys()
    if missing:
        raise ShipwayError(f"{path} lacks {', '.join(sorted(missing))}: it was not written whole")
    result: Result = document  # type: ignore[assignment]
    return result
