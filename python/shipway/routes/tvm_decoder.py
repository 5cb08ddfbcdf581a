"""A Llama-family decoder for TVM: a plain torch module, exported by ``torch.export`` and imported into Relax.

The module is written for the importer: a flat batch of rows instead of ``[B, S]``, masks and RoPE angles as float
inputs, weights and KV caches as arguments. Three operations on the KV cache have no importable form in torch (an
in-place update would be exported as a copy of the whole cache) and are torch ops of our own, each with its conversion:
:func:`append`, written in place by ``call_tir_inplace``, :func:`scores` and :func:`mix`. Everything else is aten; the
conversion of ``linear`` and ``rms_norm`` is ours too, for a float32 sum and because the importer has none.

The residual stream, RoPE, scores and softmax are float32; in bf16 the operands of every product with weights and the KV
cache are bfloat16, and sums float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm
from torch import nn
from torch.nn import functional
from tvm import relax, te, tirx
from tvm.relax.frontend.torch import from_exported_program

from shipway.model.config import ModelConfig
from shipway.schedule.products import PRODUCT, linear, product

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


# Names and shapes for the exporter; what they compute is said by the conversions below, torch never runs them.
torch.library.define("shipway_tvm::append", "(Tensor cache, Tensor new, Tensor mask) -> Tensor")
torch.library.define("shipway_tvm::scores", "(Tensor q, Tensor keys, Tensor mask) -> Tensor")
torch.library.define("shipway_tvm::mix", "(Tensor attention, Tensor values, Tensor q) -> Tensor")


@torch.library.register_fake("shipway_tvm::append")
def append(cache: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Writes ``new [B * S, kv_heads, head_dim]`` to the last S of the cache's first T positions; S, T of ``mask``."""
    return torch.empty_like(cache)


@torch.library.register_fake("shipway_tvm::scores")
def scores(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scaled, masked products ``[B, kv_heads, S * group, T]`` f32 of ``q [B * S, heads, head_dim]`` with the cache."""
    rows = mask.shape[0] * (q.shape[1] // keys.shape[1])
    return q.new_empty((keys.shape[0], keys.shape[1], rows, mask.shape[1]), dtype=torch.float32)


@torch.library.register_fake("shipway_tvm::mix")
def mix(attention: torch.Tensor, values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Sums of values weighted by ``attention``: ``[B * S, heads * head_dim]`` f32."""
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=torch.float32)


