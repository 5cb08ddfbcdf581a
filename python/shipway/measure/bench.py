"""The benchmark: verdicts first, then rounds A B C, C B A, ... over resident workers, one of them running at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from shipway.api import check_names, check_threads, check_whole, find_route
from shipway.client import CALL_TIMEOUT_S, CacheFullError, Worker, WorkerError
from shipway.errors import ShipwayError
from shipway.measure import limits
from shipway.measure.contender import Contender
from shipway.measure.environment import (
    IDLE_BUSY_SHARE,
    describe_environment,
    install_bytes,
    memory_available,
    wait_until_idle,
)
from shipway.measure.lock_in import lock_in
from shipway.measure.prices import choose_price
from shipway.measure.probes import PROBE
from shipway.measure.result import SCHEMA_VERSION, Entry, Environment, PriceRow, ProbeSample, Result, Verdict
from shipway.measure.verdicts import VERDICT_TOKENS, cached_reference_logits, fixed_text_ids, judge_route
from shipway.model.checkpoint import Checkpoint, open_checkpoint
from shipway.model.resolve import resolve
from shipway.routes.route import RunSpec

BASELINE = "torch-eager"
SWEEP_NEW_TOKENS = 16
_IDLE_WAIT_S = 10.0  # before one round
_IDLE_WAITS_S = 30.0  # in all: on a machine that stays busy waiting only makes the run longer
_RUNTIME_BYTES = 1 << 30  # interpreter, compiler and scratch of a worker that has not been measured yet
_KEPT_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What to benchmark.

    Attributes:
        model: Path or name.
        routes: Route names.
        dtypes: Activation dtypes; each route runs in each.
        weights: Storage format of the matrices, ``None`` for the dtype.
        threads: CPU threads of every route, ``None`` for every CPU this process may use.
        rounds: Timed rounds.
        prompt_tokens: Ids of the fixed text in the prompt.
        new_tokens: New tokens per run.
        contexts: KV lengths of the decode sweep, empty for none.
        device: Where to run.
        price: USD per hour or a row of the price table; ``None`` for the row like this machine.
        timeout_s: Seconds one call on a worker may take.
    """

    model: str
    routes: tuple[str, ...]
    dtypes: tuple[str, ...]
    weights: str | None = None
    threads: int | None = None
    rounds: int = 5
    prompt_tokens: int = 128
    new_tokens: int = 64
    contexts: tuple[int, ...] = ()
    device: str = "cpu"
    price: str | None = None
    timeout_s: float = CALL_TIMEOUT_S

    def longest(self) -> int:
        """Returns the KV cache length that the workload and the sweep need, in tokens."""
        return max([self.prompt_tokens + self.new_tokens, *(length + SWEEP_NEW_TOKENS for length in self.contexts)])

    def check(self) -> None:
        """Raises a :class:`ShipwayError` for numbers no benchmark can be made with."""
        for name, value, least in (
            ("rounds", self.rounds, 1),
            ("prompt-tokens", self.prompt_tokens, 1),
            ("new-tokens", self.new_tokens, 2),
            *(("contexts", length, 1) for length in self.contexts),
        ):
            check_whole(f"--{name}", value, least)
        if not self.routes or not self.dtypes:
            raise ShipwayError("name at least one route and one dtype")
        for dtype in self.dtypes:
            check_names(dtype, dtype if self.weights is None else self.weights, self.device)


