"""What one checkpoint is and needs, without loading its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shipway.errors import ShipwayError
from shipway.model.checkpoint import Checkpoint, open_checkpoint

_ACTIVATION_BYTES = {"f32": 4, "bf16": 2}


class Server(Protocol):
    """The part of a route's facts that says whether it can serve a model."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Activation dtypes."""
        ...

    def why_not(self, dtype: str, weights: str, device: str) -> str | None:
        """Returns why these arguments cannot be served here, or ``None``."""
        ...


def describe(path: str | Path, routes: Mapping[str, Server], context: int | None = None) -> dict[str, Any]:
    """Describes a checkpoint.

    Args:
        path: A checkpoint's directory or GGUF file.
        routes: Routes by name.
        context: Tokens to size the KV cache for; the checkpoint's own context by default.

    Returns:
        ``path, kind, architecture, parameters, layers, hidden_size, heads, kv_heads, head_dim, vocab_size,
        max_context, formats`` (tensors per storage format), ``file_bytes, memory`` (per activation dtype:
        ``weights_bytes, kv_cache_bytes, context`` for one sequence), ``tokenizer`` (or ``error``) and ``routes``
        (per route: dtypes it can serve here, or why it serves none).

    Raises:
        ShipwayError: The checkpoint cannot be opened.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    context = config.max_position_embeddings if context is None else context
    weights = list(checkpoint.weights.values())
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "architecture": config.architecture,
        "parameters": config.parameters,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_context": config.max_position_embeddings,
        "formats": dict(Counter(weight.format for weight in weights).most_common()),
        "file_bytes": sum(weight.blocks.nbytes for weight in weights),
        "memory": {
            dtype: {
                "weights_bytes": config.parameters * size,
                "kv_cache_bytes": config.kv_cache_bytes(context, size),
                "context": context,
            }
            for dtype, size in _ACTIVATION_BYTES.items()
        },
        "tokenizer": _tokenizer(checkpoint),
        "routes": {name: _served(route) for name, route in routes.items()},
    }


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        tokenizer = checkpoint.tokenizer
    except ShipwayError as problem:  # the weights can still be measured
        return {"error": str(problem)}
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "adds_bos": tokenizer.adds_bos,
        "eos_ids": list(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template is not None,
    }


def _served(route: Server) -> dict[str, Any]:
    refusals = {dtype: route.why_not(dtype, dtype, "cpu") for dtype in route.dtypes}
    served = [dtype for dtype, refusal in refusals.items() if refusal is None]
    return {"dtypes": served, "why_not": None if served else next(iter(refusals.values()), "it serves no dtype")}
