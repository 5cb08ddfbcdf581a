"""Route ``mojo-graph``: our Mojo kernels, composed by ``shipway.graphs`` into one MAX graph."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from shipway.model.arena import place, zeros
from shipway.model.checkpoint import open_checkpoint
from shipway.model.rope import rope_table
from shipway.routes.max_model import load_model, wrap, wrap_weights
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute, prepared

if TYPE_CHECKING:
    from max.graph import Graph


class MojoGraph(SteppedRoute):
    """One compiled graph, one KV cache, external weights."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Compiles the graph, or takes it from the artefact cache, and binds the memory-mapped weights.

        Raises:
            ShipwayError: The checkpoint is not usable, or the kernels do not compile.
        """
        started = time.perf_counter()
        from max.driver import CPU, Buffer
        from max.engine import InferenceSession

        from shipway.graphs.extension import source_hash

        imported = time.perf_counter()
        checkpoint = open_checkpoint(spec.model)
        config = checkpoint.config
        self._weights = wrap_weights(place(checkpoint.weights, matrices=spec.weights, vectors="f32"), spec.weights)
        loaded = time.perf_counter()

        def build() -> Graph:
            from max.graph import DeviceRef

            from shipway.graphs.decoder import build_decoder
            from shipway.graphs.extension import kernels_extension

            return build_decoder(config, spec.dtype, spec.weights, kernels_extension(), DeviceRef.CPU())

        parts = {
            "sources": source_hash(),
            "config": config.computation(),
            "dtype": spec.dtype,
            "weights": spec.weights,
        }
        self._model, made = load_model(
            InferenceSession(devices=[CPU()]), "mojo-graph", parts, build, self._weights, spec.compiled
        )

        cache = (
            spec.max_batch,
            config.num_hidden_layers,
            2,
            spec.max_context,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._cache = wrap(zeros(cache, np.uint16 if spec.dtype == "bf16" else np.float32, "KV cache"), spec.dtype)
        self._table = Buffer.from_numpy(rope_table(config.rope, spec.max_context))
        self._begin(spec, config.vocab_size)
        return prepared(started, imported, loaded, made)

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        batch, new = tokens.shape
        first = 0 if every_row else new - 1
        logits, chosen = self._model.execute(
            tokens.ravel(),
            np.arange(batch + 1, dtype=np.int32) * new,
            np.full(batch, start, np.int32),
            np.arange(first, batch * new, 1 if every_row else new, dtype=np.int32),
            self._table,
            self._cache,
        )
        return logits.to_numpy(), chosen.to_numpy()