class Benchmark:
    """One benchmark run; :meth:`run` does it all."""

    def __init__(self, settings: Settings, progress: Callable[[str], None]) -> None:
        """Checks everything that can be checked before anything is loaded.

        Args:
            settings: What to benchmark.
            progress: Is told in a few words what is going on.

        Raises:
            ShipwayError: The settings, the model or a route's name are not usable.
        """
        settings.check()
        self._settings = settings
        self._progress = progress
        self._threads = check_threads(settings.threads)
        self._price = choose_price(self._threads, settings.price)
        infos = [find_route(name) for name in dict.fromkeys(settings.routes)]
        self._checkpoint: Checkpoint = open_checkpoint(resolve(settings.model))
        limit = self._checkpoint.config.max_position_embeddings
        longest = settings.longest()
        if longest > limit:
            raise ShipwayError(
                f"the workload needs a context of {longest} tokens (prompt + new), {settings.model} has {limit}:"
                " lower --prompt-tokens, --new-tokens or --contexts"
            )
        self._verdict_ids = fixed_text_ids(self._checkpoint, min(VERDICT_TOKENS, limit))
        self._prompt = fixed_text_ids(self._checkpoint, settings.prompt_tokens)
        self._sweep = {length: fixed_text_ids(self._checkpoint, length) for length in settings.contexts}
        self._reference: np.ndarray | None = None
        self._base: dict[str, np.ndarray | None] = {}
        self._warnings: list[str] = []
        self._entries: list[Entry] = []
        self._rounds: list[dict[str, float]] = []
        self._probe_samples: list[ProbeSample] = []
        self._ended = 0  # rounds
        self._idle_wait_s = _IDLE_WAITS_S  # what is left of it
        self._contenders: list[Contender] = []
        # The baseline first: reduced precision is judged beside its logits.
        for dtype in dict.fromkeys(settings.dtypes):
            for info in sorted(infos, key=lambda info: info.name != BASELINE):
                self._add(info.name, dtype)

    def run(self) -> Result:
        """Takes the verdicts, the one-time costs and the timed rounds; no worker outlives it.

        Once no route can run or holds its verdict any more, nothing further is measured.

        Raises:
            CacheFullError: A compiler broke for want of room in the cache.
        """
        probe: Worker | None = None
        try:
            if self._contenders:
                self._wait_until_idle("before the first start")
                self._reference = self._reference_logits()
            for contender in self._contenders:
                with self._guard(contender):
                    self._progress(f"{self._name(contender)}: load, verdict, warm up")
                    self._make_room(contender)
                    contender.start([self._prompt, *self._sweep.values()])
                self._park(contender)
            if any(contender.runs for contender in self._contenders):
                probe = self._start_probe()
            for number in range(self._settings.rounds):
                if not any(contender.runs for contender in self._contenders):
                    break
                self._progress(f"round {number + 1} of {self._settings.rounds}")
                self._rounds.append({"round": number, "busy_share": self._wait_until_idle(f"round {number + 1}")})
                if number % 2:
                    self._probe_samples += self._probe(probe, number)
                    self._round(number, self._contenders[::-1])
                else:
                    self._round(number, self._contenders)
                    self._probe_samples += self._probe(probe, number)
                self._ended = number + 1
        finally:
            for contender in self._contenders:
                contender.close()
            if probe is not None:
                probe.close()
        return self._result()

    def stopped(self) -> Result | None:
        """Returns what a run that did not return leaves: the rounds that ended, no others; ``None`` without any."""
        if not self._ended:
            return None
        del self._rounds[self._ended :]
        self._probe_samples = [sample for sample in self._probe_samples if sample["round"] < self._ended]
        for entry in self._entries:
            entry["samples"] = [sample for sample in entry["samples"] if sample["round"] < self._ended]
            entry["sweep"] = [sample for sample in entry["sweep"] if sample["round"] < self._ended]
        result = self._result()
        result["workload"]["rounds"] = self._ended
        if self._ended < self._settings.rounds:
            result["stopped"] = {"planned_rounds": self._settings.rounds}
        return result

    def _add(self, name: str, dtype: str) -> None:
        settings, config = self._settings, self._checkpoint.config
        info = find_route(name)
        weights = dtype if settings.weights is None else settings.weights
        reason = info.why_not(dtype, weights, settings.device)
        new_tokens = settings.new_tokens
        entry: Entry = {
            "route": name,
            "dtype": dtype,
            "weights": weights,
            "status": "ok" if reason is None else "not run",
            "reason": reason,
            "verdict": None,
            "starts": [],
            "install_bytes": install_bytes(info.requires) if reason is None else None,
            "lock_in": lock_in(info.name),
            "peak_memory_bytes": None,
            "cold_peak_memory_bytes": None,
            "decode_bytes": 0.0,
            "prefill_flops": float(limits.prefill_flops(config, settings.prompt_tokens)),
            "ids": [],
            "samples": [],
            "sweep": [],
            "sweep_decode_bytes": {},
        }
        self._entries.append(entry)
        if reason is not None:
            return
        entry["decode_bytes"] = limits.decode_bytes(config, dtype, weights, settings.prompt_tokens, new_tokens)
        entry["sweep_decode_bytes"] = {
            str(length): limits.decode_bytes(config, dtype, weights, length, SWEEP_NEW_TOKENS) for length in self._sweep
        }
        max_context = max(settings.longest(), len(self._verdict_ids))
        spec = RunSpec(str(self._checkpoint.path), dtype, weights, settings.device, self._threads, max_context)
        estimate = limits.resident_bytes(config, dtype, weights, max_context) + _RUNTIME_BYTES
        self._contenders.append(
            Contender(
                info=info,
                spec=spec,
                entry=entry,
                judge=lambda logits: self._judge(name, dtype, logits),
                verdict_tokens=self._verdict_ids,
                timeout_s=settings.timeout_s,
                resident_bytes=estimate,
            )
        )

    def _reference_logits(self) -> np.ndarray:
        self._progress("float64 reference logits of the fixed text")
        return cached_reference_logits(self._checkpoint, np.array(self._verdict_ids, np.int32), self._warn)

    def _wait_until_idle(self, when: str) -> float:
        """Waits for an idle machine as long as that is worth it; returns the busy share, and warns of it."""
        begin = time.monotonic()
        busy = wait_until_idle(min(_IDLE_WAIT_S, self._idle_wait_s))
        self._idle_wait_s = max(self._idle_wait_s - (time.monotonic() - begin), 0.0)
        if busy > IDLE_BUSY_SHARE:
            self._warn(f"{when}: {busy:.0%} of the CPU was in use by others")
        return busy

    def _judge(self, name: str, dtype: str, logits: np.ndarray) -> Verdict:
        assert self._reference is not None
        base = None
        if name == BASELINE:
            self._base[dtype] = logits
        elif dtype != "f32":  # float32 is judged against the reference alone
            if dtype not in self._base:
                self._base[dtype] = self._baseline_logits(dtype)
            base = self._base[dtype]
        return judge_route(logits, self._reference, base, np.array(self._verdict_ids, np.int32), dtype)

    def _baseline_logits(self, dtype: str) -> np.ndarray | None:
        """Logits of plain PyTorch in ``dtype`` when the baseline is not among the routes, ``None`` without torch."""
        info = find_route(BASELINE)
        if (reason := info.why_not(dtype, dtype, "cpu")) is not None:
            self._warn(f"{dtype} was judged without plain PyTorch beside it: {BASELINE} {reason}")
            return None
        context = len(self._verdict_ids)
        try:
            with Worker(info, self._threads, timeout_s=self._settings.timeout_s) as worker:
                worker.prepare(RunSpec(str(self._checkpoint.path), dtype, dtype, "cpu", self._threads, context))
                logits: np.ndarray = worker.call("score", tokens=self._verdict_ids)
                return logits
        except ShipwayError as error:
            self._warn(f"{dtype} was judged without plain PyTorch beside it: {error}")
            return None

    def _round(self, number: int, order: list[Contender]) -> None:
        """Times every route once, in ``order``; the others are stopped meanwhile."""
        for position, contender in enumerate(order):
            with self._guard(contender):
                if not contender.runs:
                    continue
                if contender.worker is None:  # it had to make room: the verdict is taken again in the new process
                    self._make_room(contender)
                    contender.start([self._prompt, *self._sweep.values()])
                    if not contender.runs:
                        continue
                assert contender.worker is not None
                contender.worker.resume()
                sample = contender.time_run(self._prompt, self._settings.new_tokens, number, position)
                contender.entry["samples"].append(sample)
                for prompt in self._sweep.values():
                    contender.entry["sweep"].append(contender.time_run(prompt, SWEEP_NEW_TOKENS, number, position))
                contender.record_memory()
            self._park(contender)

    def _park(self, contender: Contender) -> None:
        """Stops a worker that may run again, ends one that has failed."""
        if contender.runs and contender.worker is not None:
            contender.worker.pause()
        elif not contender.runs:
            contender.close()

    def _make_room(self, contender: Contender) -> None:
        """Ends other workers, largest ones first, until ``contender`` fits in memory."""
        needed = contender.resident_bytes + _KEPT_FREE_BYTES
        others = [other for other in self._contenders if other.worker is not None and other is not contender]
        for other in sorted(others, key=lambda other: -other.resident_bytes):
            if memory_available() >= needed:
                return
            self._progress(f"{self._name(other)} makes room in memory")
            other.close()

    @contextmanager
    def _guard(self, contender: Contender) -> Iterator[None]:
        """Turns a route's failure into its entry's status, so that the other routes' results stand.

        One that never started and said why has not run; one that broke, or refused a call later, has failed. A full
        cache ends the benchmark: it is the user's to cure, and every route that compiles would run into it.
        """
        try:
            yield
        except CacheFullError:
            raise
        except ShipwayError as error:
            refused = not isinstance(error, WorkerError) and not contender.entry["starts"]
            contender.entry["status"] = "not run" if refused else "failed"
            contender.entry["reason"] = str(error)
            contender.close()

    def _start_probe(self) -> Worker | None:
        self._progress("probes of this machine's limits")
        probe = None
        try:
            probe = Worker(PROBE, self._threads, timeout_s=self._settings.timeout_s)
            probe.call("start", threads=self._threads)
        except ShipwayError as error:
            self._warn(f"no % of limit: {error}")
            if probe is not None:
                probe.close()
            return None
        probe.pause()
        return probe

    def _probe(self, probe: Worker | None, number: int) -> list[ProbeSample]:
        if probe is None:
            return []
        probe.resume()
        try:
            samples: list[ProbeSample] = [
                {"round": number, "pattern": one["pattern"], "kind": one["kind"], "value": one["value"]}
                for one in probe.call("measure")
            ]
        except ShipwayError as error:
            self._warn(f"round {number + 1} has no % of limit: {error}")
            return []
        probe.pause()
        return samples

    def _warn(self, line: str) -> None:
        self._warnings.append(line)
        self._progress(f"warning: {line}")

    @staticmethod
    def _name(contender: Contender) -> str:
        return f"{contender.info.name} {contender.spec.dtype}"

    def _result(self) -> Result:
        settings, config = self._settings, self._checkpoint.config
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "bench",
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "environment": cast(Environment, describe_environment(self._threads)),
            "workload": {
                "model": settings.model,
                "architecture": config.architecture,
                "parameters": config.parameters,
                "prompt_tokens": settings.prompt_tokens,
                "new_tokens": settings.new_tokens,
                "batch": 1,
                "rounds": settings.rounds,
                "contexts": list(settings.contexts),
                "sweep_new_tokens": SWEEP_NEW_TOKENS,
                "verdict_tokens": len(self._verdict_ids),
                "device": settings.device,
                "baseline": BASELINE,
            },
            "price": cast(PriceRow, dataclasses.asdict(self._price)),
            "rounds": self._rounds,
            "probes": self._probe_samples,
            "entries": self._entries,
            "warnings": self._warnings,
        }
