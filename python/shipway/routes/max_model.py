"""Arrays as MAX buffers, graphs as MAX models: what every route through MAX does. MAX itself is imported lazily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shipway.artefacts import Artefact, artefact, cpu_target, shipped

if TYPE_CHECKING:
    from max.driver import Buffer
    from max.engine import InferenceSession, Model
    from max.graph import Graph

_FILE = "decoder.mef"


def wrap(array: np.ndarray, format: str) -> Buffer:
    """Wraps an array as a MAX buffer without copying; bf16 arrives as its bits."""
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_numpy(array)
    return buffer.view(DType.bfloat16) if format == "bf16" else buffer


def wrap_weights(placed: Mapping[str, np.ndarray], matrices: str) -> dict[str, Buffer]:
    """Wraps weights, matrices in the given format and vectors in f32; the buffers hold on to the arrays."""
    return {name: wrap(array, matrices if array.ndim == 2 else "f32") for name, array in placed.items()}


def load_model(
    session: InferenceSession,
    kind: str,
    parts: Mapping[str, Any],
    build: Callable[[], Graph],
    weights: Mapping[str, Buffer],
    compiled: str | None = None,
) -> tuple[Model, Artefact]:
    """Compiles a graph, or takes it from ``compiled`` or the artefact cache, and binds its external weights.

    Args:
        session: Where it runs.
        kind: What it is, such as the route's name.
        parts: What the compiled graph depends on, beside the CPU and MAX.
        build: Makes the graph.
        weights: By name; they are read in place.
        compiled: Directory of a shipped artefact.

    Raises:
        ShipwayError: The directory is not one of these parts, or the cache cannot be written.
    """

    def write(directory: Path) -> None:
        session.compile(build()).export_mef(directory / _FILE)

    parts = dict(parts) | {"target": cpu_target(), "max": version("max")}
    made = shipped(Path(compiled), kind, parts) if compiled else artefact(kind, parts, write)
    return session.init(session.compile(made.path / _FILE), weights_registry=dict(weights)), made