class _Layers(nn.Module):
    """Embedding and decoder layers; with ``head`` the final norm and LM head too."""

    def __init__(self, config: ModelConfig, head: bool) -> None:
        super().__init__()
        self._config, self._head = config, head

    def forward(
        self,
        tokens: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        masks: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        weights: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        config, kernels = self._config, torch.ops.shipway_tvm
        x = functional.embedding(tokens, weights["model.embed_tokens.weight"]).float()
        for layer, window in enumerate(config.sliding_window):
            at, mask = f"model.layers.{layer}.", masks[config.windows.index(window)]
            h = _norm(config, x, weights[at + "input_layernorm.weight"])
            heads = []
            for name in "qkv":
                head = _linear(h, weights, f"{at}self_attn.{name}_proj").view(x.shape[0], -1, config.head_dim)
                if name != "v":
                    if config.qk_norm:
                        head = _norm(config, head, weights[f"{at}self_attn.{name}_norm.weight"])
                    head = _rotate(head, cos, sin)
                heads.append(head)
            q, k, v = heads
            cached_k = kernels.append(keys[layer], k, mask)
            cached_v = kernels.append(values[layer], v, mask)
            attention = kernels.scores(q, cached_k, mask).softmax(-1)
            x = x + _linear(kernels.mix(attention, cached_v, q), weights, at + "self_attn.o_proj")
            h = _norm(config, x, weights[at + "post_attention_layernorm.weight"])
            gated = functional.silu(_linear(h, weights, at + "mlp.gate_proj")) * _linear(h, weights, at + "mlp.up_proj")
            x = x + _linear(gated, weights, at + "mlp.down_proj")
        return _logits(config, x, weights) if self._head else x


class _Head(nn.Module):
    """Final norm and LM head of any rows ``[N, hidden]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config

    def forward(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return _logits(self._config, x, weights)


def _logits(config: ModelConfig, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return _linear(_norm(config, x, weights["model.norm.weight"]), weights, config.head)


def _norm(config: ModelConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    # The conversion gives a linear a float32 sum and result, whatever its operands: float() is then nothing.
    y = functional.linear(x.to(weights[name + ".weight"].dtype), weights[name + ".weight"]).float()
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first ``rotary_dim`` of ``x [M, heads, head_dim]``; pairs are (i, i + rotary_dim / 2).

    Args:
        x: The heads, f32.
        cos: ``[M, 1, 1, rotary_dim / 2]``.
        sin: ``[M, 1, 2, rotary_dim / 2]``, the first half negated.
    """
    half = cos.shape[-1]
    head = x[..., : 2 * half].unflatten(-1, (2, half))
    rotated = (head * cos + head.flip(-2) * sin).flatten(-2)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def decoder_module(config: ModelConfig, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> tvm.IRModule:
    """Exports and imports the decoder.

    Args:
        config: The architecture.
        dtype: Matrices and KV cache, ``"f32"`` or ``"bf16"``.
        shapes: Shape of every weight, in the order in which they are passed.

    Returns:
        A Relax module of four functions. ``decode`` takes one token of one sequence and returns its logits
        ``[1, vocab_size]``; ``prefill`` takes any number of tokens and sequences and returns the residual stream
        ``[M, hidden]``; both take tokens, cosines, sines, one mask per window, keys and values of each layer
        ``[B, kv_heads, capacity, head_dim]``, weights. ``last`` and ``head`` take one and any number of rows of that
        stream, and the head's weights.
    """
    act = DTYPES[dtype]
    weights = {
        name: torch.empty(shape, dtype=act if len(shape) == 2 else torch.float32, device="meta")
        for name, shape in shapes.items()
    }
    for_head = {name: weights[name] for name in ("model.norm.weight", config.head + ".weight")}
    functions = {
        "decode": _export(_Layers(config, head=True), *_example(config, act, rows=1, batch=1), weights),
        "prefill": _export(_Layers(config, head=False), *_example(config, act, rows=6, batch=2), weights),
        "last": _export(_Head(config), *_head_example(config, rows=1), for_head),
        "head": _export(_Head(config), *_head_example(config, rows=3), for_head),
    }
    return _merge({name: _import(program) for name, program in functions.items()})


def _example(
    config: ModelConfig, act: torch.dtype, rows: int, batch: int
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Example arguments of :class:`_Layers` without weights, and which of their sizes stay open."""
    one = rows == 1
    length, seen, capacity = rows // batch, 11, 17
    half = config.rope.rotary_dim // 2
    cache = torch.empty((batch, config.num_key_value_heads, capacity, config.head_dim), dtype=act, device="meta")
    layers = config.num_hidden_layers
    arguments = (
        torch.empty(rows, dtype=torch.int32, device="meta"),
        torch.empty((rows, 1, 1, half), device="meta"),
        torch.empty((rows, 1, 2, half), device="meta"),
        [torch.empty((length, seen), device="meta") for _ in config.windows],
        [cache.clone() for _ in range(layers)],
        [cache.clone() for _ in range(layers)],
    )
    dim = {name: torch.export.Dim(name, min=2) for name in ("rows", "batch", "length", "seen", "capacity")}
    row = {} if one else {0: dim["rows"]}
    kept = {2: dim["capacity"]} if one else {0: dim["batch"], 2: dim["capacity"]}
    mask = {1: dim["seen"]} if one else {0: dim["length"], 1: dim["seen"]}
    dynamic = (row, row, row, [mask] * len(config.windows), [kept] * layers, [kept] * layers)
    return arguments, dynamic


def _head_example(config: ModelConfig, rows: int) -> tuple[tuple[object, ...], tuple[object, ...]]:
    dynamic: dict[int, object] = {} if rows == 1 else {0: torch.export.Dim("rows", min=2)}
    return (torch.empty((rows, config.hidden_size), device="meta"),), (dynamic,)


def _export(
    module: nn.Module, arguments: tuple[object, ...], dynamic: tuple[object, ...], weights: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    shapes = (*dynamic, {name: {} for name in weights})
    return torch.export.export(module.eval(), (*arguments, weights), dynamic_shapes=shapes)


def _import(program: torch.export.ExportedProgram) -> tvm.IRModule:
    converters: dict[str, Callable[..., relax.Var]] = {
        "linear.default": _convert_linear,
        "rms_norm.default": _convert_rms_norm,
        "append.default": _convert_append,
        "scores.default": _convert_scores,
        "mix.default": _convert_mix,
    }
    return from_exported_program(
        program, unwrap_unit_return_tuple=True, custom_convert_map=converters, run_ep_decomposition=False
    )


def _merge(modules: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Puts the functions of several modules into one, ``main`` of each under its own name."""
    builder = relax.BlockBuilder()
    for name, module in modules.items():
        to_new: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        for variable, function in module.functions.items():
            if isinstance(function, tirx.PrimFunc):
                to_new[variable] = builder.add_func(function, variable.name_hint)
        builder.add_func(_Renamed(to_new).visit_expr(module["main"]).with_attr("global_symbol", name), name)
    return builder.get()


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):
    """Exchanges global variables."""

    def __init__(self, to_new: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self._to_new = to_new

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        return self._to_new.get(op, op)


# Conversions.


def _convert_linear(node: torch.fx.Node, importer: Any) -> relax.Var:
    x, weight = importer.retrieve_args(node)[:2]
    return importer.block_builder.emit_te(linear, x, weight, primfunc_attrs=PRODUCT)


def _convert_rms_norm(node: torch.fx.Node, importer: Any) -> relax.Var:
    x, _, weight, eps = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.nn.rms_norm(x, weight, -1, eps))


def _convert_append(node: torch.fx.Node, importer: Any) -> relax.Var:
    cache, new, mask = importer.retrieve_args(node)
    function = _append(list(cache.ty.shape), list(new.ty.shape), list(mask.ty.shape), cache.ty.dtype)
    variable = importer.block_builder.add_func(function, "append")
    return importer.block_builder.emit(relax.op.call_tir_inplace(variable, (cache, new, mask), 0, cache.ty))


def _append(cache_shape: list[Any], new_shape: list[Any], mask_shape: list[Any], dtype: str) -> tirx.PrimFunc:
    from tvm.script import tirx as T

    batch, heads, _, head_dim = cache_shape
    length, seen = mask_shape

    @T.prim_func(s_tir=True, private=True)
    def function(cache_handle: T.handle, new_handle: T.handle, mask_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True})
        cache = T.match_buffer(cache_handle, cache_shape, dtype)
        new = T.match_buffer(new_handle, new_shape, "float32")
        T.match_buffer(mask_handle, mask_shape, "float32")  # says how many are new and how many there are then
        for b, h, s, d in T.grid(batch, heads, length, head_dim):
            with T.sblock("append"):
                vb, vh, vs, vd = T.axis.remap("SSSS", [b, h, s, d])
                cache[vb, vh, seen - length + vs, vd] = T.Cast(dtype, new[vb * length + vs, vh, vd])

    return function


def _convert_scores(node: torch.fx.Node, importer: Any) -> relax.Var:
    def scores(q: te.Tensor, keys: te.Tensor, mask: te.Tensor) -> te.Tensor:
        batch, kv_heads, _, head_dim = keys.shape
        length, seen = mask.shape
        group = int(q.shape[1]) // int(kv_heads)
        shape = (batch, kv_heads, length * group, seen)
        a = te.compute(
            (*shape[:3], head_dim),
            lambda b, h, r, d: (
                q[b * length + r // group, h * group + r % group, d].astype(keys.dtype).astype("float32")
            ),
            "a",
        )
        kept = te.compute((batch, kv_heads, seen, head_dim), lambda b, h, t, d: keys[b, h, t, d].astype("float32"), "b")
        y = product(a, kept)
        scale = tirx.const(int(head_dim) ** -0.5, "float32")
        return te.compute(shape, lambda b, h, r, t: y[b, h, r, t] * scale + mask[r // group, t], "masked")

    return importer.block_builder.emit_te(scores, *importer.retrieve_args(node))


def _convert_mix(node: torch.fx.Node, importer: Any) -> relax.Var:
    attention, values, q = importer.retrieve_args(node)
    rows, heads, head_dim = q.ty.shape

    def mix(attention: te.Tensor, values: te.Tensor) -> te.Tensor:
        batch, kv_heads, _, seen = attention.shape
        kept = te.compute(
            (batch, kv_heads, seen, head_dim), lambda b, h, t, d: values[b, h, t, d].astype("float32"), "b"
        )
        return product(attention, kept, inner_depth=False)

    def by_row(y: te.Tensor, like: te.Tensor) -> te.Tensor:
        group = int(heads) // int(y.shape[1])
        length = y.shape[2] // group

        def at(m: Any, c: Any) -> Any:
            head = c // head_dim
            return y[m // length, head // group, m % length * group + head % group, c % head_dim]

        return te.compute((rows, heads * head_dim), at, "by_row")

    y = importer.block_builder.emit_te(mix, attention, values)
    return importer.block_builder.emit_te(by_row, y, q)
