"""Every catalogue op in TVM's Relax, scheduled by the rules of ``shipway.schedule``, on torch CPU tensors.

All sizes but head_dim are symbolic: one library per dtype serves the ops without a KV cache, one more per dtype and
head_dim the others. As in the ``tvm-dlight`` route, whose parts these are, products of one row have functions of their
own, because their schedule wants to know sizes: there are some for the sizes below. Tensors are shared through DLPack,
the KV cache is written in place; what is not contiguous, or does not start on a cache line, is copied first (and such a
KV cache back). Attention runs sequence by sequence, on the valid part of the cache. ``greedy``, a sum of no kind the
rules know, stays as TVM makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from torch.utils.dlpack import from_dlpack
from tvm import relax, te, tirx

from shipway.artefacts import artefact, cpu_target, source_of
from shipway.ops import tvm_stages as stages
from shipway.ops.attention_reference import visible
from shipway.ops.data import sequences
from shipway.ops.qkv_rope_append import positions_of
from shipway.schedule import cpu_rules, products, shared_library
from shipway.schedule.products import PRODUCT, linear, product, widened
from shipway.signature import SIGNATURES, Number

_ACT = {"f32": "float32", "bf16": "bfloat16"}
_LIBRARY = "ops.so"
_LINE = 64  # bytes: TVM assumes that tensors start on a cache line

_DEPTHS = (33, 576, 1536)
"""Sums of one-row products that have a function of their own: the default model's, and one no vector divides."""

_HIDDEN = 576
"""The same of ``qkv_rope_append``, which has four variants."""

_GROUPS = (1, 3, 4)
"""Query heads per KV head whose decode step has a function of its own."""

_ONE_ROW: Mapping[str, tuple[Mapping[str, int], ...]] = {
    **{op: tuple({"T": 1, "K": depth} for depth in _DEPTHS) for op in ("linear", "linear_residual", "gate_up_silu")},
    "lm_head": tuple({"R": 1, "K": depth} for depth in _DEPTHS),
    "mlp": ({"T": 1, "K": _HIDDEN, "N": 1536}, {"T": 1, "K": _HIDDEN, "N": 65}),
}
"""Sizes of one-row calls that have a function of their own, ``OP_1`` the first of an op."""


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op in one activation dtype.

    TVM's thread pool, one per process, gets as many threads as PyTorch has.

    Args:
        dtype: ``"f32"`` or ``"bf16"``: activations, matrices and KV cache.
        head_dim: head_dim of the ops with a KV cache.

    Returns:
        A function per catalogue op on torch CPU tensors, arguments as in the op's reference; ``bind(*arguments)`` of
        such a function returns the call alone, its arguments TVM's tensors.
    """
    tvm.get_global_func("runtime.config_threadpool")(1, torch.get_num_threads())
    machine, with_cache = _machine(dtype, None), _machine(dtype, head_dim)
    attention = _Attention(with_cache)
    return {
        **{name: _Rows(machine, name) for name in _bodies(_ACT[dtype])},
        "qkv_rope_append": _QkvRopeAppend(with_cache),
        "attention_prefill": attention,
        "attention_decode": attention,
    }


# Calls.


def _shared(x: torch.Tensor) -> tvm.runtime.Tensor:
    x = x.detach().contiguous()
    if x.data_ptr() % _LINE or not x.numel():  # an empty array of NumPy's has strides of 0, which TVM refuses
        x = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return tvm.runtime.from_dlpack(x)


def _number(kind: type, value: float) -> tvm.runtime.Tensor:
    return _shared(torch.tensor([value], dtype=torch.float32 if kind is float else torch.int32))


class _Rows:
    """An op without a KV cache."""

    def __init__(self, machine: relax.VirtualMachine, op: str) -> None:
        self._op, self._any = op, machine[op]
        one_row = enumerate(_ONE_ROW.get(op, ()), 1)
        self._one_row = [(tuple(sizes.items()), machine[f"{op}_{index}"]) for index, sizes in one_row]

    def bind(self, *arguments: Any) -> Callable[[], tvm.runtime.Tensor]:
        """Returns the call alone."""
        tensors = []
        sizes: dict[str | int, int] = {}
        for kind, value in zip(SIGNATURES[self._op].values(), arguments, strict=True):
            if isinstance(kind, Number):
                tensors.append(_number(kind.kind, value))
            else:
                sizes.update(zip(kind.dims, value.shape, strict=True))
                tensors.append(_shared(value))
        own = (function for fixed, function in self._one_row if all(sizes[name] == size for name, size in fixed))
        return partial(next(own, self._any), *tensors)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Runs the op."""
        return from_dlpack(self.bind(*arguments)())


