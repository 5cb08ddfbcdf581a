"""Campaign lines in child processes, one for each implementation: thread pools do not meet, and a kernel that kills its
process costs one line."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

from shipway.numerics.campaign import Failure, Line, Plan, run_line
from shipway.ops.catalogue import OPS
from shipway.ops.op import Implementation

Task = tuple[str, str, str]
"""Names of op, implementation and dtype."""

SILENCE_S = 900.0
"""Seconds that one compilation or one case may take."""

POISON = {"MALLOC_PERTURB_": "128"}
"""Fills what glibc allocates with bytes 0x7f, numbers near 3e38: an output that is not written is not right by luck."""


def run_lines(todo: Sequence[Task], plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
    """Runs the lines of ``todo``, those of one implementation after each other; ``show`` is told what is running.

    Simulated devices, which use one thread each, run at the same time, as many as there are CPUs; others, whose pools
    take all CPUs, one by one.

    Returns:
        The lines as they end.
    """
    groups = [list(group) for _, group in groupby(todo, key=lambda task: task[1])]
    for simulated, some in groupby(groups, key=lambda group: _row(*group[0]).device == "simulated"):
        yield from _side_by_side(deque(some), len(os.sched_getaffinity(0)) if simulated else 1, plan, show)


def _side_by_side(waiting: deque[list[Task]], most: int, plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(_Child(waiting.popleft(), plan, show))
            patience = SILENCE_S - max(child.silent_s() for child in running)
            heard = wait([child.pipe for child in running], timeout=max(0.0, patience))
            for child in list(running):
                if child.pipe in heard:
                    line = child.receive()
                elif child.silent_s() >= SILENCE_S:
                    line = child.given_up(f"did not go on for {SILENCE_S:g} s")
                else:
                    continue
                if line is not None:
                    yield line
                    child.go_on()
                if child.over:
                    running.remove(child)
                    child.end()
                    if child.left:
                        waiting.appendleft(list(child.left))
    finally:
        for child in running:
            child.end()


class _Child:
    """A process that runs lines.

    Attributes:
        pipe: Where its messages come from.
        left: Lines that have not ended.
        over: Whether no more will come from it.
    """

    def __init__(self, todo: Sequence[Task], plan: Plan, show: Callable[[str], None]) -> None:
        self.left, self.over = deque(todo), False
        self._show = show
        # A forked child would inherit the pools' locks, not their threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, list(todo), plan), daemon=True)
        with _environment(POISON):  # read by the C library as the child starts
            self._process.start()
        there.close()
        self.go_on()

    def go_on(self) -> None:
        """Takes it to be at its next line, if it has one."""
        self._doing, self._heard = ("compilation", ""), time.monotonic()
        self.over = self.over or not self.left
        if not self.over:
            self._show(", ".join(self.left[0]))

    def silent_s(self) -> float:
        """Seconds since it was last heard of."""
        return time.monotonic() - self._heard

    def receive(self) -> Line | None:
        """Takes its next message; returns the line that it ends, or that ends with the process."""
        try:
            message: Any = self.pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            return self.given_up(f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")
        if isinstance(message, Line):
            self.left.popleft()
            return message
        self._doing, self._heard = message, time.monotonic()
        return None

    def given_up(self, how: str) -> Line:
        """Returns the line it was at, failed: the process ``how``."""
        self.over = True
        op, implementation, dtype = self.left.popleft()
        row = _row(op, implementation, dtype)
        failure = Failure(*self._doing, f"the process {how}")
        return Line(op, implementation, dtype, "FAIL", row.bitwise, row.strided, failures=(failure,))

    def end(self) -> None:
        """Ends the process, one that loops in a kernel answers to nothing less, and the compilers it has started."""
        self._process.kill()
        assert self._process.pid
        with contextlib.suppress(ProcessLookupError):  # it has not come as far as having a group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.pipe.close()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, todo: Sequence[Task], plan: Plan) -> None:
    """The child: sends each property and case as they start, then the line."""
    import torch

    os.setpgid(0, 0)  # what it starts ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    # The base is PyTorch's, its pool and the implementation's both spin: on few cores they would stop each other.
    torch.set_num_threads(1)
    for op, implementation, dtype in todo:
        pipe.send(run_line(OPS[op], OPS[op].implementations[implementation], dtype, plan, pipe.send))


def _row(op: str, implementation: str, _: str) -> Implementation:
    return OPS[op].implementations[implementation]
