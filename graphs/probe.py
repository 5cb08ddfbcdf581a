"""The op ``probe_read`` as a call: how fast this machine reads memory, by our own kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from shipway.artefacts import artefact, cpu_target
from shipway.graphs import ops
from shipway.graphs.extension import kernels_extension, source_hash


def load_probe_read(memory: np.ndarray) -> Callable[[], object]:
    """Returns a call that reads ``memory``, float32 and contiguous, once on all threads of MAX's pool."""
    session = InferenceSession(devices=[CPU()])

    def build(directory: Path) -> None:
        types = [TensorType(DType.float32, ["n"], DeviceRef.CPU())]
        with Graph("probe_read", input_types=types, custom_extensions=[kernels_extension()]) as graph:
            graph.output(ops.probe_read(graph.inputs[0].tensor))
        session.compile(graph).export_mef(directory / "probe.mef")

    made = artefact("probe", {"sources": source_hash(), "target": cpu_target(), "max": version("max")}, build)
    model = session.init(session.compile(made.path / "probe.mef"))
    buffer = Buffer.from_numpy(memory.reshape(-1))
    return lambda: model.execute(buffer)