class _QkvRopeAppend:
    def __init__(self, machine: relax.VirtualMachine) -> None:
        self._machine = machine

    def bind(
        self,
        x: torch.Tensor,
        wq: torch.Tensor,
        wk: torch.Tensor,
        wv: torch.Tensor,
        bias_q: torch.Tensor | None,
        bias_k: torch.Tensor | None,
        bias_v: torch.Tensor | None,
        norm_q: torch.Tensor | None,
        norm_k: torch.Tensor | None,
        eps: float,
        table: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
    ) -> Callable[[], Any]:
        """Returns the call alone, with the append."""
        positions = positions_of(offsets.numpy(), start.numpy()).astype(np.int32)
        slots = np.repeat(np.arange(len(start)), np.diff(offsets.numpy()))
        _, layers, _, capacity, kv_heads, head_dim = cache.shape
        # Rows of the cache seen as [rows, kv_heads, head_dim]: a key's, and its value's one capacity further on.
        rows = ((slots * layers + layer) * 2 * capacity + positions).astype(np.int32)
        at = (torch.from_numpy(index) for index in (positions, rows, rows + np.int32(capacity)))
        given = (x, wq, wk, wv, bias_q, bias_k, bias_v, norm_q, norm_k)
        depth = _HIDDEN if x.shape == (1, _HIDDEN) else "K"
        return partial(
            self._machine[_variant(bias_q is not None, norm_q is not None, depth)],
            *(_shared(tensor) for tensor in given if tensor is not None),
            _number(float, eps),
            *map(_shared, (table, cache.view(-1, kv_heads, head_dim), *at)),
        )

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Runs the op."""
        q, written = map(from_dlpack, self.bind(*arguments)())
        cache = arguments[list(SIGNATURES["qkv_rope_append"]).index("cache")]
        if written.data_ptr() != cache.data_ptr():
            cache.copy_(written.view(cache.shape))
        return q


class _Attention:
    def __init__(self, machine: relax.VirtualMachine) -> None:
        self._any = machine["attention"]
        self._step = {group: machine[f"attention_{group}"] for group in _GROUPS}

    def bind(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        offsets: torch.Tensor,
        start: torch.Tensor,
        layer: int,
        scale: float,
        window: int,
    ) -> Callable[[], list[tuple[slice, tvm.runtime.Tensor]]]:
        """Returns the calls alone, one per sequence with tokens that see something; each gives these rows."""
        kv_heads, head_dim = cache.shape[-2:]
        calls = []
        for b, new, cached, total in sequences(offsets.numpy(), start.numpy()):
            seeing = slice(new.start + max(-cached, 0), new.stop)  # a token before the first key sees nothing
            length = seeing.stop - seeing.start
            if length <= 0:
                continue
            mask = np.where(visible(length, total, window), np.float32(0), np.float32(-np.inf))
            grouped = q[seeing].reshape(length, kv_heads, -1, head_dim)
            function = self._step.get(grouped.shape[2], self._any) if length == 1 else self._any
            tensors = map(_shared, (grouped, *cache[b, layer, :, :total], torch.from_numpy(mask)))
            calls.append((seeing, partial(function, *tensors, _number(float, scale))))
        return lambda: [(seeing, call()) for seeing, call in calls]

    def __call__(self, q: torch.Tensor, *others: Any) -> torch.Tensor:
        """Runs the op."""
        out = torch.zeros(q.shape, dtype=q.dtype)
        for seeing, attended in self.bind(q, *others)():
            out[seeing] = from_dlpack(attended).reshape(-1, *q.shape[1:])
        return out


# Libraries.


def _machine(dtype: str, head_dim: int | None) -> relax.VirtualMachine:
    """The ops that need head_dim fixed, or with ``None`` all others."""
    target = shared_library.cpu_options(torch.get_num_threads())

    def build(directory: Path) -> None:
        builder = relax.BlockBuilder()
        if head_dim is None:
            _define_ops(builder, _ACT[dtype])
        else:
            _define_attention(builder, _ACT[dtype], head_dim)
        shared_library.compile_library(builder.finalize(), tvm.target.Target(target), str(directory / _LIBRARY))

    parts = {
        "sources": source_of(__file__, stages.__file__, shared_library.__file__, products.__file__, cpu_rules.__file__),
        "dtype": dtype,
        "head_dim": head_dim,
        "options": target,
        "target": cpu_target(),
        "tvm": tvm.__version__,
    }
    made = artefact("tvm-ops", parts, build)
    return relax.VirtualMachine(tvm.runtime.load_module(str(made.path / _LIBRARY)), tvm.cpu())


Arguments = Mapping[str, tuple[Any, ...]]
Body = Callable[..., relax.Expr]


def _define(builder: relax.BlockBuilder, name: str, body: Body, arguments: Arguments) -> None:
    """Adds a function ``name(arguments)`` to the module.

    Args:
        builder: The module.
        name: Of the function.
        body: Called with the module and the arguments' variables.
        arguments: ``(dtype, *dims)`` of each; a dim is a number, a name, which stands for one symbolic size, or a name
            and a number: their product.
    """
    sizes: dict[str, tirx.Var] = {}

    def size(dim: str | int | tuple[str, int]) -> Any:
        if isinstance(dim, tuple):
            return size(dim[0]) * dim[1]
        return sizes.setdefault(dim, tirx.Var(dim, "int64")) if isinstance(dim, str) else dim

    variables = [
        relax.Var(key, relax.TensorType([size(dim) for dim in dims], kind)) for key, (kind, *dims) in arguments.items()
    ]
    with builder.function(name, variables):
        with builder.dataflow():
            out = builder.emit_output(body(builder, *variables))
        builder.emit_func_output(out)


def _bodies(act: str) -> Mapping[str, Body]:
    """The ops without a KV cache, by name."""

    def plain(stage: Callable[..., te.Tensor]) -> Body:
        return lambda builder, *arguments: builder.emit_te(stage, *arguments)

    def rounded(stage: Callable[..., te.Tensor]) -> Body:
        return lambda builder, *arguments: relax.op.astype(builder.emit_te(stage, *arguments), act)

    return {
        "embedding": plain(stages.taken),
        "rms_norm": rounded(stages.rms_norm),
        "rope": rounded(stages.rotate),
        "linear": _times,
        "linear_residual": lambda builder, x, w, residual: relax.op.add(residual, _times(builder, x, w)),
        "gate_up_silu": _gate_up_silu,
        "mlp": _mlp,
        "lm_head": _lm_head,
        "greedy": plain(stages.largest),
        "sample": _sample,
    }


def _define_ops(builder: relax.BlockBuilder, act: str) -> None:
    for op, body in _bodies(act).items():
        _define(builder, op, body, _arguments(op, act, {}))
        for index, sizes in enumerate(_ONE_ROW.get(op, ()), 1):
            _define(builder, f"{op}_{index}", body, _arguments(op, act, sizes))


def _arguments(op: str, act: str, fixed: Mapping[str, int]) -> Arguments:
    """An op's arguments by its signature; numbers are tensors of one element."""
    dtypes = {"act": act, "f32": "float32", "int32": "int32"}
    return {
        name: ("float32" if kind.kind is float else "int32", 1)
        if isinstance(kind, Number)
        else (dtypes[kind.dtype], *(fixed.get(str(dim), dim) for dim in kind.dims))
        for name, kind in SIGNATURES[op].items()
    }


