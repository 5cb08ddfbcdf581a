"""A checkpoint compiled by MAX from our Mojo kernels, used as a ``torch.nn.Module``."""

from __future__ import annotations

from pathlib import Path

import torch

from shipway.model.resolve import resolve
from shipway.routes.mojo_graph import MojoGraph
from shipway.routes.route import RunSpec


class MaxModule(torch.nn.Module):
    """``module(tokens [S]) -> logits [S, vocab_size]`` float32, on the CPU, for inference.

    The model has no torch parameters: its weights belong to the compiled graph. Under ``torch.compile`` the call is an
    opaque step of the surrounding program (a graph break).
    """

    def __init__(self, model: str | Path, dtype: str = "f32", max_context: int = 1024) -> None:
        """Compiles the checkpoint, or takes it from the artefact cache.

        Args:
            model: Path or name, as for ``shipway.load``.
            dtype: ``"f32"`` or ``"bf16"``.
            max_context: Most tokens of a call.

        Raises:
            ShipwayError: The checkpoint cannot be found or served.
        """
        super().__init__()
        self._route = MojoGraph()
        self._route.prepare(
            RunSpec(str(resolve(model)), dtype, dtype, threads=torch.get_num_threads(), max_context=max_context)
        )

    @torch.compiler.disable
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores ``tokens [S]``, int.

        Raises:
            ShipwayError: The tokens do not fit the context or are not of the vocabulary.
        """
        return torch.from_numpy(self._route.score(tokens.to(torch.int32).numpy()))
