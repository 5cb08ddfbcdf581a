"""Routes over a real checkpoint that behave in one way each, and probes, for tests of the benchmark."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from shipway.errors import CannotRunError
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.torch_eager import TorchEager

NAMES = ("Twin", "Wrong", "CrashesLate", "Hangs", "Lacks", "CompilesOnce", "Unprepared")


class Twin(TorchEager):
    """Does what the baseline does."""


class Wrong(TorchEager):
    """Its logits are those of the next token: an off-by-one no speed can excuse."""

    def score(self, tokens: np.ndarray) -> np.ndarray:
        return np.roll(super().score(tokens), 1, axis=0)


class CrashesLate(TorchEager):
    """Warms up, then dies while it is timed."""

    prefills = 0

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] > 1:
            self.prefills += 1
        if self.prefills == 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().prefill(tokens)


class Hangs(TorchEager):
    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        time.sleep(3600)
        return tokens


class Lacks(TorchEager):
    def prepare(self, spec: RunSpec) -> Prepared:
        raise CannotRunError("needs a GPU: plug one in")


class Unprepared(TorchEager):
    def prepare(self, spec: RunSpec) -> Prepared:
        raise RuntimeError("Failed to compile")


class CompilesOnce(TorchEager):
    """Compiles, which takes 200 MiB, when its artefact is not in the cache."""

    def prepare(self, spec: RunSpec) -> Prepared:
        prepared = super().prepare(spec)
        artefact = Path(os.environ["SHIPWAY_CACHE"]) / "artefact"
        cold = not artefact.exists()
        artefact.touch()
        if cold:
            np.ones(200 << 20, np.uint8)
        return Prepared(prepared.load_s, prepared.import_s, compile_s=3.0 if cold else 0.1, compile_cold=cold)


class Probe:
    """Reaches the same limits in every round."""

    calls = ("start", "measure")

    def start(self, threads: int) -> None:
        pass

    def measure(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        kinds = ("read bytes/s", "f32 GEMM FLOP/s", "bf16 GEMM FLOP/s")
        return [{"pattern": "fake", "kind": kind, "value": 1e10} for kind in kinds]

    def close(self) -> None:
        pass


class BrokenProbe(Probe):
    def start(self, threads: int) -> None:
        raise RuntimeError("no counters")
