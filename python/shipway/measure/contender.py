"""One route in one dtype during a benchmark: its worker, its verdict, its one-time cost and its timed runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from shipway.client import Worker
from shipway.measure.result import Entry, Sample, Start, Verdict
from shipway.routes.route import RouteInfo, RunSpec

_WARM_UP_TOKENS = 8


@dataclass
class Contender:
    """A route, its arguments, what is recorded of it, and its worker while it has one.

    Attributes:
        info: The route.
        spec: What it loads.
        entry: Its part of the result.
        judge: Takes logits ``[S, vocab_size]`` of ``verdict_tokens``; returns the verdict's fields.
        verdict_tokens: Ids the verdict is taken on.
        timeout_s: Seconds a call may take.
        resident_bytes: Memory the worker takes: an estimate until it has been measured.
    """

    info: RouteInfo
    spec: RunSpec
    entry: Entry
    judge: Callable[[np.ndarray], Verdict]
    verdict_tokens: list[int]
    timeout_s: float
    resident_bytes: int
    worker: Worker | None = field(default=None, init=False)

    @property
    def runs(self) -> bool:
        """Whether nothing has failed so far."""
        return self.entry["status"] == "ok"

    def start(self, prompts: list[list[int]]) -> None:
        """Loads the route, takes its verdict in this very process, and warms up on ``prompts`` if it holds.

        A route that compiles in its first start is started once more, with a full cache: what a start costs from then
        on is recorded, and memory taken by a compiler is not in the peak of the process that is judged and timed.
        """
        self.worker, started = self._launch()
        if not self.entry["starts"]:
            self.entry["starts"].append(started)
            if started["compile_cold"]:
                self.entry["cold_peak_memory_bytes"] = self.worker.call("peak_memory")["peak"]
                self.close()
                self.worker, started = self._launch()
                self.entry["starts"].append(started)
        verdict = self.judge(self.worker.call("score", tokens=self.verdict_tokens))
        self.entry["verdict"] = verdict
        if not verdict["ok"]:
            self.entry["status"] = "fail"
            self.entry["reason"] = verdict["reason"]
            return
        for prompt in prompts:
            self.worker.call("run", tokens=[prompt], new_tokens=_WARM_UP_TOKENS)
        self.record_memory()

    def time_run(self, prompt: list[int], new_tokens: int, round_number: int, position: int) -> Sample:
        """Times one prefill and ``new_tokens - 1`` decodes."""
        assert self.worker is not None
        run = self.worker.call("run", tokens=[prompt], new_tokens=new_tokens)
        self.entry["ids"] = self.entry["ids"] or [step[0] for step in run["ids"]]
        times = [time - run["start"] for time in run["times"]]
        return {"round": round_number, "position": position, "prompt_tokens": len(prompt), "times": times}

    def close(self) -> None:
        """Ends the worker."""
        if self.worker is not None:
            worker, self.worker = self.worker, None
            worker.close()

    def record_memory(self) -> None:
        """Records the resident memory of the worker, now and at its peak."""
        assert self.worker is not None
        memory = self.worker.call("peak_memory")
        self.resident_bytes = memory["resident"]
        self.entry["peak_memory_bytes"] = max(memory["peak"], self.entry["peak_memory_bytes"] or 0)

    def _launch(self) -> tuple[Worker, Start]:
        begin = perf_counter()
        worker = Worker(self.info, self.spec.threads, self.timeout_s)
        try:
            prepared = worker.prepare(self.spec)
        except BaseException:
            worker.close()
            raise
        fields = dataclasses.asdict(prepared) | {"notes": list(prepared.notes)}
        del fields["artefact_path"]  # of this machine alone
        started: Start = {"total_s": perf_counter() - begin, **fields}  # type: ignore[typeddict-item]
        return worker, started
