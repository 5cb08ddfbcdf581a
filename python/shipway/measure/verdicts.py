"""Judges a route on a real checkpoint and the fixed text, against float64 and plain PyTorch in the same dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import cast

import numpy as np

from shipway.measure.result import Verdict
from shipway.model.checkpoint import Checkpoint
from shipway.model.resolve import cache_dir
from shipway.numerics import model_verdict, reference_model

VERDICT_TOKENS = 256  # of the fixed text, teacher-forced
_KEPT_REFERENCES = 4  # of 100 MB each for SmolLM2's vocabulary


def fixed_text_ids(checkpoint: Checkpoint, count: int) -> list[int]:
    """Returns the first ``count`` ids of the fixed text, read again from its beginning when it is too short."""
    text = files("shipway").joinpath("data/fixed_text.txt").read_text()
    ids = checkpoint.tokenizer.encode(text, add_bos=True)
    while len(ids) < count:
        ids += checkpoint.tokenizer.encode(text, add_bos=False)
    return ids[:count]


def _fingerprint(checkpoint: Checkpoint, tokens: np.ndarray) -> str:
    """Hash of the tokens, the reference's sources, and every file's name, size, time, first and last MiB."""
    digest = hashlib.sha256(tokens.tobytes())
    for folder in ("model", "numerics", "ops"):
        for source in sorted(Path(str(files("shipway"))).joinpath(folder).glob("*.py")):
            digest.update(source.read_bytes())
    path = Path(checkpoint.path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        with file.open("rb") as content:
            digest.update(content.read(1 << 20))
            content.seek(max(status.st_size - (1 << 20), 0))
            digest.update(content.read(1 << 20))
    return digest.hexdigest()


def cached_reference_logits(checkpoint: Checkpoint, tokens: np.ndarray, warn: Callable[[str], None]) -> np.ndarray:
    """Returns the float64 logits ``[S, vocab_size]`` of ``tokens [S]``, kept on disk between runs where there is room.

    Args:
        checkpoint: The model.
        tokens: Ids, int32 ``[S]``.
        warn: Is told when they could not be kept.
    """
    folder = cache_dir() / "reference"
    path = folder / f"{_fingerprint(checkpoint, tokens)}.npy"
    if path.exists():
        with contextlib.suppress(OSError):  # a cache that cannot be written keeps its dates
            os.utime(path)
        with contextlib.suppress(OSError, ValueError, EOFError):  # cut short since: it is made again
            stored: np.ndarray = np.load(path, mmap_mode="r")
            if stored.shape == (len(tokens), checkpoint.config.vocab_size):
                return stored
    logits: np.ndarray = reference_model.reference_logits(checkpoint, tokens)
    partial = folder / f".{path.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, logits)
        partial.replace(path)
        for old in sorted(folder.glob("*.npy"), key=lambda entry: entry.stat().st_mtime)[:-_KEPT_REFERENCES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        warn(
            f"the float64 reference ({logits.nbytes / 1e6:.0f} MB) is computed again next time, it cannot be kept in "
            f"{folder} ({error.strerror or error}): make room on its disk or set SHIPWAY_CACHE"
        )
    return logits


def judge_route(
    logits: np.ndarray, reference: np.ndarray, base: np.ndarray | None, tokens: np.ndarray, dtype: str
) -> Verdict:
    """Returns the fields of the model verdict on ``logits [S, vocab_size]``, as they are stored in a result."""
    judged = dataclasses.asdict(model_verdict.judge_model(logits, reference, base, tokens, dtype))
    return cast(Verdict, judged)
