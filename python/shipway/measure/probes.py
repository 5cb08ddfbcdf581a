"""The machine's own limits: read bandwidth and GEMM peak, measured by several patterns, the best taken.

A probe is a ceiling only until something beats it, so there are several and :data:`PATTERNS` is meant to grow. They run
in a worker of their own, between the routes of every round and on the same threads, because the limit itself moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from shipway.errors import this_python
from shipway.measure.environment import last_level_cache_bytes, memory_available
from shipway.routes.route import RouteInfo

READ, GEMM_F32, GEMM_BF16 = "read bytes/s", "f32 GEMM FLOP/s", "bf16 GEMM FLOP/s"
GEMM_KIND = {"f32": GEMM_F32, "bf16": GEMM_BF16}
SECONDS_PER_PATTERN = 0.2
_COLUMNS = 4096  # of the matrix in the matrix-vector patterns

PROBE = RouteInfo(
    name="probe",
    pole="none",
    rung="eager",
    factory="shipway.measure.probes:Probe",
    devices=("cpu",),
    dtypes=("f32", "bf16"),
    weight_formats=("f32", "bf16"),
    requires=("torch", "max", "mojo"),
    remedy=this_python("-m pip install torch==2.13.0 max==26.7.0 mojo==1.2.0"),
    summary="read bandwidth and GEMM peak of this machine",
)


@dataclass(frozen=True)
class Pattern:
    """One way to approach a limit.

    Attributes:
        name: What is printed.
        kind: The limit, :data:`READ`, :data:`GEMM_F32` or :data:`GEMM_BF16`.
        prepare: Returns a call and the bytes or FLOPs of one such call.
    """

    name: str
    kind: str
    prepare: Callable[[], tuple[Callable[[], object], float]]


@cache
def _buffer() -> np.ndarray:
    """Float32 matrix ``[rows, 4096]`` of at least eight last-level caches, so that every pass reads memory."""
    size = min(max(512 << 20, 8 * last_level_cache_bytes()), memory_available() // 8)
    return np.ones((max(size // (4 * _COLUMNS), 1), _COLUMNS), np.float32)


def _torch_sum() -> tuple[Callable[[], object], float]:
    import torch

    matrix = torch.from_numpy(_buffer())
    return matrix.sum, _buffer().nbytes


def _torch_dot() -> tuple[Callable[[], object], float]:
    import torch

    first, second = torch.from_numpy(_buffer()).flatten().chunk(2)
    size = 4 * min(first.numel(), second.numel())
    return lambda: torch.dot(first[: size // 4], second[: size // 4]), 2 * size


def _torch_gemv(dtype_name: str) -> Callable[[], tuple[Callable[[], object], float]]:
    def prepare() -> tuple[Callable[[], object], float]:
        import torch

        dtype = getattr(torch, dtype_name)
        matrix = torch.from_numpy(_buffer()).view(dtype)
        vector = torch.ones(matrix.shape[1], dtype=dtype)
        return lambda: torch.mv(matrix, vector), _buffer().nbytes

    return prepare


def _mojo_read() -> tuple[Callable[[], object], float]:
    from shipway.graphs.probe import load_probe_read

    return load_probe_read(_buffer()), _buffer().nbytes


def _torch_gemm(dtype_name: str, m: int, n: int, k: int) -> Callable[[], tuple[Callable[[], object], float]]:
    def prepare() -> tuple[Callable[[], object], float]:
        import torch

        dtype = getattr(torch, dtype_name)
        # As a linear layer computes: activations times the transposed weight matrix.
        activations, weights = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
        return lambda: torch.nn.functional.linear(activations, weights), 2.0 * m * n * k

    return prepare


PATTERNS = [
    Pattern("mojo read f32", READ, _mojo_read),
    Pattern("torch sum f32", READ, _torch_sum),
    Pattern("torch dot f32", READ, _torch_dot),
    Pattern("torch GEMV f32", READ, _torch_gemv("float32")),
    Pattern("torch GEMV bf16", READ, _torch_gemv("bfloat16")),
    Pattern("torch GEMM f32 2048x2048x2048", GEMM_F32, _torch_gemm("float32", 2048, 2048, 2048)),
    Pattern("torch GEMM f32 512x4096x1024", GEMM_F32, _torch_gemm("float32", 512, 4096, 1024)),
    Pattern("torch GEMM bf16 2048x2048x2048", GEMM_BF16, _torch_gemm("bfloat16", 2048, 2048, 2048)),
    Pattern("torch GEMM bf16 512x4096x1024", GEMM_BF16, _torch_gemm("bfloat16", 512, 4096, 1024)),
]


class Probe:
    """The target of the probe's worker."""

    calls = ("start", "measure")

    def start(self, threads: int) -> None:
        """Allocates and warms every pattern."""
        import torch

        torch.set_num_threads(threads)
        self._prepared = [(pattern, *pattern.prepare()) for pattern in PATTERNS]
        for _, call, _ in self._prepared:
            call()

    def measure(self, seconds: float = SECONDS_PER_PATTERN) -> list[dict[str, Any]]:
        """Returns ``{"pattern", "kind", "value"}`` per pattern: the best call of ``seconds``, in units of the kind."""
        samples = []
        for pattern, call, amount in self._prepared:
            best, end = 0.0, perf_counter() + seconds
            while True:
                before = perf_counter()
                call()
                after = perf_counter()
                best = max(best, amount / (after - before))
                if after > end:
                    break
            samples.append({"pattern": pattern.name, "kind": pattern.kind, "value": best})
        return samples

    def close(self) -> None:
        """Frees the buffers."""
        self._prepared = []
