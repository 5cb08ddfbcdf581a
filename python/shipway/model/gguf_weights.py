"""Tensors of a GGUF file under their Hugging Face names, q and k rows in Hugging Face order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.config import ModelConfig
from shipway.model.gguf_file import GgufFile, GgufTensor
from shipway.model.weights import Weight

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODULE_OF = {gguf: hf for hf, gguf in (_TOP | _LAYER).items()}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")

CONFIGURATION_TENSORS = frozenset({"rope_freqs.weight"})
"""Tensors that are read as configuration (RoPE divisors), not as weights."""


def hf_name(gguf_name: str) -> str:
    """Returns the Hugging Face name of a tensor, or the name itself when no supported model has such a tensor."""
    match = _NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _MODULE_OF:
        return gguf_name
    layer, module, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{_MODULE_OF[module]}.{kind}"


class GgufWeights(Mapping[str, Weight]):
    """Weights by Hugging Face name, made on access: permuted q and k matrices are copies and need not all live at once.

    Llama GGUFs store q and k with the two halves of each head interleaved, as the original RoPE pairs neighbours.
    Undoing it moves whole rows, so quantised blocks, which lie along rows, stay as they are. Qwen GGUFs are not
    permuted.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in file.tensors.items():
            if name in CONFIGURATION_TENSORS:
                continue
            if hf_name(name) in self._tensors:
                raise ShipwayError(f"{file.path} holds tensor {hf_name(name)} under two names, one of them {name}")
            self._tensors[hf_name(name)] = tensor
        self._head_dim = config.head_dim
        self._permuted = config.architecture == "llama"

    def __getitem__(self, name: str) -> Weight:
        tensor = self._tensors[name]
        blocks = tensor.blocks
        if self._permuted and name.endswith((".q_proj.weight", ".k_proj.weight")):
            blocks = blocks[self._row_order(len(blocks))]
        return Weight(name, tensor.shape, tensor.format, blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the logical shape of every tensor without reading any."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def _row_order(self, rows: int) -> np.ndarray:
        return np.arange(rows).reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
