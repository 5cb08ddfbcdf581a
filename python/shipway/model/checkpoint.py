"""One checkpoint on disk: found, checked for completeness, and opened without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.config import ModelConfig
from shipway.model.gguf_file import GgufFile
from shipway.model.gguf_tokenizer import gguf_tokenizer
from shipway.model.gguf_weights import GgufWeights
from shipway.model.safetensors_files import open_safetensors, read_json
from shipway.model.tokenizer import Tokenizer, hf_tokenizer
from shipway.model.weights import Weight

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened model.

    Attributes:
        path: Directory or GGUF file.
        kind: ``"safetensors"`` or ``"gguf"``.
        config: Architecture.
        weights: Every tensor by Hugging Face name, memory-mapped; names and shapes are those of ``config``.
    """

    path: Path
    kind: str
    config: ModelConfig
    weights: Mapping[str, Weight]
    _gguf: GgufFile | None = field(default=None, repr=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer, loaded on first use.

        Raises:
            ShipwayError: It is missing, damaged or unsupported, or has more tokens than the embedding has rows.
        """
        tokenizer = hf_tokenizer(self.path, self.config) if self._gguf is None else gguf_tokenizer(self._gguf)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ShipwayError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens but the embedding only "
                f"{self.config.vocab_size} rows: the two are not of one model"
            )
        if tokenizer.bos_id is not None and not 0 <= tokenizer.bos_id < self.config.vocab_size:
            raise ShipwayError(f"{self.path}: the BOS token {tokenizer.bos_id} is none of {self.config.vocab_size}")
        return tokenizer


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face directory (config.json and safetensors), a GGUF file, or a directory that holds one.

    Raises:
        ShipwayError: Nothing usable is there, the model is not supported, or a tensor is missing or misshapen.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return _open_directory(path)
        path = _only_gguf(path)
    elif not path.exists():
        raise ShipwayError(f"{path} does not exist")
    elif path.suffix in (".safetensors", ".json"):
        raise ShipwayError(f"{path} is one file of a checkpoint: pass its directory")
    return _open_gguf(path)


def _open_directory(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    raw = read_json(config_file)
    with _about(config_file):
        config = ModelConfig.from_hf(raw)
    # Old Llama exports keep RoPE frequencies as buffers, which are redundant.
    weights = {n: w for n, w in open_safetensors(path).items() if not n.endswith(".rotary_emb.inv_freq")}
    if config.tie_word_embeddings and (head := weights.get(_HEAD)) is not None:
        # Saved beside the embedding, a tied LM head is redundant; where the two differ the flag is wrong, and
        # transformers believes the tensors.
        if _same_bytes(head, weights.get(_EMBEDDING)):
            del weights[_HEAD]
        else:
            config = replace(config, tie_word_embeddings=False)
    _check(path, config, {name: weight.shape for name, weight in weights.items()})
    return Checkpoint(path, "safetensors", config, weights)


def _same_bytes(one: Weight, other: Weight | None) -> bool:
    if other is None or (one.format, one.shape) != (other.format, other.shape):
        return False
    first, second = one.blocks.reshape(-1), other.blocks.reshape(-1)
    # Piece by piece: a comparison makes an array of its own, and the matrices may be of gigabytes.
    step = 1 << 22
    return all(np.array_equal(first[at : at + step], second[at : at + step]) for at in range(0, len(first), step))


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile.open(path)
    with _about(path):
        config = ModelConfig.from_gguf(file)
    weights = GgufWeights(file, config)
    _check(path, config, weights.shapes())
    return Checkpoint(path, "gguf", config, weights, file)


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ShipwayError(f"{directory} holds {len(files)} GGUF files: pass one of them, such as {files[0].name}")
    raise ShipwayError(f"{directory} holds no checkpoint: neither config.json nor a GGUF file")


def _check(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the tensors present with those the configuration implies."""
    expected = config.tensor_shapes()
    if absent := expected.keys() - shapes.keys():
        raise ShipwayError(f"{path} lacks {_some(absent)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ShipwayError(f"{path}: tensor {name} has shape {shapes[name]}, its configuration says {shape}")
    if extra := shapes.keys() - expected.keys():
        raise ShipwayError(f"{path} holds {_some(extra)}, which a {config.architecture} model does not use")


def _some(names: Set[str]) -> str:
    return f"tensor {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Puts the file before the message of whatever is wrong with it."""
    try:
        yield
    except ShipwayError as problem:
        raise ShipwayError(f"{path}: {problem}") from None
