"""Campaign lines in child processes, one for each implementation: thread pools do not meet, and a kernel that kills its
process costs one line."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

from shipway.numerics.campaign import Failure, Line, Plan, run_line
from shipway.ops.catalogue import OPS

Task = tuple[str, str, str]
"""Names of op, implementation and dtype."""

SILENCE_S = 900.0
"""Seconds that one compilation or one case may take."""

POISON = {"MALLOC_PERTURB_": "128"}
"""Fills what glibc allocates with bytes 0x7f, numbers near 3e38: an output that is not written is not right by luck."""


def run_lines(todo: Sequence[Task], plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
    """Runs the lines of ``todo``, those of one implementation after each other; ``show`` is told what is running."""
    for _, group in groupby(todo, key=lambda task: task[1]):
        waiting = list(group)
        while waiting:
            done = 0
            for line in _child(waiting, plan, show):
                done += 1
                yield line
            waiting = waiting[done:]


def _child(todo: Sequence[Task], plan: Plan, show: Callable[[str], None]) -> Iterator[Line]:
    """The lines of one child process; if it dies, the last one says so and the rest of ``todo`` is not run."""
    context = multiprocessing.get_context("spawn")  # a forked child would inherit the pools' locks, not their threads
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, list(todo), plan), daemon=True)
    with _environment(POISON):  # read by the C library as the child starts
        child.start()
    there.close()
    doing = ("compilation", "")
    try:
        for op, implementation, dtype in todo:
            show(f"{op}, {implementation}, {dtype}")
            doing = ("compilation", "")
            while True:
                try:
                    if not here.poll(SILENCE_S):
                        yield _dead(op, implementation, dtype, doing, f"did not go on for {SILENCE_S:g} s")
                        return
                    message: Any = here.recv()
                except EOFError:
                    child.join()
                    code = child.exitcode or 0
                    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                    yield _dead(op, implementation, dtype, doing, how)
                    return
                if isinstance(message, Line):
                    yield message
                    break
                doing = message
    finally:
        child.kill()  # one that loops in a kernel answers to nothing less
        child.join()


@contextmanager
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    # The base is PyTorch's, its pool and the implementation's both spin: on few cores they would stop each other.
    torch.set_num_threads(1)
    for op, implementation, dtype in todo:
        pipe.send(run_line(OPS[op], OPS[op].implementations[implementation], dtype, plan, pipe.send))


def _dead(op: str, implementation: str, dtype: str, doing: tuple[str, str], how: str) -> Line:
    row = OPS[op].implementations[implementation]
    failure = Failure(*doing, f"the process {how}")
    return Line(op, implementation, dtype, "FAIL", row.bitwise, row.strided, failures=(failure,))