def _times(builder: relax.BlockBuilder, x: relax.Expr, w: relax.Var) -> relax.Var:
    return builder.emit_te(linear, x, w, primfunc_attrs=PRODUCT)


def _gate_up_silu(builder: relax.BlockBuilder, x: relax.Var, gate: relax.Var, up: relax.Var) -> relax.Expr:
    y = relax.op.multiply(relax.op.nn.silu(_times(builder, x, gate)), _times(builder, x, up))
    return relax.op.astype(y, x.ty.dtype)


def _mlp(
    builder: relax.BlockBuilder, x: relax.Var, gate: relax.Var, up: relax.Var, down: relax.Var, residual: relax.Var
) -> relax.Expr:
    return relax.op.add(residual, _times(builder, builder.emit(_gate_up_silu(builder, x, gate, up)), down))


def _lm_head(builder: relax.BlockBuilder, x: relax.Var, w: relax.Var, rows: relax.Var) -> relax.Expr:
    def logits(x: te.Tensor, w: te.Tensor, rows: te.Tensor) -> te.Tensor:
        return product(stages.taken(rows, x), widened(w, "b"))

    return builder.emit_te(logits, x, w, rows, primfunc_attrs=PRODUCT)


def _sample(
    builder: relax.BlockBuilder,
    logits: relax.Var,
    uniform: relax.Var,
    temperature: relax.Var,
    top_k: relax.Var,
    top_p: relax.Var,
    vocab: relax.Var,
) -> relax.Expr:
    emit = builder.emit_te
    known = emit(stages.known, logits, vocab)
    order = builder.emit(relax.op.argsort(known, -1, descending=True, dtype="int32"))
    weights = emit(stages.weights, known, order, temperature, top_k)
    mass = builder.emit(relax.op.cumsum(weights, 1))
    weights = emit(stages.nucleus, weights, mass, top_p)
    mass = builder.emit(relax.op.cumsum(weights, 1))
    return emit(stages.chosen, weights, mass, uniform, order)


