"""The result file of a benchmark: JSON with every raw sample, and the only thing tables are made from."""

from __future__ import annotations

import json
import math
import os
import stat
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from shipway.errors import ShipwayError, program

SCHEMA_VERSION = 1
_LARGEST = 1 << 63  # no figure comes near it, and Python's integers go on where its floats end
_STATUSES = {None: ("failed", "not run"), True: ("ok", "failed"), False: ("fail", "failed")}  # by the verdict's `ok`
_NAMES = ("nan", "inf", "-inf")  # how NaN and infinities are written: JSON has no number for them


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
    """One start of a route: seconds from starting the process to a callable model, and ``Prepared``, its path aside."""

    total_s: float
    import_s: float
    load_s: float
    compile_s: float
    compile_cold: bool
    cold_compile_s: float | None
    cold_date: str | None
    artefact_bytes: int
    notes: list[str]


class FirstDivergence(TypedDict):
    """The first token the route chose otherwise than the reference, and how near the reference's choice was."""

    position: int
    reference: int
    route: int
    top2_margin: float


class Verdict(TypedDict):
    """What is printed of ``shipway.numerics.model_verdict.ModelVerdict``; the file holds all its fields."""

    ok: bool
    reason: str
    positions: int
    kl_mean: float
    delta_nll_mean: float
    base_kl_mean: float | None
    base_delta_nll_mean: float | None
    agreement: float
    first_divergence: FirstDivergence | None


class Entry(TypedDict):
    """One route in one dtype.

    ``status`` is ``ok``, ``fail`` (verdict), ``failed`` (broke) or ``not run``. ``starts`` holds the first start in
    this run and, if that compiled anything, a second one that found it in the cache: the verdict, the timed runs and
    ``peak_memory_bytes`` are the second one's, the first one's peak is ``cold_peak_memory_bytes``. ``lock_in`` says
    licence and openness of the route's compiler.
    """

    route: str
    dtype: str
    weights: str
    status: str
    reason: str | None
    verdict: Verdict | None
    starts: list[Start]
    install_bytes: int | None
    lock_in: str
    peak_memory_bytes: int | None
    cold_peak_memory_bytes: NotRequired[int | None]
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


class Environment(TypedDict):
    """What is printed of the machine; the file holds everything ``describe_environment`` returns."""

    cpu: str
    threads: int
    cores: int
    memory_bytes: int
    gpu: str
    packages: dict[str, str]
    git_revision: NotRequired[str | None]


class PriceRow(TypedDict):
    """A ``shipway.measure.prices.Price``."""

    usd_per_hour: float
    machine: str
    source: str


class Stopped(TypedDict):
    """What a benchmark that was stopped was to do: it holds the rounds that had ended, as many as its workload says."""

    planned_rounds: int


class Result(TypedDict):
    """A benchmark. ``rounds`` holds the busy share of the machine before each round, every route stopped.

    ``stopped`` is there when it was stopped between its first round and its last.
    """

    schema_version: int
    command: str
    created: str
    environment: Environment
    workload: Workload
    price: PriceRow
    rounds: list[dict[str, float]]
    probes: list[ProbeSample]
    entries: list[Entry]
    warnings: list[str]
    stopped: NotRequired[Stopped]


def check_writable(path: Path) -> None:
    """Raises a :class:`ShipwayError` when ``path`` cannot be written; asked before the work, not after it."""
    try:
        if path.is_dir():
            raise ShipwayError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise ShipwayError(f"cannot write {path}: there is no folder {path.parent}")
        if _is_replaceable(path):
            partial = _partial(path)
            partial.touch()
            partial.unlink()
        elif not os.access(path, os.W_OK):
            raise ShipwayError(f"cannot write {path}: permission denied")
    except OSError as error:
        raise ShipwayError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, document: Any) -> None:
    """Writes ``document`` to ``path``, whole or not at all.

    Raises:
        ShipwayError: It cannot be written.
    """
    text = json.dumps(_plain(document), indent=1, allow_nan=False) + "\n"
    try:
        if not _is_replaceable(path):
            path.write_text(text)
            return
        partial = _partial(path)
        try:
            partial.write_text(text)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ShipwayError(f"cannot write {path}: {error.strerror}") from None


