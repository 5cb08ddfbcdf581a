"""A checkpoint as the Hugging Face directory that MAX's server asks for; a GGUF file is converted once and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.processors import TemplateProcessing

from shipway.artefacts import artefact
from shipway.errors import ShipwayError
from shipway.model.checkpoint import Checkpoint
from shipway.model.config import ARCHITECTURES, ModelConfig
from shipway.model.rope import RopeConfig
from shipway.model.tokenizer import Tokenizer

_FORM = 1  # to be raised when what is written below changes


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
    return artefact("hf-directory", parts, lambda directory: _write(checkpoint, directory)).path


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    (directory / "config.json").write_text(json.dumps(_hf_config(config, tokenizer), indent=1))
    _write_tokenizer(tokenizer, directory)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in config.tensor_shapes().items():
        begin, end = end, end + int(np.prod(shape)) * 4
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in config.tensor_shapes():
            file.write(np.ascontiguousarray(checkpoint.weights[name].dequantise("f32")).data)


def _hf_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    window = next((window for window in config.sliding_window if window is not None), None)
    if config.architecture == "llama" and window is not None:
        raise ShipwayError(
            f"a sliding window of {window} on a llama checkpoint has no Hugging Face form: cannot serve it"
        )
    raw: dict[str, Any] = {
        "model_type": config.architecture,
        "architectures": [ARCHITECTURES[config.architecture]],
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
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
    }
    if window is not None:
        raw |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": ["sliding_attention" if local else "full_attention" for local in config.sliding_window],
        }
    if config.rope.rotary_dim != config.head_dim:
        raw["partial_rotary_factor"] = config.rope.rotary_dim / config.head_dim
    return {key: value for key, value in raw.items() if value is not None}


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Returns the ``rope_scaling`` of a config.json, or ``None`` where positions are not scaled.

    Raises:
        ShipwayError: The file's own divisors are not those of Llama 3's formula.
    """
    if rope.kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        # A GGUF holds the divisors alone; every published Llama 3 made them from these numbers.
        factor = max(rope.divisors)
        scaling |= {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        named = RopeConfig(rope.theta, rope.rotary_dim, "llama3", factor, 8192)
        if not np.allclose(named.inv_freq(), rope.inv_freq(), rtol=1e-6, atol=0):
            raise ShipwayError(
                "this GGUF's RoPE divisors are not Llama 3's, and have no Hugging Face form: cannot serve it"
            )
    if rope.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return scaling


def _write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    backend = tokenizer.backend
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        bos = backend.id_to_token(tokenizer.bos_id)
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)])
    backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= tokenizer.special_tokens
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template)
