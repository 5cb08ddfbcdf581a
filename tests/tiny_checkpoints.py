"""Randomly initialised checkpoints, a few kilobytes each, of every architecture that can be served.

``make(name, directory)`` writes one as ``transformers`` would; ``write_gguf`` turns it into a GGUF file with the names
of the ``gguf`` package and the permutation of q and k that llama.cpp's converter applies. Norm weights and biases are
drawn away from 1 and 0, so that forgetting one changes the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTEXT = 64

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Context lengths in the rope scalings are short, so that every frequency band is met within CONTEXT tokens.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

SPECS: dict[str, dict[str, Any]] = {
    "llama2": _LLAMA | {"num_key_value_heads": 4},
    "llama3": _LLAMA | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE, "rope_theta": 5000.0},
    "llama-linear": _LLAMA
    | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "num_attention_heads": 8},
    "llama-yarn": _LLAMA
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, "head_dim": 32},
    "llama-one-layer": _LLAMA | {"num_hidden_layers": 1},
    "mistral": _LLAMA | {"model_type": "mistral", "hidden_size": 48, "head_dim": 20, "sliding_window": 8},
    "qwen2": _LLAMA
    | {
        "model_type": "qwen2",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 5000.0,
    },
    "qwen3": _LLAMA | {"model_type": "qwen3", "hidden_size": 32, "head_dim": 24, "num_key_value_heads": 1},
    "smollm2": _LLAMA
    | {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 331,
        "tie_word_embeddings": True,
    },
}

# Keys of config.json as older writers left them: dropped, or under their former names.
_AS_WRITTEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "llama2": lambda config: config.pop("num_key_value_heads"),
    "llama3": lambda config: _old_rope_keys(config),
}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(name: str, directory: Path) -> Path:
    """Writes checkpoint ``name`` with its tokenizer into ``directory`` and returns it."""
    torch.manual_seed(sum(name.encode()))
    spec = dict(SPECS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(spec.pop("model_type"), **spec))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if key.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif key.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    if name == "smollm2":
        model = model.bfloat16()
    # Mistral is written in shards, with their index.
    model.save_pretrained(directory, max_shard_size="100KB" if name == "mistral" else "1GB")
    if name in _AS_WRITTEN:
        config = json.loads((directory / "config.json").read_text())
        _AS_WRITTEN[name](config)
        (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def reference(directory: Path) -> PreTrainedModel:
    """The same checkpoint in transformers, float32, attention by its plain definition."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level BPE tokenizer of 300 tokens, the first three special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<pad>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the other fox"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},  # the longer of the two spellings
        "pad_token": "<pad>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gguf(directory: Path, path: Path, quantise: gguf.GGMLQuantizationType | None = None) -> Path:
    """Writes the llama or qwen3 checkpoint in ``directory`` as GGUF; matrices quantised to ``quantise``."""
    model = reference(directory)
    config = model.config
    llama = config.model_type == "llama"
    architecture = gguf.MODEL_ARCH.LLAMA if llama else gguf.MODEL_ARCH.QWEN3
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_gguf_tokenizer(directory, writer)
    if config.rope_parameters["rope_type"] == "llama3":
        base = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (base / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if llama and heads:
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        type_ = quantise if quantise is not None and data.ndim == 2 else gguf.GGMLQuantizationType.F32
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(data), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_gguf_tokenizer(directory: Path, writer: gguf.GGUFWriter) -> None:
    state = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _old_rope_keys(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