def _is_replaceable(path: Path) -> bool:
    """Whether ``path`` is an ordinary file or none yet; /dev/stdout and the like can only be written to.

    Raises:
        OSError: No such file could exist, for its name is too long and the like.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _partial(path: Path) -> Path:
    """Where the content goes until it is whole; not made from the file's name, which may be as long as names get."""
    return path.with_name(f".shipway-{os.getpid()}")


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
    """Returns the benchmark stored in ``path``, NaN and infinities as they were before they were written by name.

    Raises:
        ShipwayError: It cannot be read, or is no benchmark of this schema.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ShipwayError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, or numbers and nesting beyond what is read
        raise ShipwayError(f"{path} is not JSON: give a file written by `{program()} bench --json`") from None
    if not isinstance(document, dict) or document.get("command") != "bench":
        raise ShipwayError(f"{path} is not a benchmark result: give a file written by `{program()} bench --json`")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ShipwayError(
            f"{path} has schema_version {document.get('schema_version')}, this shipway reads {SCHEMA_VERSION}: "
            "run the benchmark again"
        )
    missing = _needed(get_type_hints(Result, include_extras=True)) - document.keys()
    if missing:
        raise ShipwayError(f"{path} lacks {', '.join(sorted(missing))}: it was not written whole")
    try:
        result: Result = _typed(document, Result, "")
        _check_figures(result)
    except _Malformed as error:
        raise ShipwayError(f"{path} is damaged: {error}; run the benchmark again") from None
    return result


class _Malformed(Exception):
    """Where a document is not what :class:`Result` says, and why."""


def _needed(hints: dict[str, Any]) -> set[str]:
    """The keys a document must have; ``__required_keys__`` does not see through annotations that are texts."""
    return {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Returns ``value`` as the type ``kind``, or says that the part of the document called ``where`` is no such thing.

    Keys that a TypedDict does not name are kept as they are. Texts lose what a terminal would take for commands.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        (other,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _typed(value, other, where)
    if kind is float:
        if value in _NAMES:
            return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
            return value
    elif kind is str:
        if isinstance(value, str):
            return _printable(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST:
            return value
    elif origin is NotRequired:
        return _typed(value, arguments[0], where)
    elif is_typeddict(kind):
        if isinstance(value, dict):
            hints = get_type_hints(kind, include_extras=True)
            if missing := sorted(_needed(hints) - value.keys()):
                raise _Malformed(f"{where} lacks {', '.join(missing)}")
            fields = value.keys() & hints.keys()
            return value | {name: _typed(value[name], hints[name], f"{where}.{name}".lstrip(".")) for name in fields}
    elif origin is list:
        if isinstance(value, list):
            return [_typed(item, arguments[0], f"{where}[{number}]") for number, item in enumerate(value)]
    elif origin is dict:
        if isinstance(value, dict):
            return {_printable(name): _typed(item, arguments[1], f"{where}.{name}") for name, item in value.items()}
    elif isinstance(value, kind):
        return value
    raise _Malformed(f"{where} is {json.dumps(value)[:60]}")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _check_positive(value: float, where: str) -> None:
    if not 0 < value < math.inf:
        raise _Malformed(f"{where} is {value}")


def _check_figures(result: Result) -> None:
    """Raises when no figure can be made from what is of the right type, or a verdict is not what its status says."""
    _check_positive(result["price"]["usd_per_hour"], "price.usd_per_hour")
    work = result["workload"]
    for name in ("parameters", "prompt_tokens", "new_tokens", "batch", "rounds"):
        _check_positive(work[name], f"workload.{name}")
    if (stopped := result.get("stopped")) is not None and stopped["planned_rounds"] <= work["rounds"]:
        raise _Malformed(f"stopped.planned_rounds is {stopped['planned_rounds']}, of which {work['rounds']} ended")
    for number, probe in enumerate(result["probes"]):
        _check_positive(probe["value"], f"probes[{number}].value")
    rows = [(entry["route"], entry["dtype"]) for entry in result["entries"]]
    for number, entry in enumerate(result["entries"]):
        where = f"entries[{number}]"
        if rows.index(rows[number]) != number:
            raise _Malformed(f"{where} is a second one of {entry['route']} {entry['dtype']}")
        held = None if entry["verdict"] is None else entry["verdict"]["ok"]
        if entry["status"] not in (fitting := _STATUSES[held]):
            said = f"{where}.status is {entry['status']!r}"
            raise _Malformed(f"{said} and not {' or '.join(fitting)}, as its verdict says")
        if entry["status"] == "ok":
            _check_positive(entry["decode_bytes"], f"{where}.decode_bytes")
            _check_positive(entry["prefill_flops"], f"{where}.prefill_flops")
        for sample in (*entry["samples"], *entry["sweep"]):
            _check_positive(sample["prompt_tokens"], f"{where} has a sample whose prompt_tokens")
            times = [0.0, *sample["times"], math.inf]
            if len(times) < 4 or not all(before < after for before, after in pairwise(times)):
                raise _Malformed(f"{where} has a sample whose times are not those of two tokens or more")
        timed = sorted(sample["round"] for sample in entry["samples"])
        if entry["status"] == "ok" and timed != list(range(result["workload"]["rounds"])):
            raise _Malformed(f"{where} was timed in rounds {timed}, not in {result['workload']['rounds']} rounds")
