"""One op through every implementation that runs here: verdicts first, then interleaved rounds, cold and warm cache.

Each implementation has a process of its own; the others are stopped while one is judged or timed. A cold call reads
arguments that lie in a rotation of copies larger than twice the last-level cache; a warm one reads the same arguments
again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypedDict, cast

from shipway.client import Worker, WorkerError
from shipway.errors import CannotRunError, ShipwayError
from shipway.measure.environment import (
    IDLE_BUSY_SHARE,
    busy_share,
    describe_environment,
    last_level_cache_bytes,
    memory_total,
)
from shipway.measure.op_target import MOST_COPIES
from shipway.measure.op_work import SHAPES
from shipway.measure.probes import PROBE
from shipway.measure.result import SCHEMA_VERSION, Environment, ProbeSample
from shipway.numerics.campaign import missing
from shipway.ops.catalogue import OPS
from shipway.ops.op import Implementation, Op
from shipway.routes.route import RouteInfo

BASELINE = "torch"
CACHES = ("cold", "warm")
ROUNDS = 7

_BLOCK_S = 0.03  # seconds of timed calls of one implementation in one round on one cache
_FEWEST_CALLS, _MOST_CALLS = 3, 100
_PROBE_S = 0.05  # of each pattern
_SWITCHES = {"bias": 1, "norm": 1, "rotary_quarters": 4}  # dims that count no elements, with their largest value


class Verdict(TypedDict):
    """What the judged cases of one implementation gave.

    ``property`` is the first that failed, ``reason`` why and on which case; ``known`` the declared failures that were
    seen; ``max_ulps`` and ``cosine_diff`` the largest errors of all outputs that passed.
    """

    ok: bool
    property: str
    reason: str
    known: list[str]
    cases: int
    max_ulps: float
    cosine_diff: float


class Prepared(TypedDict):
    """What a worker answers before it is timed.

    ``copies`` is the length of the rotation, 0 where no cold cache can be had; ``converts`` says that every timed call
    includes converting torch tensors to the implementation's own arrays.
    """

    verdict: Verdict
    load_s: float
    bytes: float
    flops: float
    copies: int
    converts: bool
    call_s: float


class Sample(TypedDict):
    """Seconds of each call of one block."""

    round: int
    position: int
    cache: str
    seconds: list[float]


class Entry(TypedDict):
    """One implementation in one dtype at one shape.

    ``status`` is ``ok``, ``fail`` (verdict), ``failed`` (broke) or ``not run``; ``bytes`` and ``flops`` are what one
    call must move and compute.
    """

    implementation: str
    dtype: str
    shape: str
    dims: dict[str, int]
    status: str
    reason: str
    verdict: Verdict | None
    load_s: float
    bytes: float
    flops: float
    copies: int
    converts: bool
    samples: list[Sample]


class OpProbe(ProbeSample):
    """A probe's sample beside the rounds of one dtype and shape."""

    dtype: str
    shape: str


class TimeEdit(TypedDict):
    """Seconds from saving an edit of ``file`` to its line in the table."""

    file: str
    seconds: float
    limit_s: float
    held: bool


class OpResult(TypedDict):
    """The result file of ``shipway op``. ``time_edit`` is ``None`` unless it was asked for."""

    schema_version: int
    command: str
    created: str
    environment: Environment
    op: str
    baseline: str
    rounds: int
    cache_bytes: int
    entries: list[Entry]
    probes: list[OpProbe]
    time_edit: TimeEdit | None
    warnings: list[str]


_OF_ROWS = ("T", "R", "length")
"""Dims of 0 with which an op, rightly, does nothing."""


def timed(op: Op) -> tuple[str, ...]:
    """Names of the rows whose time says something: all but those on a simulated device."""
    return tuple(name for name, row in op.implementations.items() if row.device == "cpu")


def check_dims(op: Op, dims: Mapping[str, int]) -> None:
    """Checks dims of a shape, within the drawn range or beyond it.

    Raises:
        ShipwayError: An op cannot have such a dim, or this machine cannot hold such arrays.
    """
    for name, value in dims.items():
        dim = op.dims[name]
        most = dim.high if dim.static else _SWITCHES.get(name)
        if value < dim.low or (most is not None and value > most):
            at_most = "" if most is None else f" to {most}"
            raise ShipwayError(f"{op.name}: {name} goes from {dim.low}{at_most}, not {value}")
    *_, second, first = 1, 1, *sorted(dims.values())
    if 4 * first * second > memory_total():
        shape = ",".join(f"{name}={size}" for name, size in dims.items())
        raise ShipwayError(f"{op.name}: {shape} does not fit into this machine's memory: give smaller dims")


