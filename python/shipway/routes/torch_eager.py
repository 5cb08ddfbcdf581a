"""The ``torch-eager`` route: plain PyTorch, one kernel launch per operation. The baseline others are measured against.

It is meant to be hard to beat by accident: see ``torch_decoder`` for what it does about copies and masks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.routes.route import Prepared, RunSpec

if TYPE_CHECKING:
    import torch


class TorchEager:
    """Implements :class:`shipway.routes.route.Route`."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint; nothing is compiled.

        Raises:
            ShipwayError: The checkpoint is not usable, or weights are asked for in another dtype than activations.
        """
        started = time.perf_counter()
        import torch

        from shipway.routes.torch_decoder import Decoder

        imported = time.perf_counter()
        if spec.weights != spec.dtype:
            raise ShipwayError(f"torch-eager keeps weights in the activations' dtype: pass --weights {spec.dtype}")
        torch.set_num_threads(spec.threads)
        checkpoint = open_checkpoint(spec.model)
        self._spec = spec
        self._vocab_size = checkpoint.config.vocab_size
        self._decoder = Decoder(checkpoint, spec.dtype, spec.max_batch, spec.max_context)
        self._logits = torch.empty(0)
        self.reset()
        return Prepared(
            load_s=time.perf_counter() - imported,
            import_s=imported - started,
            compile_s=0.0,
            compile_cold=False,
            notes=(f"torch {torch.__version__}",),
        )

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Appends ``tokens [B, S]`` int32; returns the greedy next ids ``[B]`` int32.

        Raises:
            ShipwayError: The context or batch would overflow, or a token id is not in the vocabulary.
        """
        import torch

        with torch.inference_mode():
            self._logits = self._decoder.logits(self._append(tokens)[:, -1])
            return self._logits.argmax(dim=-1).to(torch.int32).numpy()

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Appends one token per sequence, ``[B]`` int32; returns the greedy next ids ``[B]`` int32.

        Raises:
            ShipwayError: As for :meth:`prefill`.
        """
        return self.prefill(tokens[:, None])

    def logits(self) -> np.ndarray:
        """Returns the logits ``[B, vocab_size]`` float32 of the last prefill or decode."""
        return self._logits.float().numpy()

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Returns teacher-forced logits ``[S, vocab_size]`` float32 of ``tokens [S]``; the cache is empty after.

        Raises:
            ShipwayError: As for :meth:`prefill`.
        """
        import torch

        self.reset()
        with torch.inference_mode():
            logits = self._decoder.logits(self._append(tokens[None])[0])
        self.reset()
        return logits.float().numpy()

    def reset(self) -> None:
        """Forgets every sequence."""
        self._position = 0
        self._batch = 0

    def close(self) -> None:
        """Drops weights, cache and logits."""
        self.__dict__.clear()

    def _append(self, tokens: np.ndarray) -> torch.Tensor:
        """Runs ``tokens [B, S]`` through the layers; returns hidden states ``[B, S, hidden]``."""
        import torch

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
        hidden = self._decoder.hidden_states(torch.from_numpy(tokens), self._position)
        self._position += length
        self._batch = batch
        return hidden
