"""Route ``torch-compile``: the decoder of ``torch-eager`` through Inductor, set up as for inference on a CPU.

Weights are frozen (packed for the kernels that read them), kernels are chosen by max-autotune, and everything runs in
inference mode. Prefill and decode are compiled apart, both dynamic in the KV length and prefill in the prompt length.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from shipway.artefacts import artefact, cpu_target, source_of
from shipway.errors import CannotRunError
from shipway.model.checkpoint import open_checkpoint
from shipway.routes.route import Prepared, RunSpec
from shipway.routes.stepped import SteppedRoute, prepared

_HINT = 128  # prompt length for which prefill kernels are chosen
_MOST_VARIANTS = 64  # batch sizes, prefill and decode, inside and beyond a window: Dynamo gives up at 8


class TorchCompile(SteppedRoute):
    """Implements :class:`shipway.routes.route.Route`."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint and compiles prefill and decode for one sequence, or takes them from the cache.

        Raises:
            ShipwayError: The checkpoint is not usable.
            CannotRunError: There is no C++ compiler.
        """
        started = time.perf_counter()
        import torch
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        from shipway.routes import torch_decoder

        imported = time.perf_counter()
        try:
            compiler = get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise CannotRunError("torch-compile needs a C++ compiler: install g++, or name one in CXX") from error
        torch.set_num_threads(spec.threads)
        checkpoint = open_checkpoint(spec.model)
        config = checkpoint.config
        self._decoder = torch_decoder.Decoder(checkpoint, spec.dtype, spec.max_batch, spec.max_context)
        self._positions = torch.arange(spec.max_context)
        self._begin(spec, config.vocab_size)
        loaded = time.perf_counter()

        dynamo.recompile_limit = _MOST_VARIANTS
        inductor.compile_threads = 1  # a pool of processes would remember the cache directory of its start
        self._compiled = torch.compile(
            self._decoder.step, fullgraph=True, options={"freezing": True, "max_autotune": True}
        )
        windows = sorted(window for window in config.windows if window is not None)

        def build(directory: Path) -> None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
            self._warm_up(windows)

        parts = {
            "sources": source_of(__file__, torch_decoder.__file__),
            "config": config.computation(),
            "spec": {key: value for key, value in asdict(spec).items() if key not in ("model", "compiled")},
            "target": cpu_target(),
            "torch": torch.__version__,
            "compiler": compiler,
        }
        made = artefact("torch-compile", parts, build)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(made.path)
        if not made.cold:
            self._warm_up(windows)
        return prepared(
            started,
            imported,
            loaded,
            made,
            "max-autotune, freezing, inference_mode",
            "prompt and KV length dynamic; a batch or a continued prompt compiles at its first use",
        )

    def _warm_up(self, windows: list[int]) -> None:
        """Compiles whatever one sequence can need: prefill and decode, both inside and beyond every window.

        Sizes 0 and 1 would be taken for constants, hence prompts of 2 tokens and more.
        """
        context = self._spec.max_context
        for length in {min(_HINT, context), *(size for w in windows for size in (w, w + 1))}:
            if 2 <= length <= context:
                self.reset()
                self.prefill(np.zeros((1, length), np.int32))
        for length in {2, *windows}:
            if length < context:
                self.reset()
                self.prefill(np.zeros((1, length), np.int32))
                self.decode(np.zeros(1, np.int32))
        self.reset()

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            new = torch.from_numpy(tokens)
            seen = self._positions[: start + tokens.shape[1]]
            for tensor in (new, seen):
                if tensor.shape[-1] > 1:
                    torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
            hidden, logits, chosen = self._compiled(new, seen)
            if every_row:
                logits = self._decoder.logits(hidden[0])
                chosen = logits.argmax(-1)
            return logits.float().numpy(), chosen.to(torch.int32).numpy()
