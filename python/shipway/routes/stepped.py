"""The calls of a route that has one step: tokens in, logits of some rows and their greedy ids out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np

from shipway.artefacts import Artefact
from shipway.errors import ShipwayError
from shipway.routes.route import Prepared, RunSpec


def prepared(started: float, imported: float, loaded: float, made: Artefact, *notes: str) -> Prepared:
    """Returns what a route says that has just compiled or found its artefact; times are of ``perf_counter``."""
    return Prepared(
        load_s=loaded - imported,
        import_s=imported - started,
        compile_s=time.perf_counter() - loaded,
        compile_cold=made.cold,
        cold_compile_s=made.compile_s,
        cold_date=made.made,
        artefact_bytes=made.size,
        artefact_path=str(made.path),
        notes=notes,
    )


class SteppedRoute(ABC):
    """Implements the calls of :class:`shipway.routes.route.Route` on :meth:`_step`.

    A subclass calls :meth:`_begin` at the end of its ``prepare``. All sequences of a batch are at the same length, and
    a batch keeps its size until :meth:`reset`.
    """

    def _begin(self, spec: RunSpec, vocab_size: int) -> None:
        """Takes the sizes that steps are checked against."""
        self._spec, self._vocab_size = spec, vocab_size
        self._logits = np.empty((0, vocab_size), np.float32)
        self.reset()

    @abstractmethod
    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        """Appends ``tokens [B, S]`` int32, which are admissible, at position ``start`` of the KV cache.

        Returns:
            Logits f32 and greedy ids int32 of the last token of each sequence, ``[B, vocab_size]`` and ``[B]``, or of
            ``every_row``, ``[B * S, vocab_size]`` and ``[B * S]``.
        """

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Appends ``tokens [B, S]`` int32 to the KV cache; returns the greedy next ids ``[B]`` int32.

        Raises:
            ShipwayError: The context or batch would overflow, a token id is not in the vocabulary, the logits are not
                finite.
        """
        return self._choose(tokens)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Appends one token per sequence, ``[B]`` int32; returns the greedy next ids ``[B]`` int32.

        Raises:
            ShipwayError: As for :meth:`prefill`.
        """
        return self._choose(tokens[:, None])

    def logits(self) -> np.ndarray:
        """Returns the logits ``[B, vocab_size]`` f32 of the last prefill or decode."""
        return self._logits

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Returns teacher-forced logits ``[S, vocab_size]`` f32 of ``tokens [S]``; the cache is empty after.

        Raises:
            ShipwayError: As for :meth:`prefill`.
        """
        self.reset()
        self._append(tokens[None], every_row=True)
        self.reset()
        return self._logits

    def reset(self) -> None:
        """Forgets every sequence."""
        self._position = self._batch = 0

    def close(self) -> None:
        """Drops everything the route holds."""
        self.__dict__.clear()

    def _choose(self, tokens: np.ndarray) -> np.ndarray:
        chosen = self._append(tokens, every_row=False)
        # NaN anywhere before the logits makes all of them NaN, so the chosen ones tell.
        if not np.isfinite(self._logits[np.arange(len(chosen)), chosen]).all():
            raise ShipwayError(
                f"the logits after {self._position} tokens are not finite: a weight is not, or a value is beyond "
                f"{self._spec.dtype}"
            )
        return chosen

    def _append(self, tokens: np.ndarray, every_row: bool) -> np.ndarray:
        batch, length = tokens.shape
        if batch > self._spec.max_batch or (self._batch and batch != self._batch):
            raise ShipwayError(
                f"a batch of {batch} does not fit a KV cache for {self._batch or self._spec.max_batch} sequences"
            )
        if self._position + length > self._spec.max_context:
            raise ShipwayError(
                f"{self._position} tokens in the KV cache and {length} more exceed the context of "
                f"{self._spec.max_context}: ask for a larger one or shorten the prompt"
            )
        if not tokens.size or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ShipwayError(f"a step needs token ids, all in 0..{self._vocab_size - 1}")
        self._logits, chosen = self._step(tokens, self._position, every_row)
        self._position += length
        self._batch = batch
        return chosen