@dataclass(frozen=True)
class OpSettings:
    """What to run.

    Attributes:
        op: Name of the op.
        implementations: Rows; empty for all.
        dtypes: Activation dtypes.
        shape: Dims that differ from the op's first default shape; empty for all default shapes.
        threads: Threads of every implementation.
    """

    op: str
    implementations: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: Mapping[str, int]
    threads: int

    def check(self) -> None:
        """Raises a :class:`ShipwayError` for names and numbers that the op does not have."""
        if self.op not in OPS:
            raise ShipwayError(f"no op is called {self.op!r}: choose one of {', '.join(OPS)}")
        op = OPS[self.op]
        for what, names, known in (
            ("implementation", self.implementations, timed(op)),
            ("dtype", self.dtypes, tuple(dict.fromkeys(d for row in op.implementations.values() for d in row.dtypes))),
            ("dim", tuple(self.shape), tuple(op.dims)),
        ):
            for name in names:
                if name not in known:
                    raise ShipwayError(f"{self.op} has no {what} {name!r}: choose from {', '.join(known)}")
        if not self.dtypes:
            raise ShipwayError("name at least one dtype")
        for dims in (self.shape, *self.shapes().values()):
            check_dims(op, dims)
        for name in _OF_ROWS:
            if self.shape.get(name) == 0:
                raise ShipwayError(f"{self.op}: with {name}=0 there is nothing to time: give {name} from 1")

    def shapes(self) -> dict[str, dict[str, int]]:
        """Returns the shapes to run, by name."""
        defaults = SHAPES[self.op]
        if not self.shape:
            return {name: dict(dims) for name, dims in defaults.items()}
        return {"given": {**next(iter(defaults.values())), **self.shape}}