def _define_attention(builder: relax.BlockBuilder, act: str, head_dim: int) -> None:
    kept = (act, "seen", "kv_heads", head_dim)

    def attention(
        builder: relax.BlockBuilder, q: relax.Var, keys: relax.Var, values: relax.Var, *others: relax.Var
    ) -> relax.Expr:
        scores = builder.emit_te(stages.scores, q, keys, *others, primfunc_attrs=PRODUCT)
        weights = builder.emit(relax.op.nn.softmax(scores, -1))
        return builder.emit_te(stages.by_token, builder.emit_te(stages.mix, weights, values, primfunc_attrs=PRODUCT), q)

    def define(name: str, length: int | str, group: int | str) -> None:
        arguments = {"q": (act, length, "kv_heads", group, head_dim), "keys": kept, "values": kept}
        arguments |= {"mask": ("float32", length, "seen"), "scale": ("float32", 1)}
        _define(builder, name, attention, arguments)

    define("attention", "length", "group")
    for group in _GROUPS:
        define(f"attention_{group}", 1, group)
    for bias in (False, True):
        for norm in (False, True):
            for depth in ("K", _HIDDEN):
                _define_qkv(builder, act, head_dim, bias, norm, depth)


def _variant(bias: bool, norm: bool, depth: int | str) -> str:
    return f"qkv_rope_append_{depth}" + "_bias" * bias + "_norm" * norm


def _define_qkv(builder: relax.BlockBuilder, act: str, head_dim: int, bias: bool, norm: bool, depth: int | str) -> None:
    tokens = "T" if depth == "K" else 1
    columns: dict[str, Any] = {"q": "Nq", "k": ("kv_heads", head_dim), "v": ("kv_heads", head_dim)}
    arguments: dict[str, tuple[Any, ...]] = {"x": (act, tokens, depth)}
    arguments |= {f"w{name}": (act, size, depth) for name, size in columns.items()}
    arguments |= {f"bias_{name}": ("float32", size) for name, size in columns.items() if bias}
    arguments |= {f"norm_{name}": ("float32", head_dim) for name in "qk" if norm}
    arguments |= {
        "eps": ("float32", 1),
        "table": ("float32", "positions", "rotary_dim"),
        "cache": (act, "rows", "kv_heads", head_dim),
        **dict.fromkeys(("at", "key_rows", "value_rows"), ("int32", tokens)),
    }

    def body(builder: relax.BlockBuilder, *variables: relax.Var) -> relax.Expr:
        emit = builder.emit_te
        given = dict(zip(arguments, variables, strict=True))
        heads = {}
        for name in columns:
            y = _times(builder, given["x"], given[f"w{name}"])
            if bias:
                y = builder.emit(relax.op.add(y, given[f"bias_{name}"]))
            y = emit(stages.heads, y, given["cache"])
            if name != "v":
                y = emit(stages.rms_norm, y, given[f"norm_{name}"], given["eps"]) if norm else y
                y = emit(stages.rotate, y, given["table"], given["at"])
            heads[name] = builder.emit(relax.op.astype(y, act))
        cache = given["cache"]
        for name, rows in (("k", given["key_rows"]), ("v", given["value_rows"])):
            function = builder.add_func(stages.append(cache.ty, heads[name].ty, act), "append")
            written = relax.op.call_tir_inplace(function, (cache, heads[name], rows), 0, cache.ty)
            cache = builder.emit(written)
        return relax.Tuple([heads["q"], cache])

    _define(builder, _variant(bias, norm, depth), body, arguments)
