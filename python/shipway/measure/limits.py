"""What a model must read and compute, from its configuration: the numerators of the figures in % of limit."""

from __future__ import annotations

from shipway.model.config import ModelConfig

BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def _layer_matrix_elements(config: ModelConfig) -> int:
    """Elements of the seven matrices of one layer."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return attention + 3 * config.hidden_size * config.intermediate_size


def weight_bytes_per_token(config: ModelConfig, weights: str) -> int:
    """Bytes of weights one decode step must read: every layer's matrices, the head's matrix, one embedding row.

    A tied embedding is read as the head. Norm weights and biases (under 0.1% of the whole) are counted as float32.
    """
    matrices = config.num_hidden_layers * _layer_matrix_elements(config) + config.vocab_size * config.hidden_size
    vectors = config.num_hidden_layers * 2 * config.hidden_size + config.hidden_size
    if config.qkv_bias:
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        vectors += config.num_hidden_layers * heads * config.head_dim
    if config.qk_norm:
        vectors += config.num_hidden_layers * 2 * config.head_dim
    return matrices * BYTES[weights] + config.hidden_size * BYTES[weights] + vectors * 4


def visible(window: int | None, length: int) -> int:
    """Keys that a query at position ``length - 1`` sees."""
    return length if window is None else min(window, length)


def kv_bytes(config: ModelConfig, dtype: str, length: int) -> int:
    """Bytes of KV cache that a decode step must read when ``length`` tokens, its own included, are in the cache."""
    keys = sum(visible(window, length) for window in config.sliding_window)
    return 2 * keys * config.num_key_value_heads * config.head_dim * BYTES[dtype]


def decode_bytes(config: ModelConfig, dtype: str, weights: str, prompt: int, new_tokens: int) -> float:
    """Mean bytes a decode step must read, over the ``new_tokens - 1`` steps that follow a prompt's first token."""
    lengths = range(prompt + 1, prompt + new_tokens)
    cache = sum(kv_bytes(config, dtype, length) for length in lengths) / len(lengths)
    return weight_bytes_per_token(config, weights) + cache


def prefill_flops(config: ModelConfig, prompt: int) -> int:
    """FLOPs of a prefill, 2 per multiply-add: every matrix, QK^T and PV below the diagonal, one row of the head."""
    matrices = 2 * prompt * config.num_hidden_layers * _layer_matrix_elements(config)
    pairs = sum(visible(window, length) for window in config.sliding_window for length in range(1, prompt + 1))
    attention = 4 * pairs * config.num_attention_heads * config.head_dim
    return matrices + attention + 2 * config.vocab_size * config.hidden_size


def resident_bytes(config: ModelConfig, dtype: str, weights: str, max_context: int) -> int:
    """Estimated bytes of weights (an untied embedding apart from the head) and KV cache of a loaded route."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * BYTES[weights]
    cache = 2 * len(config.sliding_window) * max_context * config.num_key_value_heads * config.head_dim * BYTES[dtype]
    return weight_bytes_per_token(config, weights) + embedding + cache
