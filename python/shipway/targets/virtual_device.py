"""Compiles a MAX graph for a GPU that is not there: ``python -m shipway.targets.virtual_device FOLDER``.

Virtual devices belong to a process, so this is a program of its own. FOLDER holds ``request.pickle``, a
:class:`Request`; the program leaves the compiled ``graph.mef`` there, and ``launches.json``, which has what the graph
compiler made one launch of, in order: its summary per launch, such as ``Elementwise(mo.mul, mo.add)``. Where the graph
does not compile it leaves the message in ``error`` and exits with 1.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

REQUEST, MEF, LAUNCHES, ERROR = "request.pickle", "graph.mef", "launches.json", "error"
_SUMMARY = re.compile(r'"mgp\.generic\.execute".*?\bdSummary = "([^"]*)"')
_HOST = ("index.", "kgen.", "mef.", "mgp.", "pop.", "rmo.")
"""Dialects of what a summary lists besides launches: shapes and memory, worked out on the host."""


@dataclass(frozen=True)
class Request:
    """A graph to compile.

    Attributes:
        build: ``"module:function"`` that returns the graph, given a device and the arguments.
        arguments: The function's further arguments.
        api: ``"cuda"`` or ``"hip"``.
        arch: The target, such as ``"sm_90a"``.
    """

    build: str
    arguments: tuple[Any, ...]
    api: str
    arch: str


def launches(mlir: str) -> list[str]:
    """Returns the summaries of what a compiled graph launches, in the order of the program.

    Args:
        mlir: The graph as the compiler leaves it before it generates code.
    """
    return [item for summary in _SUMMARY.findall(mlir) for item in _items(summary) if not item.startswith(_HOST)]


def _items(summary: str) -> list[str]:
    """The parts of ``Sequence(a, b(c, d))``: a and b(c, d); of anything else itself."""
    if not summary.startswith("Sequence("):
        return [summary]
    parts, depth, start = [], 0, len("Sequence(")
    for place in range(start, len(summary)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(summary[place], 0)
        if depth < 0 or (depth == 0 and summary[place] == ","):
            parts.append(summary[start:place].strip())
            start = place + 1
    return [part for item in parts for part in _items(item)]


def compile_here(folder: Path) -> None:
    """Compiles the request in ``folder``."""
    request: Request = pickle.loads((folder / REQUEST).read_bytes())
    from max.driver import (
        Accelerator,
        set_virtual_device_api,
        set_virtual_device_count,
        set_virtual_device_target_arch,
    )

    set_virtual_device_api(request.api)
    set_virtual_device_target_arch(request.arch)
    set_virtual_device_count(1)
    from max.engine import InferenceSession
    from max.graph import DeviceRef

    module, _, function = request.build.partition(":")
    graph = getattr(import_module(module), function)(DeviceRef.GPU(0), *request.arguments)
    session = InferenceSession(devices=[Accelerator(0)])
    with tempfile.TemporaryDirectory(dir=folder) as intermediate:  # hundreds of megabytes
        session.debug.ir_output_dir = intermediate
        session.compile(graph).export_mef(folder / MEF)
        (program,) = Path(intermediate).glob("*.mgp.mlir")
        (folder / LAUNCHES).write_text(json.dumps(launches(program.read_text())))


if __name__ == "__main__":
    try:
        compile_here(Path(sys.argv[1]))
    except Exception as error:  # whatever a graph builder or a compiler raises is the answer
        Path(sys.argv[1], ERROR).write_text(str(error.__cause__ or error))
        sys.exit(1)
