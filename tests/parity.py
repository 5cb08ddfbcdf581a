"""A route and transformers on the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

import tiny_checkpoints
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import Route, RunSpec

# Float32 sums in another order: a few roundings, relative to the largest logit.
TOLERANCE = 2e-5


def prepare(path: Path, route: str, dtype: str = "f32") -> Route:
    module, factory = ROUTES[route].factory.split(":")
    made: Route = getattr(import_module(module), factory)()
    made.prepare(RunSpec(str(path), dtype, dtype, threads=1, max_context=tiny_checkpoints.CONTEXT, max_batch=2))
    return made


def transformers_logits(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    model = tiny_checkpoints.reference(path)

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()

    return logits


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
