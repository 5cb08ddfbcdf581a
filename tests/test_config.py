"""config.json and GGUF metadata become one configuration; what it cannot express is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.config import ARCHITECTURES, ModelConfig
from shipway.model.gguf_file import GgufFile
from shipway.model.inspect import describe
from shipway.routes.catalogue import ROUTES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"architectures": 1}, "architectures 1"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_local_experts": 8}, r"num_local_experts 8 \(mixture of experts\)"),
        ({"num_experts": 60}, "num_experts 60"),
        ({"n_routed_experts": 2}, "n_routed_experts 2"),
        ({"num_local_experts": "8"}, "num_local_experts '8'"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "each of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "-1"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "all layers"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": -1}, "rotary dimension -16"),
        ({"rope_scaling": {"rope_type": "none", "factor": 2.0}}, "none"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-320}}, "factor 1e-320"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}}, "attention factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": -9}}, "mscale_all_dim"),
        ({"rope_scaling": [8.0]}, "one setting for all layers"),
        ({"head_dim": 15}, "15"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"num_key_value_heads": [[1], [2]]}, "differs between layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"intermediate_size": 96.0}, "intermediate_size"),
        ({"intermediate_size": True}, "intermediate_size"),
        ({"vocab_size": 2**63}, "vocab_size"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e39}, "rms_norm_eps"),
        ({"rms_norm_eps": 1.0}, "rms_norm_eps"),
        ({"rope_theta": 1e39}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}}, "beta_fast"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ShipwayError, match=named) as caught:
        ModelConfig.from_hf(LLAMA | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [None, 0, 1])
def test_one_expert_or_none_is_the_usual_mlp(number: int | None) -> None:
    assert ModelConfig.from_hf(LLAMA | {"num_local_experts": number}) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (MISTRAL | {"sliding_window": 2**31}, "sliding_window"),
        (MISTRAL | {"sliding_window": "8"}, "sliding_window"),
        (QWEN2 | {"use_sliding_window": "no"}, "use_sliding_window"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers"),
    ],
)
def test_windows_that_make_no_sense_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ShipwayError, match=named):
        ModelConfig.from_hf(changes)


OMISSIBLE = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
)
NULLS = (  # where transformers takes null as well
    *((name, "num_key_value_heads") for name in ("llama", "qwen2", "qwen3")),
    *((name, "head_dim") for name in ("llama", "mistral")),
    *((name, "sliding_window") for name in ("mistral", "qwen2", "qwen3")),
)


@pytest.mark.parametrize(
    ("architecture", "key", "null"),
    [*((name, key, False) for name in ARCHITECTURES for key in OMISSIBLE), *((*null, True) for null in NULLS)],
)
def test_what_a_config_leaves_out_is_what_transformers_assumes(architecture: str, key: str, null: bool) -> None:
    raw = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 30}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 16, "rms_norm_eps": 1e-3, "rope_theta": 5e5}
    raw |= {"max_position_embeddings": 77, "tie_word_embeddings": True, "model_type": architecture}
    if architecture != "llama":
        raw |= {"sliding_window": 9}
    if architecture.startswith("qwen"):
        raw |= {"use_sliding_window": True, "max_window_layers": 3}
    raw.pop(key, None)
    if null:
        raw[key] = None
    theirs = AutoConfig.for_model(**raw)
    ours = ModelConfig.from_hf(raw)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    slides = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    assert ours.sliding_window == tuple(window if sliding else None for sliding in slides or [window is not None] * 30)


def test_head_dim_follows_from_the_heads_unless_stated() -> None:
    assert ModelConfig.from_hf(LLAMA).head_dim == 16
    assert ModelConfig.from_hf(LLAMA | {"head_dim": 20}).head_dim == 20
    qwen3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    assert ModelConfig.from_hf(qwen3).head_dim == 128


@pytest.mark.parametrize(("eos", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_eos_may_be_one_id_or_several(eos: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": eos}).eos_ids == ids


def test_both_spellings_of_rope_scaling_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope
    assert ModelConfig.from_hf(old).rope.kind == "llama3"
    assert ModelConfig.from_hf(old).rope.theta == 5e5


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 7}, (7, 7, 7, 7)),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL, (4096,) * 4),  # transformers' default where the key is absent
        (QWEN2 | {"sliding_window": 7}, (None,) * 4),
        (QWEN2 | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 7)),
        (
            QWEN2
            | {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_sliding_windows_hold_in_the_layers_the_configuration_says(
    config: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_hf(config).sliding_window == windows


@pytest.mark.parametrize("name", tiny_checkpoints.SPECS)
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path) -> None:
    path = tiny_checkpoints.make(name, tmp_path)
    assert open_checkpoint(path).config.parameters == tiny_checkpoints.reference(path).num_parameters()


def write_metadata(path: Path, entries: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Writes a GGUF with llama metadata, changed by ``entries``; ``None`` leaves a key out."""
    base: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", "llama"))
    for key, value in (base | entries).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, data in {"token_embd.weight": np.zeros((16, 32), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.attention.key_length": 8, "llama.attention.value_length": 16}, "value heads"),
        ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, "factor"),
        ({"llama.rope.dimension_count": 4}, "dimension_count 4 with heads of 8"),
        ({"llama.attention.sliding_window": "8"}, "sliding_window"),
        ({"llama.attention.head_count": "four"}, "head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id"),
        ({"split.count": "two"}, "one of two parts"),
        ({"split.count": 3}, "merge them"),
        ({"general.alignment": 12}, "alignment 12"),
        ({"general.alignment": 2}, "alignment 2"),
    ],
)
def test_what_a_gguf_asks_for_and_is_not_supported_is_named(
    entries: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ShipwayError, match=named) as caught:
        open_checkpoint(write_metadata(tmp_path / "model.gguf", entries))
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_rope_scaling_of_a_gguf_is_that_of_the_same_config_json(tmp_path: Path) -> None:
    entries = {
        "llama.rope.freq_base": 1e4,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    ours = ModelConfig.from_gguf(GgufFile.open(write_metadata(tmp_path / "yarn.gguf", entries)))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    theirs = ModelConfig.from_hf(LLAMA | {"head_dim": 8, "rope_scaling": scaling})
    assert ours.rope == theirs.rope
    assert ours.rms_norm_eps == 1e-5


def test_describe_sizes_memory_and_says_which_routes_serve(tmp_path: Path) -> None:
    path = tiny_checkpoints.make("smollm2", tmp_path)
    facts = describe(path, ROUTES, context=100)
    config = open_checkpoint(path).config
    assert facts["formats"] == {"bf16": len(config.tensor_shapes())}
    assert facts["memory"]["bf16"]["weights_bytes"] == facts["file_bytes"] == 2 * config.parameters
    # layers x (K, V) x tokens x key/value heads x head_dim x bytes
    assert facts["memory"]["f32"]["kv_cache_bytes"] == 2 * 2 * 100 * 3 * 8 * 4
    assert facts["tokenizer"]["eos_ids"] == [2]
    assert facts["routes"]["torch-eager"] == {"dtypes": ["f32", "bf16"], "why_not": None}
    json.dumps(facts)
    (path / "tokenizer.json").unlink()
    assert "tokenizer.json" in describe(path, ROUTES)["tokenizer"]["error"]
