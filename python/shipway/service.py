"""Answers a worker's messages by calling its route.

Request: ``{"call": NAME, ...arguments}``. Reply: ``{"ok": value}``, or ``{"error": line, "kind": kind}`` where kind is
``"user"`` or ``"cannot run"`` (a :class:`ShipwayError` or :class:`CannotRunError`, raised again unchanged in the
driver) or ``"crash"`` (any other exception; its traceback goes to stderr). ``generate`` sends one
``{"token": id, "finish": reason or null}`` per token before its reply. ``stop`` ends a generation and has no reply.

| call | arguments | value |
|---|---|---|
| prepare | spec: fields of RunSpec | fields of Prepared |
| prefill | tokens [B, S] | greedy ids [B] |
| decode | tokens [B] | greedy ids [B] |
| logits | | float32 [B, vocab_size] of the last prefill or decode |
| score | tokens [S] | float32 [S, vocab_size] |
| run | tokens [B, S], new_tokens | ids [new_tokens][B], start and times [new_tokens] in seconds |
| generate | tokens [S], max_new, vocab, stop_ids, sampling | reason |
| peak_memory | | peak and resident bytes |
| reset, close | | null |

A target may list further call names in its attribute ``calls``; they are called with the message's arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from shipway.channel import Channel, ChannelClosed
from shipway.errors import CannotRunError, ShipwayError
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import RunSpec
from shipway.sampler import Sampler, Sampling


def load_target(route: str) -> Any:
    """Makes the route named ``route`` (a catalogue name, or ``module:callable``)."""
    factory = route if ":" in route else ROUTES[route].factory
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)()


def memory_use() -> dict[str, int]:
    """Returns peak and present resident memory of this process, bytes (``VmHWM`` and ``VmRSS`` of Linux)."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "peak": int(fields["VmHWM"].split()[0]) * 1024,
        "resident": int(fields["VmRSS"].split()[0]) * 1024,
    }


class Service:
    """The message loop of one worker."""

    def __init__(self, route: str, channel: Channel) -> None:
        """Serves ``route`` over ``channel``; the route itself is imported at the first message."""
        self._route_name = route
        self._channel = channel
        self._target: Any = None

    def serve(self) -> None:
        """Answers messages until ``close`` or until the driver is gone."""
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed:
                return
            if message["call"] == "stop":  # came after its generation had ended
                continue
            reply = self._answer(message)
            try:
                self._channel.send(reply)
            except ChannelClosed:
                return
            if message["call"] == "close":
                return

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(message)
        call = arguments.pop("call")
        try:
            if self._target is None and call != "close":
                self._target = load_target(self._route_name)
            return {"ok": self._handler(call)(**arguments)}
        except ShipwayError as error:
            cannot_run = isinstance(error, CannotRunError)
            return {"kind": "cannot run" if cannot_run else "user", "error": str(error)}
        except Exception as error:
            trace = traceback.format_exc()
            os.write(2, trace.encode())  # stderr is the worker's log file
            first_line = (str(error).strip() or "no message").splitlines()[0]
            return {"kind": "crash", "error": f"{type(error).__name__}: {first_line}"}

    def _handler(self, call: str) -> Callable[..., Any]:
        if call in getattr(self._target, "calls", ()):
            handler: Callable[..., Any] = getattr(self._target, call)
            return handler
        handlers: dict[str, Callable[..., Any]] = {
            "prepare": self._prepare,
            "prefill": lambda tokens: self._target.prefill(np.array(tokens, np.int32)).tolist(),
            "decode": lambda tokens: self._target.decode(np.array(tokens, np.int32)).tolist(),
            "logits": lambda: self._target.logits(),
            "score": lambda tokens: self._target.score(np.array(tokens, np.int32)),
            "run": self._run,
            "generate": self._generate,
            "peak_memory": memory_use,
            "reset": lambda: self._target.reset(),
            "close": lambda: self._target.close() if self._target is not None else None,
        }
        return handlers[call]

    def _prepare(self, spec: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = dataclasses.asdict(self._target.prepare(RunSpec(**spec)))
        return prepared

    def _run(self, tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Prefill and ``new_tokens - 1`` greedy decodes, EOS ignored; a time is taken when each token is chosen."""
        prompt = np.array(tokens, np.int32)
        self._target.reset()
        start = perf_counter()
        chosen = self._target.prefill(prompt)
        times, ids = [perf_counter()], [chosen]
        for _ in range(new_tokens - 1):
            chosen = self._target.decode(chosen)
            times.append(perf_counter())
            ids.append(chosen)
        self._target.reset()
        return {"start": start, "times": times, "ids": [step.tolist() for step in ids]}

    def _generate(
        self, tokens: list[int], max_new: int, vocab: int, stop_ids: list[int], sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Streams one sequence; ends at an id of ``stop_ids``, at ``max_new``, or when the driver sends ``stop``."""
        sampler = Sampler(Sampling(**sampling), vocab)
        self._target.reset()
        greedy = self._target.prefill(np.array([tokens], np.int32))
        for count in range(1, max_new + 1):
            token = int(greedy[0])
            if not sampler.is_greedy or token >= vocab:
                token = sampler.choose(self._target.logits()[0])
            reason = "eos" if token in stop_ids else "length" if count == max_new else None
            self._channel.send({"token": token, "finish": reason})
            if reason is not None:
                return {"reason": reason}
            if self._channel.ready() and self._channel.receive()["call"] == "stop":
                return {"reason": "stop"}
            greedy = self._target.decode(np.array([token], np.int32))
        return {"reason": "length"}
