"""A checkpoint as the Hugging Face directory that MAX's server asks for; a GGUF file is converted once and cached."""

from __future__ import annotations

from pathlib import Path

from shipway.artefacts import artefact
from shipway.model.checkpoint import Checkpoint
from shipway.model.export import write_directory

_FORM = 2  # to be raised when what is written changes


def hf_directory(checkpoint: Checkpoint) -> Path:
    """Returns a directory with config.json, tokenizer and safetensors: the checkpoint's own, or its converted copy.

    The copy is float32: MAX's server takes neither f16 nor bf16 on a CPU, nor most GGUF types.

    Raises:
        ShipwayError: The checkpoint has no such form, or the cache cannot be written.
    """
    if checkpoint.kind == "safetensors":
        return checkpoint.path
    status = checkpoint.path.stat()
    parts = {"form": _FORM, "source": str(checkpoint.path.resolve()), "size": status.st_size, "at": status.st_mtime_ns}
    return artefact("hf-directory", parts, lambda directory: write_directory(checkpoint, directory, "f32")).path