class OpBench:
    """Runs an op's implementations; a context manager whose workers stay for the next :meth:`run`."""

    def __init__(self, settings: OpSettings, progress: Callable[[str], None], kernels: str | None = None) -> None:
        """Checks the settings; starts nothing.

        Args:
            settings: What to run.
            progress: Is told in a few words what is going on.
            kernels: Folder of the Mojo kernels, ``None`` for the package's own.

        Raises:
            ShipwayError: The settings name what the op does not have.
        """
        settings.check()
        self._settings = settings
        self._progress = progress
        self._kernels = kernels
        self._op = OPS[settings.op]
        self._workers: dict[str, Worker] = {}
        self._probe: Worker | None = None
        self._refused: dict[str, str] = {}  # implementations that do not compile, in this run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget(*self._workers)
        if self._probe is not None:
            self._probe.close()

    def sources_changed(self) -> None:
        """Ends the workers that hold what was compiled from this project's sources."""
        rows = self._op.implementations
        self._forget(*(name for name in self._workers if "max" in rows[name].requires))

    def run(self) -> OpResult:
        """Judges and times everything once."""
        settings = self._settings
        result: OpResult = {
            "schema_version": SCHEMA_VERSION,
            "command": "op",
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "environment": cast(Environment, describe_environment(settings.threads)),
            "op": settings.op,
            "baseline": BASELINE,
            "rounds": ROUNDS,
            "cache_bytes": last_level_cache_bytes(),
            "entries": [],
            "probes": [],
            "time_edit": None,
            "warnings": [],
        }
        self._refused = {}
        if (busy := busy_share()) > IDLE_BUSY_SHARE:
            result["warnings"].append(f"{busy:.0%} of the CPU was in use by others before the first call")
        for dtype in dict.fromkeys(settings.dtypes):
            for shape, dims in settings.shapes().items():
                self._group(result, dtype, shape, dims)
        return result

    def _group(self, result: OpResult, dtype: str, shape: str, dims: dict[str, int]) -> None:
        """Every implementation in one dtype at one shape."""
        # The baseline is timed even where it is not asked for: a ratio needs it in the same rounds.
        asked = self._settings.implementations or timed(self._op)
        ready: list[tuple[Entry, Prepared]] = []
        for name in dict.fromkeys((BASELINE, *asked)):
            self._progress(f"{self._op.name} {dtype} {shape}: {name}")
            entry, prepared = self._prepare(self._op.implementations[name], dtype, shape, dims)
            result["entries"].append(entry)
            if prepared is not None and entry["status"] == "ok":
                ready.append((entry, prepared))
                if not prepared["copies"]:
                    result["warnings"].append(
                        f"{name} {dtype} {shape}: no cold cache, more than {MOST_COPIES} copies would be needed"
                    )
        self._progress(f"{self._op.name} {dtype} {shape}: timing")
        for number in range(ROUNDS):
            if not ready:
                break
            if number in (0, ROUNDS - 1):
                result["probes"] += self._measure_limits(result, dtype, shape, number)
            for position, (entry, prepared) in enumerate(ready[::-1] if number % 2 else ready):
                with self._awake(entry) as worker:
                    for cache in CACHES:
                        if cache == "warm" or prepared["copies"]:
                            calls = _block(prepared["call_s"])
                            seconds = worker.call("time", cache=cache, calls=calls)
                            sample: Sample = {"round": number, "position": position, "cache": cache, "seconds": seconds}
                            entry["samples"].append(sample)
            ready = [one for one in ready if one[0]["status"] == "ok"]

    def _prepare(
        self, row: Implementation, dtype: str, shape: str, dims: dict[str, int]
    ) -> tuple[Entry, Prepared | None]:
        entry: Entry = {
            "implementation": row.name,
            "dtype": dtype,
            "shape": shape,
            "dims": dims,
            "status": "ok",
            "reason": "",
            "verdict": None,
            "load_s": 0.0,
            "bytes": 0.0,
            "flops": 0.0,
            "copies": 0,
            "converts": False,
            "samples": [],
        }
        if reason := missing(row):
            _set(entry, "not run", reason)
        elif dtype not in row.dtypes:
            _set(entry, "not run", f"runs in {', '.join(row.dtypes)} only")
        elif row.name in self._refused:
            _set(entry, "failed", self._refused[row.name])
        if entry["status"] != "ok":
            return entry, None
        prepared: Prepared | None = None
        with self._awake(entry) as worker:
            prepared = worker.call(
                "prepare",
                op=self._op.name,
                implementation=row.name,
                dtype=dtype,
                dims=dims,
                threads=self._settings.threads,
                kernels=self._kernels,
            )
        if prepared is not None:
            verdict = prepared["verdict"]
            entry["verdict"] = verdict
            for key in ("load_s", "bytes", "flops", "copies", "converts"):
                entry[key] = prepared[key]
            if not verdict["ok"]:
                _set(entry, "fail", f"{verdict['property']}: {verdict['reason']}")
        return entry, prepared

    @contextmanager
    def _awake(self, entry: Entry) -> Iterator[Worker]:
        """The running worker of an entry's implementation, stopped again afterwards; its failure is the entry's."""
        name = entry["implementation"]
        try:
            if name not in self._workers:
                self._workers[name] = Worker(_worker_info(name), self._settings.threads)
            self._workers[name].resume()
            yield self._workers[name]
            self._workers[name].pause()
        except ShipwayError as error:
            _set(entry, "not run" if isinstance(error, CannotRunError) else "failed", str(error))
            self._forget(name)
            if not isinstance(error, WorkerError):  # sources that do not compile: every other shape would say the same
                self._refused[name] = str(error)

    def _forget(self, *names: str) -> None:
        for name in names:
            if (worker := self._workers.pop(name, None)) is not None:
                worker.close()

    def _measure_limits(self, result: OpResult, dtype: str, shape: str, number: int) -> list[OpProbe]:
        try:
            if self._probe is None:
                self._progress("probes of this machine's limits")
                self._probe = Worker(PROBE, self._settings.threads)
                self._probe.call("start", threads=self._settings.threads)
            self._probe.resume()
            samples = self._probe.call("measure", seconds=_PROBE_S)
            self._probe.pause()
        except ShipwayError as error:
            if self._probe is not None:
                self._probe.close()
                self._probe = None
            if (line := f"no % of limit: {error}") not in result["warnings"]:
                result["warnings"].append(line)
            return []
        return [cast(OpProbe, {"round": number, "dtype": dtype, "shape": shape, **sample}) for sample in samples]


def _set(entry: Entry, status: str, reason: str) -> None:
    """Says in one line why an entry has no figures."""
    entry["status"], entry["reason"] = status, " ".join(reason.split())


def _worker_info(implementation: str) -> RouteInfo:
    """What starts a worker for one implementation."""
    return RouteInfo(
        name=implementation,
        pole="none",
        rung="eager",
        factory="shipway.measure.op_target:OpTarget",
        devices=("cpu",),
        dtypes=(),
        weight_formats=(),
        requires=(),
        remedy="",
        summary="one implementation of one op",
    )


def _block(call_s: float) -> int:
    """Calls of one block, given the seconds of a call."""
    return max(_FEWEST_CALLS, min(_MOST_CALLS, int(_BLOCK_S / max(call_s, 1e-9))))
