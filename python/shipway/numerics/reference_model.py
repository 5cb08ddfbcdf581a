"""A Llama-family model in float64 NumPy, by definition: what every route's logits are judged against.

Weights are widened one matrix at a time, so memory stays near one layer's plus the logits.
"""

from __future__ import annotations

import numpy as np

from shipway.model.checkpoint import Checkpoint
from shipway.model.rope import rope_table
from shipway.ops.attention_reference import attend
from shipway.ops.gate_up_silu import silu
from shipway.ops.rms_norm import rms_norm
from shipway.ops.rope import rotate

# Rows of the vocabulary widened to float64 at a time: 2048 columns of them are 128 MiB.
_VOCABULARY_ROWS = 8192


def reference_logits(checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """Teacher-forced logits of one sequence from an empty cache.

    The stored weights are used at full precision. The RoPE table is float32, as every route's is: it belongs to the
    model's definition.

    Args:
        checkpoint: An opened checkpoint.
        tokens: Token ids ``[S]``.

    Returns:
        float64 ``[S, vocab_size]``; row i predicts token i + 1.

    Raises:
        ValueError: A token id is outside the vocabulary, or there is none.
    """
    config = checkpoint.config
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not tokens.size or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"tokens must be a non-empty list of ids below {config.vocab_size}, not {tokens!r}")

    def weight(name: str) -> np.ndarray:
        return checkpoint.weights[name].dequantise("f32").astype(np.float64)

    eps, count = config.rms_norm_eps, len(tokens)
    table, positions = rope_table(config.rope, count), np.arange(count)
    embedding = checkpoint.weights["model.embed_tokens.weight"].dequantise("f32")
    x = embedding[tokens].astype(np.float64)
    for layer, window in enumerate(config.sliding_window):
        at = f"model.layers.{layer}."

        def heads(h: np.ndarray, name: str, attention: str = at + "self_attn.") -> np.ndarray:
            y = h @ weight(f"{attention}{name}_proj.weight").T
            if config.qkv_bias:
                y += weight(f"{attention}{name}_proj.bias")
            y = y.reshape(count, -1, config.head_dim)
            if name == "v":
                return y
            if config.qk_norm:
                y = rms_norm(y, weight(f"{attention}{name}_norm.weight"), eps)
            return rotate(y, table, positions)

        h = rms_norm(x, weight(at + "input_layernorm.weight"), eps)
        attended = attend(heads(h, "q"), heads(h, "k"), heads(h, "v"), config.head_dim**-0.5, window or 0)
        x = x + attended.reshape(count, -1) @ weight(at + "self_attn.o_proj.weight").T
        h = rms_norm(x, weight(at + "post_attention_layernorm.weight"), eps)
        mlp = silu(h @ weight(at + "mlp.gate_proj.weight").T) * (h @ weight(at + "mlp.up_proj.weight").T)
        x = x + mlp @ weight(at + "mlp.down_proj.weight").T
    x = rms_norm(x, weight("model.norm.weight"), eps)
    head = embedding if config.tie_word_embeddings else checkpoint.weights["lm_head.weight"].dequantise("f32")
    logits = np.empty((count, config.vocab_size))
    for row in range(0, config.vocab_size, _VOCABULARY_ROWS):
        some = slice(row, row + _VOCABULARY_ROWS)
        logits[:, some] = x @ head[some].astype(np.float64).T
    return logits
