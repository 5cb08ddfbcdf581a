"""What a route is: the facts it states, and the calls a worker makes on it.

A route runs in a process of its own (``shipway.worker``). Importing this module costs nothing but the standard
library and numpy; a route's own compiler is imported inside :meth:`Route.prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class RunSpec:
    """What a worker is asked to load.

    Attributes:
        model: Path of a checkpoint (directory or GGUF file), already resolved.
        dtype: Activation and KV cache dtype, ``"f32"`` or ``"bf16"``.
        weights: Storage format of the matrices, ``"f32"``, ``"bf16"`` or ``"f16"``.
        device: ``"cpu"``, later ``"cuda:0"``, ``"hip:0"``.
        threads: CPU threads the route may use.
        max_context: Tokens the KV cache holds per sequence, prompt and new ones together.
        max_batch: Sequences the KV cache holds.
        compiled: Directory of a compiled artefact made for this machine; ``None`` to use the artefact cache.
    """

    model: str
    dtype: str
    weights: str
    device: str = "cpu"
    threads: int = 1
    max_context: int = 1024
    max_batch: int = 1
    compiled: str | None = None


@dataclass(frozen=True)
class Prepared:
    """What :meth:`Route.prepare` did: seconds and bytes of the one-time cost.

    Attributes:
        load_s: Seconds spent mapping and converting weights.
        import_s: Seconds spent importing the route's own packages.
        compile_s: Seconds from graph construction to a callable model (0 for eager routes).
        compile_cold: Whether anything was compiled; ``False`` means the artefact cache answered.
        cold_compile_s: Seconds the compilation took when it was cold, now or on ``cold_date``; ``None`` if unknown.
        cold_date: ISO date of that compilation.
        artefact_bytes: Size on disk of what was compiled for this model.
        artefact_path: Its directory.
        notes: Short facts to print (mode of the compiler and the like).
    """

    load_s: float
    import_s: float
    compile_s: float
    compile_cold: bool
    cold_compile_s: float | None = None
    cold_date: str | None = None
    artefact_bytes: int = 0
    artefact_path: str | None = None
    notes: tuple[str, ...] = ()


class Route(Protocol):
    """The calls a worker makes, always from one thread. Token ids are int32, logits float32."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint and compiles what the route compiles."""

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Appends ``tokens [B, S]`` to the KV cache; returns the greedy next ids ``[B]``."""

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Appends one token per sequence, ``[B]``; returns the greedy next ids ``[B]``."""

    def logits(self) -> np.ndarray:
        """Logits ``[B, vocab_size]`` of the last prefill or decode."""

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Teacher-forced logits ``[S, vocab_size]`` of ``tokens [S]``, from an empty cache; leaves it empty."""

    def reset(self) -> None:
        """Forgets every sequence."""

    def close(self) -> None:
        """Frees what the route holds."""


@dataclass(frozen=True)
class RouteInfo:
    """The facts a route states before anything is loaded.

    Attributes:
        name: As typed by the user (``"mojo-graph"``).
        pole: Who chooses the schedule: ``whole-language``, ``eager``, ``heuristic``, ``search``, ``closed``.
        rung: How kernels execute: ``eager``, ``graph`` or ``persistent``.
        factory: ``"module:callable"`` that makes the :class:`Route`, imported in the worker only.
        devices: Device kinds, ``("cpu",)``.
        dtypes: Activation dtypes.
        weight_formats: Storage formats of the matrices.
        ships: ``shipway compile`` can put its artefact into a directory that starts without compiling.
        own_dtype_only: The matrices are stored in the activation dtype, whatever :attr:`weight_formats` lists.
        requires: Importable top-level modules the route needs.
        remedy: The command that installs what :attr:`requires` names.
        summary: One line for ``shipway routes``.
    """

    name: str
    pole: str
    rung: str
    factory: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    weight_formats: tuple[str, ...]
    requires: tuple[str, ...]
    remedy: str
    summary: str
    ships: bool = False
    own_dtype_only: bool = False

    def why_not(self, dtype: str, weights: str, device: str) -> str | None:
        """Returns why the route cannot run with these arguments here and what would make it run, or ``None``."""
        kind = device.split(":")[0]
        if kind not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}: pass --device {self.devices[0]}"
        if dtype not in self.dtypes:
            return f"has no dtype {dtype}: pass --dtype {','.join(self.dtypes)}"
        if weights not in self.weight_formats:
            return f"has no weight format {weights}: pass --weights {'|'.join(self.weight_formats)}"
        if self.own_dtype_only and weights != dtype:
            return f"stores weights in the activation dtype: leave --weights out, or pass --dtype {weights}"
        missing = [name for name in self.requires if find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}: {self.remedy}"
        return None
