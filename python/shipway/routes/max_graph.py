"""Route ``max-graph``: MAX's own ops, composed by ``shipway.graphs.stock_decoder`` and scheduled by MAX alone."""

from __future__ import annotations

import time

import numpy as np

from shipway.artefacts import source_of
from shipway.model.arena import place, zeros
from shipway.model.checkpoint import open_checkpoint
from shipway.model.rope import rope_table
from shipway.routes.max_model import load_model, wrap, wrap_weights
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute, prepared


class MaxGraph(SteppedRoute):
    """One compiled graph, one KV cache, external weights."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Compiles the graph, or takes it from the artefact cache, and binds the memory-mapped weights.

        Raises:
            ShipwayError: The checkpoint is not usable.
        """
        started = time.perf_counter()
        from max.driver import CPU, Buffer
        from max.engine import InferenceSession
        from max.graph import DeviceRef

        from shipway.graphs import external_weights, stock_decoder

        imported = time.perf_counter()
        checkpoint = open_checkpoint(spec.model)
        config = checkpoint.config
        self._weights = wrap_weights(place(checkpoint.weights, matrices=spec.dtype, vectors="f32"), spec.dtype)
        loaded = time.perf_counter()

        parts = {
            "sources": source_of(stock_decoder.__file__, external_weights.__file__),
            "config": config.computation(),
            "dtype": spec.dtype,
        }
        self._model, made = load_model(
            InferenceSession(devices=[CPU()]),
            "max-graph",
            parts,
            lambda: stock_decoder.build_stock_decoder(config, spec.dtype, DeviceRef.CPU()),
            self._weights,
            spec.compiled,
        )

        shape = (
            2 * config.num_hidden_layers,
            spec.max_batch,
            config.num_key_value_heads,
            spec.max_context,
            config.head_dim,
        )
        self._caches = zeros(shape, np.uint16 if spec.dtype == "bf16" else np.float32, "KV cache")
        self._table = Buffer.from_numpy(rope_table(config.rope, spec.max_context))
        self._begin(spec, config.vocab_size)
        note = "attention is batched matmul and softmax in f32, at graph level"
        return prepared(started, imported, loaded, made, note)

    def reset(self) -> None:
        """Forgets every sequence."""
        super().reset()
        self._bound: list[object] = []

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        batch, length = tokens.shape
        if not self._bound:  # the graph's batch is a cache's first dimension
            self._bound = [wrap(cache[:batch], self._spec.dtype) for cache in self._caches]
        first = 0 if every_row else length - 1
        logits, chosen = self._model.execute(
            np.ascontiguousarray(tokens),
            np.arange(start),
            np.arange(first, batch * length, 1 if every_row else length, dtype=np.int32),
            self._table,
            *self._bound,  # as tensors, to be read
            *self._bound,  # as buffers, to be written
        )
        return logits.to_numpy(), chosen.to_numpy()
