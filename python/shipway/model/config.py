"""Architecture of a checkpoint: one frozen record, read from a Hugging Face ``config.json`` or from GGUF metadata.

Whatever the record cannot express is refused by name, so that no route computes a different model than the file holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shipway.errors import ShipwayError
from shipway.model.rope import RopeConfig, number, yarn_mscale

if TYPE_CHECKING:
    from shipway.model.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Values of ``model_type`` that can be served, with the model class each must name."""

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral is written as llama

_MOST_LAYERS = 4096  # a damaged number must not make us list the tensors of a billion layers

# What transformers assumes where config.json says nothing.
_MAX_POSITIONS = {"llama": 2048, "mistral": 4096 * 32, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as query heads, as null means everywhere
_WINDOW, _MAX_WINDOW_LAYERS, _QWEN3_HEAD_DIM, _EPS = 4096, 28, 128, 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model of the Llama family.

    Attributes:
        architecture: ``"llama"``, ``"mistral"``, ``"qwen2"`` or ``"qwen3"``.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides ``num_attention_heads``.
        head_dim: Width of one head; need not be ``hidden_size / num_attention_heads``.
        vocab_size: Rows of the embedding.
        rms_norm_eps: Epsilon of every RMSNorm.
        max_position_embeddings: Context the checkpoint is made for, in tokens.
        tie_word_embeddings: The LM head is the embedding.
        qkv_bias: q, k and v projections have biases.
        qk_norm: q and k heads pass an RMSNorm over head_dim before RoPE.
        rope: Rotary embedding.
        sliding_window: Per layer, how many of the last tokens (itself included) a token attends to; ``None`` = all.
        bos_id: Token that starts a sequence, or ``None``.
        eos_ids: Tokens that end a sequence.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ShipwayError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ShipwayError(f"rotary dimension {self.rope.rotary_dim} exceeds head_dim {self.head_dim}")
        if not 0 <= self.rms_norm_eps < 1:
            raise ShipwayError(f"rms_norm_eps must be from 0 and below 1, not {self.rms_norm_eps}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the parsed ``config.json`` of a Hugging Face checkpoint.

        Raises:
            ShipwayError: The architecture or one of its settings is not supported, or a number is missing or wrong.
        """
        architecture = _hf_architecture(config)
        _refuse_unsupported(architecture, config)
        heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
        default_head_dim = _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // heads
        head_dim = _positive(config, "head_dim", default_head_dim)
        layers = _positive(config, "num_hidden_layers", most=_MOST_LAYERS)
        max_positions = _positive(config, "max_position_embeddings", _MAX_POSITIONS[architecture])
        kv_heads = heads if "num_key_value_heads" in config else _KV_HEADS.get(architecture, heads)
        bos = token_ids(config.get("bos_token_id"), "bos_token_id")
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=_positive(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_positive(config, "num_key_value_heads", kv_heads),
            head_dim=head_dim,
            vocab_size=_positive(config, "vocab_size"),
            rms_norm_eps=number(config, "rms_norm_eps", _EPS),
            max_position_embeddings=max_positions,
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            rope=RopeConfig.from_hf(config, head_dim, max_positions),
            sliding_window=_hf_windows(architecture, config, layers),
            bos_id=bos[0] if bos else None,
            eos_ids=token_ids(config.get("eos_token_id"), "eos_token_id"),
        )

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Reads the metadata of a GGUF file (and whether it holds an LM head and RoPE divisors).

        Raises:
            ShipwayError: The architecture or one of its settings is not supported, or a number is missing or wrong.
        """
        architecture = file.metadata.get("general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            raise ShipwayError(
                f"GGUF architecture {architecture!r} is not supported: only {', '.join(GGUF_ARCHITECTURES)}"
            )
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        if own.get("expert_count"):
            raise ShipwayError(f"mixture of experts ({own['expert_count']} experts) is not supported")
        heads, hidden = _positive(own, "attention.head_count"), _positive(own, "embedding_length")
        head_dim = _positive(own, "attention.key_length", hidden // heads)
        if _positive(own, "attention.value_length", head_dim) != head_dim:
            raise ShipwayError(f"value heads of another width than key heads ({head_dim}) are not supported")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ShipwayError("tensor token_embd.weight is missing or not a matrix")
        layers = _positive(own, "block_count", most=_MOST_LAYERS)
        window = _positive(own, "attention.sliding_window") if own.get("attention.sliding_window") else None
        pattern = own.get("attention.sliding_window_pattern", [True] * layers)
        if not isinstance(pattern, list) or len(pattern) != layers:
            raise ShipwayError(f"sliding window pattern {pattern!r} is not supported: it must name each layer")
        max_positions = _positive(own, "context_length")
        rope = _gguf_rope(file, own, head_dim, max_positions)
        if architecture == "llama" and rope.rotary_dim != head_dim:
            raise ShipwayError(
                f"rope.dimension_count {rope.rotary_dim} with heads of {head_dim} is not supported in a llama GGUF: "
                "the order of its q and k rows is not defined"
            )
        ids = {
            key: token_ids(file.metadata.get(f"tokenizer.ggml.{key}_token_id"), f"{key}_token_id")
            for key in ("bos", "eos", "eot")
        }
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=_positive(own, "feed_forward_length"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_positive(own, "attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            rms_norm_eps=number(own, "attention.layer_norm_rms_epsilon"),
            max_position_embeddings=max_positions,
            tie_word_embeddings="output.weight" not in file.tensors,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            rope=rope,
            sliding_window=tuple(window if local else None for local in pattern),
            bos_id=ids["bos"][0] if ids["bos"] else None,
            eos_ids=tuple(dict.fromkeys((*ids["eos"], *ids["eot"]))),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of the model under its Hugging Face name (``lm_head`` only if untied)."""
        hidden, q = self.hidden_size, self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
                if self.qkv_bias:
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}mlp.gate_proj.weight"] = (self.intermediate_size, hidden)
            shapes[f"{prefix}mlp.up_proj.weight"] = (self.intermediate_size, hidden)
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, self.intermediate_size)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of weights, a tied LM head counted once."""
        return sum(prod(shape) for shape in self.tensor_shapes().values())

    @property
    def head(self) -> str:
        """Name of the LM head's matrix without ``.weight``: the embedding's, when they are tied."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding windows of the layers, each once."""
        return tuple(dict.fromkeys(self.sliding_window))

    def computation(self) -> dict[str, Any]:
        """Returns the fields that a compiled decoder depends on: all but the ids that begin and end a text."""
        return {key: value for key, value in asdict(self).items() if key not in ("bos_id", "eos_ids")}

    def kv_cache_bytes(self, context: int, itemsize: int) -> int:
        """Bytes of one sequence's KV cache at ``context`` tokens with ``itemsize`` bytes an element."""
        return self.num_hidden_layers * 2 * context * self.num_key_value_heads * self.head_dim * itemsize


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """Normalises an id, a list of ids or ``None`` (as ``eos_token_id`` may be) to a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ShipwayError(f"{key} must be an id or a list of ids, not {value!r}")
    return tuple(ids)


def _hf_architecture(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ShipwayError(f"model_type {model_type!r} is not supported: only {', '.join(ARCHITECTURES)}")
    expected, named = ARCHITECTURES[model_type], config.get("architectures")
    if named and not (isinstance(named, list) and expected in named):
        raise ShipwayError(f"architectures {named!r} is not supported: {model_type} is served as {expected}")
    return model_type


def _refuse_unsupported(architecture: str, config: Mapping[str, Any]) -> None:
    """Raises for settings that would change the computation."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ShipwayError(
            f"quantization_config ({method}) is not supported: use an unquantised checkpoint or a GGUF file"
        )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if (experts := config.get(key)) not in (None, 0, 1):
            raise ShipwayError(f"{key} {experts!r} (mixture of experts) is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ShipwayError(f"hidden_act {activation!r} is not supported: only silu")
    # Qwen2 always has q/k/v biases and never one on o_proj; elsewhere the flag puts one on o_proj as well.
    for flag in ("mlp_bias",) if architecture == "qwen2" else ("attention_bias", "mlp_bias"):
        if config.get(flag):
            raise ShipwayError(f"{flag}=true (biases on o_proj or the MLP) is not supported")


def _hf_windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, by the rules of each architecture's transformers configuration."""
    if architecture == "mistral":
        window = config.get("sliding_window", _WINDOW)
        first = 0
    elif architecture in ("qwen2", "qwen3"):
        window = config.get("sliding_window", _WINDOW) if _flag(config, "use_sliding_window") else None
        first = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ShipwayError(f"max_window_layers must be a number of layers, not {first!r}")
    else:
        window, first = config.get("sliding_window"), 0
        if window is not None:
            raise ShipwayError(f"sliding_window {window} on a llama checkpoint is not supported")
    if window is not None:
        window = _positive(config, "sliding_window", window)
    windows = tuple(window if layer >= first else None for layer in range(layers))
    types = config.get("layer_types")
    if types is None:
        return windows
    if not isinstance(types, list) or len(types) != layers:
        raise ShipwayError(f"layer_types must name the type of each of the {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ShipwayError(f"layer type {kind!r} is not supported: only full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ShipwayError("layer_types names sliding_attention but the configuration sets no sliding window")
    named = tuple(window if kind == "sliding_attention" else None for kind in types)
    if architecture == "mistral" and named != windows:
        raise ShipwayError("layer_types on a mistral checkpoint is not supported: its window holds in every layer")
    return named


def _gguf_rope(file: GgufFile, own: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    theta = number(own, "rope.freq_base", 10000.0)
    rotary_dim = _positive(own, "rope.dimension_count", head_dim)
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        values = divisors.blocks.reshape(-1).tolist()
        positive = all(0 < value < float("inf") for value in values)
        if divisors.format != "f32" or len(values) != rotary_dim // 2 or not positive:
            raise ShipwayError(f"tensor rope_freqs.weight must hold {rotary_dim // 2} positive f32 numbers")
        return RopeConfig(theta, rotary_dim, "llama3", divisors=tuple(values))
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta, rotary_dim)
    factor = number(own, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor)
    if kind != "yarn":
        raise ShipwayError(f"rope scaling {kind!r} is not supported in a GGUF: only linear and yarn")
    return RopeConfig(
        theta,
        rotary_dim,
        "yarn",
        factor,
        _positive(own, "rope.scaling.original_context_length", max_positions),
        beta_fast=number(own, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number(own, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_mscale(factor) * number(own, "rope.scaling.attn_factor", 1.0),
    )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """Reads a flag that is off where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ShipwayError(f"{key} must be true or false, not {value!r}")
    return bool(value)


def _positive(values: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ShipwayError(f"the configuration lacks {key}")
    if isinstance(value, list):  # GGUF may state a number once per layer
        if not value or any(other != value[0] for other in value):
            raise ShipwayError(f"{key} differs between layers: not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ShipwayError(f"{key} must be an integer from 1 to {most}, not {value!r}")
    return value
