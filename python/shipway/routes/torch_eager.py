"""The ``torch-eager`` route: plain PyTorch, one kernel launch per operation. The baseline others are measured against.

It is meant to be hard to beat by accident: see ``torch_decoder`` for what it does about copies and masks.
"""

from __future__ import annotations

import time

import numpy as np

from shipway.model.checkpoint import open_checkpoint
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute


class TorchEager(SteppedRoute):
    """Implements :class:`shipway.routes.route.Route`."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint; nothing is compiled.

        Raises:
            ShipwayError: The checkpoint is not usable.
        """
        started = time.perf_counter()
        import torch

        from shipway.routes.torch_decoder import Decoder

        imported = time.perf_counter()
        torch.set_num_threads(spec.threads)
        checkpoint = open_checkpoint(spec.model)
        self._decoder = Decoder(checkpoint, spec.dtype, spec.max_batch, spec.max_context)
        self._begin(spec, checkpoint.config.vocab_size)
        return Prepared(
            load_s=time.perf_counter() - imported,
            import_s=imported - started,
            compile_s=0.0,
            compile_cold=False,
            notes=(f"torch {torch.__version__}",),
        )

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            hidden = self._decoder.hidden_states(torch.from_numpy(tokens), start)
            logits = self._decoder.logits(hidden[0] if every_row else hidden[:, -1])
            return logits.float().numpy(), logits.argmax(-1).to(torch.int32).numpy()
