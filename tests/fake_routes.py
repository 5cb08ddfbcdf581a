"""Routes without a model, for tests of what surrounds routes: each behaves in one way, good or bad."""

import os
import signal
import sys
import time

import numpy as np

from shipway.errors import CannotRunError, ShipwayError
from shipway.routes.route import Prepared, RouteInfo, RunSpec

VOCAB = 32


def info(name: str) -> RouteInfo:
    """The facts of the fake route whose class is ``name``."""
    return RouteInfo(
        name=f"fake-{name.lower()}",
        pole="none",
        rung="eager",
        factory=f"fake_routes:{name}",
        devices=("cpu",),
        dtypes=("f32", "bf16"),
        weight_formats=("f32", "bf16"),
        requires=(),
        remedy="nothing",
        summary="for tests",
    )


def following(token: int) -> int:
    """The token that every fake route puts after ``token``."""
    return (token * 5 + 3) % VOCAB


class Good:
    """Continues by :func:`following`; its logits favour that token."""

    def prepare(self, spec: RunSpec) -> Prepared:
        self.spec = spec
        return Prepared(load_s=0.1, import_s=0.2, compile_s=0.0, compile_cold=False, notes=("fake",))

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        return self._next(tokens[:, -1])

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        return self._next(tokens)

    def _next(self, tokens: np.ndarray) -> np.ndarray:
        self._last = np.array([following(int(token)) for token in tokens], np.int32)
        return self._last

    def logits(self) -> np.ndarray:
        logits = np.zeros((len(self._last), VOCAB), np.float32)
        logits[np.arange(len(self._last)), self._last] = 5
        return logits

    def score(self, tokens: np.ndarray) -> np.ndarray:
        return np.outer(tokens, np.ones(VOCAB)).astype(np.float32)

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


class Slow(Good):
    def decode(self, tokens: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return super().decode(tokens)


class Chatty(Good):
    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        print("x" * 200_000)
        sys.stderr.write("y" * 200_000)
        return super().prefill(tokens)


class Segfaults(Good):
    def decode(self, tokens: np.ndarray) -> np.ndarray:
        sys.stderr.write("kernel: tile 7 out of range\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
        return tokens


class Raises(Good):
    def decode(self, tokens: np.ndarray) -> np.ndarray:
        raise RuntimeError("bad rank\nsecond line")


class Refuses(Good):
    def prepare(self, spec: RunSpec) -> Prepared:
        raise ShipwayError(f"{spec.model} is not for this route")


class Unprepared(Good):
    def prepare(self, spec: RunSpec) -> Prepared:
        raise RuntimeError("Failed to compile")


class Lacks(Good):
    def prepare(self, spec: RunSpec) -> Prepared:
        raise CannotRunError("needs a GPU: plug one in")


class Hangs(Good):
    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        time.sleep(3600)
        return tokens


class Affinity(Good):
    calls = ("affinity", "variables")

    def affinity(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def variables(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(("MODULAR_", "SHIPWAY_", "OMP_"))}


class Wanders(Good):
    """Leaves the way of :class:`Good` at its third token, by a margin of 0.5."""

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        self._count = 0
        return super().prefill(tokens)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        self._count += 1
        usual = super().decode(tokens)
        if self._count == 2:
            self._last = (usual + 1) % VOCAB
        return self._last

    def logits(self) -> np.ndarray:
        logits = super().logits()
        logits[np.arange(len(self._last)), (self._last - 1) % VOCAB] = 4.5
        return logits
