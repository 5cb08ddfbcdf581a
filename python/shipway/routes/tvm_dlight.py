"""Route ``tvm-dlight``: the decoder exported by torch, imported into TVM's Relax, scheduled by rules without a search.

dlight has no rule for a product on a CPU: the rules are the project's own (``shipway.schedule.cpu_rules``). One library
holds prefill, decode and LM head for every prompt length, context and batch; weights and KV cache are its arguments.
"""

from __future__ import annotations

import time
from dataclasses import asdict
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
    import tvm

_LIBRARY = "decoder.so"


class TvmDlight(SteppedRoute):
    """Implements :class:`shipway.routes.route.Route`."""

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads the checkpoint and compiles the library, or takes it from the cache.

        Raises:
            ShipwayError: The checkpoint is not usable.
        """
        started = time.perf_counter()
        import tvm
        from tvm import relax

        from shipway.schedule import cpu_rules, products, shared_library

        imported = time.perf_counter()
        tvm.get_global_func("runtime.config_threadpool")(1, spec.threads)
        checkpoint = open_checkpoint(spec.model)
        config = self._config = checkpoint.config
        placed = place(checkpoint.weights, matrices=spec.dtype, vectors="f32")
        self._weights = {name: _tensor(array) for name, array in placed.items()}
        self._head_weights = [self._weights[name] for name in ("model.norm.weight", config.head + ".weight")]
        cos, sin = np.split(rope_table(config.rope, spec.max_context), 2, axis=-1)
        self._cos = np.ascontiguousarray(cos[:, None, None])
        self._sin = np.stack((-sin, sin), axis=1)[:, None]
        self._cache: list[tvm.runtime.Tensor] = []
        self._begin(spec, config.vocab_size)
        loaded = time.perf_counter()

        target = shared_library.cpu_options(spec.threads)

        def build(directory: Path) -> None:
            from shipway.routes import tvm_decoder

            shapes = {name: array.shape for name, array in placed.items()}
            module = tvm_decoder.decoder_module(config, spec.dtype, shapes)
            shared_library.compile_library(module, tvm.target.Target(target), str(directory / _LIBRARY))

        decoder = str(Path(__file__).with_name("tvm_decoder.py"))
        parts = {
            "sources": source_of(__file__, decoder, shared_library.__file__, products.__file__, cpu_rules.__file__),
            "config": {key: value for key, value in asdict(config).items() if key not in ("bos_id", "eos_ids", "rope")},
            "rotary_dim": config.rope.rotary_dim,
            "dtype": spec.dtype,
            "options": target,
            "target": cpu_target(),
            "tvm": tvm.__version__,
        }
        made = artefact("tvm-dlight", parts, build)
        self._machine = relax.VirtualMachine(tvm.runtime.load_module(str(made.path / _LIBRARY)), tvm.cpu())
        self._entries = {name: self._machine[name] for name in ("decode", "prefill", "last", "head")}
        return prepared(
            started,
            imported,
            loaded,
            made,
            f"tvm {tvm.__version__}, Relax from torch.export, no tuning",
            "schedules by the project's own CPU rules; prompt length, context and batch are dynamic",
        )

    def _step(self, tokens: np.ndarray, start: int, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
        import tvm

        batch, length = tokens.shape
        end = start + length
        if not self._cache or self._cache[0].shape[0] != batch:  # only after a reset: there is nothing in it
            config, dtype = self._config, "bfloat16" if self._spec.dtype == "bf16" else "float32"
            shape = (batch, config.num_key_value_heads, self._spec.max_context, config.head_dim)
            self._cache = [tvm.runtime.empty(shape, dtype) for _ in range(2 * config.num_hidden_layers)]
        distance = np.arange(start, end)[:, None] - np.arange(end)
        masks = []
        for window in self._config.windows:
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            masks.append(np.where(seen, np.float32(0), np.float32(-np.inf)))
        angles = [np.concatenate([table[start:end]] * batch) for table in (self._cos, self._sin)]
        inputs = [tvm.runtime.tensor(array) for array in (tokens.reshape(-1), *angles, *masks)]
        one = tokens.size == 1
        out = self._entries["decode" if one else "prefill"](*inputs, *self._cache, *self._weights.values())
        if one:
            logits = out.numpy()
        elif every_row:
            logits = self._entries["head"](out, *self._head_weights).numpy()
        else:
            rows = out.numpy()[length - 1 :: length]
            last = (self._entries["last"](tvm.runtime.tensor(row[None]), *self._head_weights).numpy() for row in rows)
            logits = np.concatenate(list(last))
        return logits, logits.argmax(-1).astype(np.int32)


def _tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    """The same memory, which starts on a cache line, as a TVM tensor; uint16 stands for bfloat16."""
    import tvm

    tensor = tvm.runtime.from_dlpack(array)
    return tensor._create_view(array.shape, "bfloat16") if array.dtype == np.uint16 else tensor
