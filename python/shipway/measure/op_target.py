"""One implementation of one op in a worker: its verdict, then timed calls of what was judged.

A call is timed from the launch to the result, its arguments checked before. A row's callable that has
``bind(*arguments)`` returns a call on arguments in the implementation's own arrays; any other converts them in every
call.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from shipway.measure.environment import last_level_cache_bytes
from shipway.measure.op_work import INDICES, work_of
from shipway.numerics.campaign import REFERENCE, Plan, properties, run_declared
from shipway.numerics.check import OpRunner, head_dim_of
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case, Implementation, Op, Property

MOST_COPIES = 1 << 14
"""Copies of the arguments in the rotation of a cold cache at most: each costs some microseconds to make."""

_EXAMPLES = 2  # drawn cases of each property
_UNTIMED = 3  # calls before a block of timed ones


class AloneRunner(OpRunner):
    """A runner whose compiled implementation compiles the op asked for and no other."""

    def __init__(self, op: Op, row: Implementation, dtype: str) -> None:
        """Takes ``row`` as it is in the catalogue."""
        super().__init__(op, dataclasses.replace(row, make=row.alone or row.make), dtype)

    def other(self, op: str) -> OpRunner:
        """See :class:`shipway.ops.op.Runner`."""
        return AloneRunner(OPS[op], OPS[op].implementations[self.implementation.name], self.dtype)


class OpTarget:
    """The target of an op's worker."""

    calls = ("prepare", "time")

    def __init__(self) -> None:
        """Nothing is loaded yet."""
        self._calls: dict[str, Iterator[Callable[[], object]]] = {}

    def prepare(
        self, op: str, implementation: str, dtype: str, dims: dict[str, int], threads: int, kernels: str | None
    ) -> dict[str, Any]:
        """Compiles, judges, and makes the calls that :meth:`time` takes.

        Args:
            op: Name of the op.
            implementation: Name of its row.
            dtype: Dtype under test.
            dims: The shape.
            threads: Threads of the implementation.
            kernels: Folder of the Mojo kernels, ``None`` for the package's own.

        Returns:
            Fields of ``shipway.measure.op_bench.Prepared``.
        """
        import torch

        if kernels is not None:
            from shipway.graphs import extension

            extension.KERNELS = Path(kernels)
        self._calls = {}
        row = OPS[op].implementations[implementation]
        torch.set_num_threads(threads)
        runner = AloneRunner(OPS[op], row, dtype)
        inputs = runner.inputs(Case(dims))
        began = perf_counter()
        function = runner.implementation.make(dtype, head_dim_of(inputs))
        load_s = perf_counter() - began
        if implementation != "torch":
            # PyTorch's pool spins after each of its calls: beside another one both would be timed waiting.
            torch.set_num_threads(1)
        verdict = judge(runner, Case(dims))
        work = work_of(op, inputs, dtype)
        call_s = 0.0
        if verdict["ok"]:
            arguments = runner.arguments(inputs)
            copies = self._rotate(op, function, arguments, work.bytes)
            call_s = _seconds(self._calls["warm"], _UNTIMED)[-1]
        else:
            copies = 0
        return {
            "verdict": verdict,
            "load_s": load_s,
            "bytes": work.bytes,
            "flops": work.flops,
            "copies": copies,
            "converts": implementation != "torch" and not hasattr(function, "bind"),
            "call_s": call_s,
        }

    def time(self, cache: str, calls: int) -> list[float]:
        """Returns the seconds of each of ``calls`` calls on a ``"cold"`` or a ``"warm"`` cache."""
        _seconds(self._calls[cache], _UNTIMED)
        return _seconds(self._calls[cache], calls)

    def close(self) -> None:
        """Frees the arguments."""
        self._calls = {}

    def _rotate(self, op: str, function: Callable[..., Any], arguments: dict[str, Any], touched: float) -> int:
        """Makes the warm call and the rotation of cold ones; returns the copies in it, 0 where it cannot be cold."""
        bind = getattr(function, "bind", None) or (lambda *given: lambda: function(*given))
        self._calls["warm"] = itertools.repeat(bind(*arguments.values()))
        beyond = 2 * last_level_cache_bytes()
        copies = max(2, int(-(-beyond // max(touched, 1))) + 1)
        if copies > MOST_COPIES:
            return 0
        rng = np.random.default_rng(0)
        calls = [bind(*_elsewhere(op, arguments, rng, beyond).values()) for _ in range(copies)]
        # In no order of addresses: the hardware would fetch the next call's arguments ahead.
        self._calls["cold"] = itertools.cycle([calls[at] for at in rng.permutation(copies)])
        return copies


def judge(runner: OpRunner, case: Case) -> dict[str, Any]:
    """Judges one implementation: its reference at ``case``, then each property on its pinned and a few drawn cases.

    Stops at the first failure that is not declared.

    Returns:
        Fields of ``shipway.measure.op_bench.Verdict``.
    """
    reason, failed, known = "", "", []
    plan = Plan(examples=_EXAMPLES, head_dims=(case.dims.get("head_dim", 64),))
    held = 0
    for prop in (Property("reference", REFERENCE.check, (case,), pinned=True), *properties(runner.op)):
        failure, seen, ran = run_declared(runner, prop, plan, _EXAMPLES)
        held += len(ran)
        if seen is not None:
            known.append(f"{prop.name}: {seen.reason}")
        if failure is not None:
            failed, reason = prop.name, f"{failure.reason} [{failure.case}]"
            break
    return {
        "ok": not failed,
        "property": failed,
        "reason": reason,
        "known": known,
        "cases": held,
        "max_ulps": runner.max_ulps,
        "cosine_diff": runner.cosine_diff,
    }


def _elsewhere(op: str, arguments: dict[str, Any], rng: np.random.Generator, shared_from: int) -> dict[str, Any]:
    """The same call on other memory. Tensors of ``shared_from`` bytes are shared: a call that reads one whole finds
    none of it in the cache; one that reads a few rows is given other rows."""
    import torch

    copied = {
        name: value.clone() if isinstance(value, torch.Tensor) and value.nbytes < shared_from else value
        for name, value in arguments.items()
    }
    if op in INDICES:
        rows, array = INDICES[op]
        drawn = rng.integers(0, len(arguments[array]), len(arguments[rows]))
        copied[rows] = torch.from_numpy(drawn.astype(np.int32))
    return copied


def _seconds(calls: Iterator[Callable[[], object]], count: int) -> list[float]:
    import torch

    samples = []
    with torch.inference_mode():
        for _ in range(count):
            call = next(calls)
            before = perf_counter()
            call()
            samples.append(perf_counter() - before)
    return samples
