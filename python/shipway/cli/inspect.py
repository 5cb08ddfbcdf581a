"""``shipway inspect``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shipway.cli.options import Json, named
from shipway.errors import ShipwayError
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.model.inspect import describe
from shipway.model.resolve import resolve
from shipway.routes.catalogue import ROUTES


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each printed line."""
    tokenizer = document["tokenizer"]
    lines = [
        ("path", f"{document['path']} ({document['kind']}, {_mebibytes(document['file_bytes'])})"),
        ("architecture", f"{document['architecture']}, {document['parameters']:,} parameters"),
        (
            "shape",
            f"{document['layers']} layers, hidden {document['hidden_size']}, {document['heads']} heads over "
            f"{document['kv_heads']} key/value heads of {document['head_dim']}, vocabulary {document['vocab_size']:,}, "
            f"context {document['max_context']:,}",
        ),
        ("formats", ", ".join(f"{count} tensors {name}" for name, count in document["formats"].items())),
        (
            "tokenizer",
            tokenizer.get("error")
            or f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, bos {tokenizer['bos_id']}"
            f"{'' if tokenizer['adds_bos'] else ' (not added)'}, eos {tokenizer['eos_ids']}, "
            f"{'a' if tokenizer['chat_template'] else 'no'} chat template",
        ),
    ]
    for dtype, memory in document["memory"].items():
        lines.append(
            (
                f"memory {dtype}",
                f"{_mebibytes(memory['weights_bytes'])} weights + {_mebibytes(memory['kv_cache_bytes'])} KV cache "
                f"of {memory['context']:,} tokens",
            )
        )
    for name, route in document["routes"].items():
        lines.append((name, f"serves it in {', '.join(route['dtypes'])}" if route["dtypes"] else route["why_not"]))
    return lines


def inspect(
    path: Annotated[str, typer.Argument(help="Hugging Face directory, GGUF file, or a model name.", callback=named)],
    context: Annotated[
        int | None, typer.Option(help="Tokens to size the KV cache for; the model's own context if not given.", min=1)
    ] = None,
    json: Json = None,
) -> None:
    """Say what a checkpoint is, what memory it needs, and which routes can serve it."""
    document = describe(resolve(path), ROUTES, context)
    if context is not None and context > document["max_context"]:
        raise ShipwayError(f"a context of {context} tokens exceeds the model's {document['max_context']}")
    for label, text in _lines(document):
        print(f"{label:<14}{text}")
    if json is not None:
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "inspect", **document})
