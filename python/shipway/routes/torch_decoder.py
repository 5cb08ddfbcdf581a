"""A Llama-family decoder in plain PyTorch: the computation of ``torch-eager`` and what ``torch-compile`` compiles.

The KV cache is preallocated and written in place; each layer has tensors of its own for it, because Inductor copies a
whole tensor for every view of it that is written. Arithmetic follows transformers: in bfloat16 every operation reads
and writes bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from shipway.model.arena import place
from shipway.model.checkpoint import Checkpoint
from shipway.model.config import ModelConfig
from shipway.model.rope import rope_table

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

_Load = Callable[[str], nn.Parameter]


class Decoder(nn.Module):
    """The whole model with its KV cache."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, max_batch: int, max_context: int) -> None:
        super().__init__()
        config = checkpoint.config
        placed = place(checkpoint.weights, matrices=dtype, vectors=dtype)

        def load(name: str) -> nn.Parameter:
            # bf16 arrives as its bits in uint16; for f32 the view is the tensor itself.
            return nn.Parameter(torch.from_numpy(placed[name]).view(DTYPES[dtype]), requires_grad=False)

        self._eps = config.rms_norm_eps
        self._windows = config.sliding_window
        self._embedding = load("model.embed_tokens.weight")
        cache = torch.zeros(
            (config.num_hidden_layers, 2, max_batch, max_context, config.num_key_value_heads, config.head_dim),
            dtype=DTYPES[dtype],
        )
        self._layers = nn.ModuleList(_Layer(config, layer, load, *cache[layer]) for layer in range(len(cache)))
        self._norm = load("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else load("lm_head.weight")
        cos, sin = torch.from_numpy(rope_table(config.rope, max_context)).chunk(2, dim=-1)
        # Rotate-half as x * cos + swapped(x) * signed sin, where swapped exchanges the two halves.
        self._cos = torch.cat((cos, cos), dim=-1).to(DTYPES[dtype])[:, None]
        self._sin = torch.cat((-sin, sin), dim=-1).to(DTYPES[dtype])[:, None]

    def hidden_states(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Appends ``tokens [B, S]`` to the cache at position ``start``; returns normalised ``[B, S, hidden]``."""
        length = tokens.shape[1]
        cos, sin = self._cos[start : start + length], self._sin[start : start + length]
        hidden = functional.embedding(tokens, self._embedding)
        masks = {window: _mask(start, length, window) for window in set(self._windows)} if length > 1 else {}
        for layer, window in zip(self._layers, self._windows, strict=True):
            hidden = layer(hidden, cos, sin, start, masks.get(window), window)
        return functional.rms_norm(hidden, self._norm.shape, self._norm, self._eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the LM head: ``[..., hidden]`` to ``[..., vocab_size]``."""
        return functional.linear(hidden, self._head)

    def step(self, tokens: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Appends ``tokens [B, S]`` to the cache, which then holds as many positions as ``seen`` is long.

        A compiler takes a Python number for a constant but can leave a length open, hence ``seen [T]``; its values are
        not read.

        Returns:
            Normalised hidden states ``[B, S, hidden]``, the last tokens' logits ``[B, vocab_size]``, their greedy ids.
        """
        hidden = self.hidden_states(tokens, seen.shape[0] - tokens.shape[1])
        logits = self.logits(hidden[:, -1])
        return hidden, logits, logits.argmax(-1)


class _Layer(nn.Module):
    """One decoder layer: attention and gated MLP, each with its RMSNorm and residual."""

    def __init__(self, config: ModelConfig, index: int, load: _Load, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._keys, self._values = nn.Buffer(keys, persistent=False), nn.Buffer(values, persistent=False)
        prefix = f"model.layers.{index}."
        self._eps, self._head_dim = config.rms_norm_eps, config.head_dim
        self._input_norm = load(f"{prefix}input_layernorm.weight")
        self._post_norm = load(f"{prefix}post_attention_layernorm.weight")
        self._q, self._k, self._v, self._o = (load(f"{prefix}self_attn.{name}_proj.weight") for name in "qkvo")
        bias = config.qkv_bias
        self._q_bias, self._k_bias, self._v_bias = (
            load(f"{prefix}self_attn.{name}_proj.bias") if bias else None for name in "qkv"
        )
        norm = config.qk_norm
        self._q_norm, self._k_norm = (load(f"{prefix}self_attn.{name}_norm.weight") if norm else None for name in "qk")
        self._gate, self._up, self._down = (load(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        start: int,
        mask: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        """Returns the residual stream after this layer, ``[B, S, hidden]``.

        Args:
            hidden: Residual stream ``[B, S, hidden]``.
            cos: Cosines ``[S, 1, rotary_dim]``.
            sin: Signed sines, likewise.
            start: Tokens in the cache before these ones.
            mask: Prefill: ``[S, start + S]``, true where attended, or ``None`` for causal attention of an empty cache.
            window: Decode: sliding window of the one query.
        """
        batch, length, _ = hidden.shape
        end = start + length
        heads = (batch, length, -1, self._head_dim)
        x = functional.rms_norm(hidden, self._input_norm.shape, self._input_norm, self._eps)
        q = functional.linear(x, self._q, self._q_bias).view(heads)
        k = functional.linear(x, self._k, self._k_bias).view(heads)
        if self._q_norm is not None:
            q = functional.rms_norm(q, q.shape[-1:], self._q_norm, self._eps)
            k = functional.rms_norm(k, k.shape[-1:], self._k_norm, self._eps)
        q = _rotate(q, cos, sin)
        self._keys[:batch, start:end] = _rotate(k, cos, sin)
        self._values[:batch, start:end] = functional.linear(x, self._v, self._v_bias).view(heads)
        first = max(0, end - window) if length == 1 and window is not None else 0
        keys, values = self._keys[:batch, first:end], self._values[:batch, first:end]
        if length == 1:
            # One query needs no mask, so the heads that share a key head become rows of one small matrix: PyTorch's
            # own grouped path materialises repeated keys in bfloat16 (measured six times slower at 1024 tokens).
            q = q.view(batch, keys.shape[2], -1, self._head_dim)
            out = functional.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2))
        else:
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            ).transpose(1, 2)
        hidden = hidden + functional.linear(out.reshape(batch, length, -1), self._o)
        x = functional.rms_norm(hidden, self._post_norm.shape, self._post_norm, self._eps)
        gated = functional.silu(functional.linear(x, self._gate)).mul_(functional.linear(x, self._up))
        return hidden + functional.linear(gated, self._down)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first ``rotary_dim`` of ``x [B, S, heads, head_dim]``; pairs are (i, i + rotary_dim / 2)."""
    rotary_dim = cos.shape[-1]
    head = x[..., :rotary_dim]
    rotated = (head * cos).addcmul_(head.roll(rotary_dim // 2, dims=-1), sin)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def _mask(start: int, length: int, window: int | None) -> torch.Tensor | None:
    """Causal mask ``[length, start + length]`` aligned bottom-right, within the last ``window`` tokens.

    ``None`` where PyTorch's causal path, aligned top-left, means the same: an empty cache and no window that bites.
    """
    if start == 0 and (window is None or window >= length):
        return None
    distance = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)
