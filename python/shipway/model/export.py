"""Writes an opened checkpoint as a Hugging Face directory, its matrices in one chosen plain format.

For programs that read nothing else, and to start from weights that need no conversion.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from shipway.errors import ShipwayError
from shipway.model.arena import place
from shipway.model.checkpoint import Checkpoint
from shipway.model.config import ARCHITECTURES, ModelConfig
from shipway.model.rope import RopeConfig
from shipway.model.tokenizer import Tokenizer

_SAFETENSORS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def write_directory(checkpoint: Checkpoint, directory: Path, matrices: str, vectors: str = "f32") -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into an existing directory.

    Args:
        checkpoint: The model.
        directory: Where to; files of the same names are replaced.
        matrices: Format of tensors with two dimensions, ``"f32"``, ``"bf16"`` or ``"f16"``.
        vectors: Format of tensors with one.

    Raises:
        ShipwayError: The disk is full or not writable, or the model cannot be said in Hugging Face's terms.
    """
    config = hf_config(checkpoint.config) | {"dtype": _SAFETENSORS[matrices]}
    placed = place(checkpoint.weights, matrices, vectors)
    tensors = {
        name: TensorSpec(
            dtype=_SAFETENSORS[matrices if array.ndim == 2 else vectors],
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in placed.items()
    }
    try:
        weights = directory / "model.safetensors"
        weights.touch()
        mode = weights.stat().st_mode
        serialize_file(tensors, str(weights), {"format": "pt"})
        weights.chmod(mode)  # safetensors leaves the mode of a temporary file, which no other user may read
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        if checkpoint.kind == "safetensors":
            for name in _TOKENIZER_FILES:
                if (checkpoint.path / name).is_file():
                    shutil.copyfile(checkpoint.path / name, directory / name)
        else:
            _write_tokenizer(checkpoint.tokenizer, directory)
    except Exception as error:
        # safetensors raises its own error type for a full disk, which is no OSError.
        if isinstance(error, OSError) or type(error).__module__.startswith("safetensors"):
            raise ShipwayError(f"cannot write the model to {directory}: {error}") from error
        raise


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json that :meth:`ModelConfig.from_hf` reads back as ``config``.

    Raises:
        ShipwayError: RoPE divisors or a sliding window of a GGUF that a config.json cannot state.
    """
    said: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) != 1 else config.eos_ids[0],
        "rope_theta": config.rope.theta,
        **_rope(config.rope, config.head_dim),
    }
    windows = set(config.sliding_window)
    if config.architecture == "mistral":
        said["sliding_window"] = config.sliding_window[0]
    elif config.architecture == "llama" and windows != {None}:
        raise ShipwayError("a sliding window on a llama checkpoint has no Hugging Face form")
    elif windows != {None}:
        said["use_sliding_window"] = True
        said["sliding_window"] = max(window for window in windows if window is not None)
        said["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.sliding_window
        ]
    return said


def _rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    if rope.divisors:
        rope = _without_divisors(rope)
    said: dict[str, Any] = {}
    if rope.rotary_dim != head_dim:
        said["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.kind == "none":
        return said
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    return said | {"rope_scaling": scaling}


def _without_divisors(rope: RopeConfig) -> RopeConfig:
    """The llama3 scaling whose frequencies a GGUF's divisors are, tried with the numbers Llama 3.1 and 3.2 use."""
    said = RopeConfig(rope.theta, rope.rotary_dim, "llama3", max(rope.divisors), 8192, 1.0, 4.0)
    if not np.allclose(said.inv_freq(), rope.inv_freq(), rtol=1e-5, atol=0):
        raise ShipwayError("this GGUF states RoPE divisors (rope_freqs) that a Hugging Face config.json cannot hold")
    return said


def _write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """The tokenizer of a GGUF as the files :func:`shipway.model.tokenizer.hf_tokenizer` and transformers read."""
    backend = Backend.from_str(tokenizer.backend.to_str())  # a copy: this one is in use
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        bos = backend.id_to_token(tokenizer.bos_id)
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)])
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.adds_bos,
        **tokenizer.special_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1))
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template)
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)})
    )
