"""Route ``xla``: the decoder in JAX, compiled by XLA for the CPU.

XLA compiles for fixed shapes. Prompts are padded to powers of two, and as much of the KV cache is read as the smallest
sufficient of a few lengths. Every decode step is compiled in ``prepare``, a prompt's bucket at its first use.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shipway.artefacts import artefact, cpu_target, source_of
from shipway.model.arena import place
from shipway.model.checkpoint import open_checkpoint
from shipway.model.rope import rope_table
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute, prepared

if TYPE_CHECKING:
    import jax

_SHORTEST = 16  # smallest prompt bucket
_KV_LENGTHS = (256, 1024, 4096, 16384)  # then the whole context: each costs a compilation of the decode step
_FIRST_PROMPT = 128  # prompt bucket compiled in prepare


class Xla(SteppedRoute):
    """Implements :class:`shipway.routes.route.Route`."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint and compiles the decode steps and one prompt bucket, or takes them from the cache.

        Raises:
            ShipwayError: The checkpoint is not usable.
        """
        started = time.perf_counter()
        import jax
        import jax.numpy as jnp
        from jax.experimental.compilation_cache import compilation_cache

        from shipway import jax_parts
        from shipway.routes import jax_decoder

        jax.config.update("jax_platforms", "cpu")
        imported = time.perf_counter()
        checkpoint = open_checkpoint(spec.model)
        config = checkpoint.config
        placed = place(checkpoint.weights, matrices=spec.dtype, vectors="f32")
        self._weights = {
            name: jnp.asarray(array.view(jnp.dtype("bfloat16")) if array.dtype == np.uint16 else array, copy=False)
            for name, array in placed.items()
        }
        # A padded prompt may reach beyond the context, by less than its own bucket.
        self._capacity = spec.max_context + _bucket(spec.max_context)
        self._table = jnp.asarray(rope_table(config.rope, self._capacity))
        self._new_cache = partial(jax_decoder.empty_cache, config, spec.dtype, capacity=self._capacity)
        self._kv_lengths = [*(n for n in _KV_LENGTHS if n < spec.max_context), self._capacity]
        self._jit = jax.jit(partial(jax_decoder.step, config), static_argnums=(0, 1), donate_argnums=3)
        self._compiled: dict[tuple[int, int, int, bool], jax.stages.Compiled] = {}
        self._cache = self._new_cache(batch=1)
        self._begin(spec, config.vocab_size)
        loaded = time.perf_counter()

        def use(directory: Path) -> None:
            jax.config.update("jax_compilation_cache_dir", str(directory))
            compilation_cache.reset_cache()

        def build(directory: Path) -> None:
            use(directory)
            self._compile_first()

        # Caches of XLA's own would put the directory's name, which changes, into the key of what is kept there.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        parts = {
            "sources": source_of(__file__, jax_decoder.__file__, jax_parts.__file__),
            "config": config.computation(),
            "spec": {key: value for key, value in asdict(spec).items() if key not in ("model", "compiled")},
            "target": cpu_target(),
            "jax": jax.__version__,
        }
        made = artefact("xla", parts, build)
        use(made.path)
        if not made.cold:
            self._compile_first()
        return prepared(
            started,
            imported,
            loaded,
            made,
            f"jax {jax.__version__}",
            "prompts padded to powers of two, each compiled at its first use",
        )

    def _compile_first(self) -> None:
        """Compiles what one sequence needs: every decode step, and the prompt bucket of 128 tokens."""
        for kv_length in self._kv_lengths:
            self._executable(1, 1, kv_length, every_row=False)
        prompt = min(_FIRST_PROMPT, _bucket(self._spec.max_context))
        self._executable(1, prompt, self._kv_length(prompt), every_row=False)

    def _executable(self, batch: int, new: int, kv_length: int, every_row: bool) -> jax.stages.Compiled:
        """Returns the step for these sizes, compiling it when it is the first of its kind."""
        key = (batch, new, kv_length, every_row)
        if key not in self._compiled:
            import jax

            tokens = jax.ShapeDtypeStruct((batch, new), np.int32)
            number = jax.ShapeDtypeStruct((), np.int32)
            cache = jax.eval_shape(lambda: self._new_cache(batch=batch))
            self._compiled[key] = self._jit.lower(
                kv_length, every_row, self._weights, cache, self._table, tokens, number, number
            ).compile()
        return self._compiled[key]

    def _kv_length(self, end: int) -> int:
        """The smallest length of the KV cache that is compiled for and holds ``end`` tokens."""
        return next(length for length in self._kv_lengths if length >= end)

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        batch, length = tokens.shape
        if batch != self._cache[0][0].shape[0]:
            self._cache = self._new_cache(batch=batch)  # only after a reset: there is nothing in it
        padded = np.zeros((batch, 1 if length == 1 else _bucket(length)), np.int32)
        padded[:, :length] = tokens
        run = self._executable(batch, padded.shape[1], self._kv_length(start + length), every_row)
        self._cache, logits, chosen = run(
            self._weights, self._cache, self._table, padded, np.int32(start), np.int32(length)
        )
        if every_row:  # of one sequence
            return np.asarray(logits)[0, :length], np.asarray(chosen)[0, :length]
        return np.asarray(logits), np.asarray(chosen)


def _bucket(length: int) -> int:
    """The power of two that a prompt of ``length`` tokens is padded to."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())
