"""Route ``mojo-graph``: our Mojo kernels, composed by ``shipway.graphs`` into one MAX graph."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np

from shipway.artefacts import artefact, cpu_target, shipped
from shipway.model.arena import place, zeros
from shipway.model.checkpoint import open_checkpoint
from shipway.model.rope import rope_table
from shipway.routes.max_buffer import wrap
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute


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
        placed = place(checkpoint.weights, matrices=spec.weights, vectors="f32")
        formats = {name: spec.weights if array.ndim == 2 else "f32" for name, array in placed.items()}
        self._weights = {name: wrap(array, formats[name]) for name, array in placed.items()}  # read in place
        loaded = time.perf_counter()

        session = InferenceSession(devices=[CPU()])

        def build(directory: Path) -> None:
            from max.graph import DeviceRef

            from shipway.graphs.decoder import build_decoder
            from shipway.graphs.extension import kernels_extension

            graph = build_decoder(config, spec.dtype, spec.weights, kernels_extension(), DeviceRef.CPU())
            session.compile(graph).export_mef(directory / "decoder.mef")

        shape = {key: value for key, value in asdict(config).items() if key not in ("bos_id", "eos_ids")}
        parts = {
            "sources": source_hash(),
            "config": shape,
            "dtype": spec.dtype,
            "weights": spec.weights,
            "target": cpu_target(),
            "max": version("max"),
        }
        made = shipped(Path(spec.compiled), parts) if spec.compiled else artefact("mojo-graph", parts, build)
        self._model = session.init(session.compile(made.path / "decoder.mef"), weights_registry=self._weights)
        compiled = time.perf_counter()

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
        return Prepared(
            load_s=loaded - imported,
            import_s=imported - started,
            compile_s=compiled - loaded,
            compile_cold=made.cold,
            cold_compile_s=made.compile_s,
            cold_date=made.made,
            artefact_bytes=made.size,
            artefact_path=str(made.path),
        )

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
