"""Every catalogue op in TVM's Relax, scheduled by the rules of ``shipway.schedule``, on torch CPU tensors.

All sizes but head_dim are symbolic: one library per dtype serves the ops without a KV cache, one more per dtype and
head_dim the others. Tensors are shared through DLPack, the KV cache is written in place; what is not contiguous, or
does not start on a cache line, is copied first (and such a KV cache back). Attention runs sequence by sequence, on the
valid part of the cache. The parts are those of the ``tvm-dlight`` route; its one-row products, whose sizes are fixed,
have a schedule of their own there, which ``tests/test_schedule_rules.py`` checks.
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
from shipway.ops.attention import visible
from shipway.ops.data import sequences
from shipway.ops.qkv_rope_append import positions_of
from shipway.schedule import cpu_rules, library
from shipway.schedule.library import PRODUCT, linear, product, widened

_ACT = {"f32": "float32", "bf16": "bfloat16"}
_LIBRARY = "ops.so"
_LINE = 64  # bytes: TVM assumes that tensors start on a cache line


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op in one activation dtype.

    TVM's thread pool, one per process, gets as many threads as PyTorch has.

    Args:
        dtype: ``"f32"`` or ``"bf16"``: activations, matrices and KV cache.
        head_dim: head_dim of the ops with a KV cache.

    Returns:
        A function per catalogue op on torch CPU tensors, arguments as in the op's reference.
    """
    tvm.get_global_func("runtime.config_threadpool")(1, torch.get_num_threads())
    call = partial(_call, _machine(dtype, None))
    with_cache = _machine(dtype, head_dim)
    attend = partial(_attention, partial(_call, with_cache))
    return {
        "embedding": partial(call, "embedding"),
        "rms_norm": lambda x, weight, eps: call("rms_norm", x, weight, _number(eps)),
        "rope": partial(call, "rope"),
        "qkv_rope_append": partial(_qkv_rope_append, with_cache),
        "attention_prefill": attend,
        "attention_decode": attend,
        "linear": partial(call, "linear"),
        "linear_residual": partial(call, "linear_residual"),
        "gate_up_silu": partial(call, "gate_up_silu"),
        "mlp": partial(call, "mlp"),
        "lm_head": partial(call, "lm_head"),
        "greedy": partial(call, "greedy"),
        "sample": partial(_sample, call),
    }


# Calls.


def _call(machine: relax.VirtualMachine, name: str, *arguments: torch.Tensor) -> torch.Tensor:
    return from_dlpack(machine[name](*map(_shared, arguments)))


def _shared(x: torch.Tensor) -> tvm.runtime.Tensor:
    x = x.detach().contiguous()
    if x.data_ptr() % _LINE or not x.numel():  # an empty array of NumPy's has strides of 0, which TVM refuses
        x = torch.empty(x.shape, dtype=x.dtype).copy_(x)
    return tvm.runtime.from_dlpack(x)


def _number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def _qkv_rope_append(
    machine: relax.VirtualMachine,
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
) -> torch.Tensor:
    positions = positions_of(offsets.numpy(), start.numpy()).astype(np.int32)
    slots = np.repeat(np.arange(len(start)), np.diff(offsets.numpy()))
    _, layers, _, capacity, kv_heads, head_dim = cache.shape
    # Rows of the cache seen as [rows, kv_heads, head_dim]: a key's, and its value's one capacity further on.
    rows = ((slots * layers + layer) * 2 * capacity + positions).astype(np.int32)
    at = (torch.from_numpy(index) for index in (positions, rows, rows + np.int32(capacity)))
    given = (x, wq, wk, wv, bias_q, bias_k, bias_v, norm_q, norm_k)
    function = machine[_variant(bias_q is not None, norm_q is not None)]
    kept = cache.reshape(-1, kv_heads, head_dim)
    tensors = (*(tensor for tensor in given if tensor is not None), _number(eps), table, kept, *at)
    q, written = map(from_dlpack, function(*map(_shared, tensors)))
    if written.data_ptr() != cache.data_ptr():
        cache.copy_(written.view(cache.shape))
    return q


def _attention(
    call: Callable[..., torch.Tensor],
    q: torch.Tensor,
    cache: torch.Tensor,
    offsets: torch.Tensor,
    start: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype)
    kv_heads, head_dim = cache.shape[-2:]
    for b, new, cached, total in sequences(offsets.numpy(), start.numpy()):
        seeing = slice(new.start + max(-cached, 0), new.stop)  # a token before the first key sees nothing: 0
        length = seeing.stop - seeing.start
        if length <= 0:
            continue
        mask = np.where(visible(length, total, window), np.float32(0), np.float32(-np.inf))
        grouped = q[seeing].reshape(length, kv_heads, -1, head_dim)
        kept = cache[b, layer, :, :total]
        attended = call("attention", grouped, kept[0], kept[1], torch.from_numpy(mask), _number(scale))
        out[seeing] = attended.reshape(length, -1, head_dim)
    return out


def _sample(
    call: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    vocab: int,
) -> torch.Tensor:
    limits = torch.tensor([temperature, top_p], dtype=torch.float32)
    return call("sample", logits[:, :vocab], uniform, limits, torch.tensor([top_k or vocab], dtype=torch.int32))


# Libraries.


def _machine(dtype: str, head_dim: int | None) -> relax.VirtualMachine:
    """The ops that need head_dim fixed, or with ``None`` all others."""
    target = library.cpu_options(torch.get_num_threads())

    def build(directory: Path) -> None:
        builder = relax.BlockBuilder()
        if head_dim is None:
            _define_ops(builder, _ACT[dtype])
        else:
            _define_attention(builder, _ACT[dtype], head_dim)
        library.compile_library(builder.finalize(), tvm.target.Target(target), str(directory / _LIBRARY))

    parts = {
        "sources": source_of(__file__, library.__file__, cpu_rules.__file__),
        "dtype": dtype,
        "head_dim": head_dim,
        "options": target,
        "target": cpu_target(),
        "tvm": tvm.__version__,
    }
    made = artefact("tvm-ops", parts, build)
    return relax.VirtualMachine(tvm.runtime.load_module(str(made.path / _LIBRARY)), tvm.cpu())


def _define(
    builder: relax.BlockBuilder,
    name: str,
    body: Callable[..., relax.Expr],
    arguments: Mapping[str, tuple[Any, ...]],
) -> None:
    """Adds a function ``name(arguments)`` to the module.

    Args:
        builder: The module.
        name: Of the function.
        body: Called with the arguments' variables.
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
            out = builder.emit_output(body(*variables))
        builder.emit_func_output(out)


def _define_ops(builder: relax.BlockBuilder, act: str) -> None:
    emit = builder.emit_te
    times = partial(emit, linear, primfunc_attrs=PRODUCT)
    x, rows = {"x": (act, "T", "K")}, {"rows": ("int32", "R")}
    gated = {**x, "gate": (act, "N", "K"), "up": (act, "N", "K")}

    def gate_up_silu(x: relax.Var, gate: relax.Var, up: relax.Var) -> relax.Expr:
        y = relax.op.multiply(relax.op.nn.silu(times(x, gate)), times(x, up))
        return relax.op.astype(y, act)

    def mlp(x: relax.Var, gate: relax.Var, up: relax.Var, down: relax.Var, residual: relax.Var) -> relax.Expr:
        return relax.op.add(residual, times(builder.emit(gate_up_silu(x, gate, up)), down))

    _define(
        builder,
        "embedding",
        lambda ids, table: emit(_taken, ids, table),
        {"ids": ("int32", "T"), "table": (act, "V", "K")},
    )
    _define(
        builder,
        "rms_norm",
        lambda x, weight, eps: relax.op.astype(emit(_rms_norm, x, weight, eps), act),
        {"x": ("float32", "T", "K"), "weight": ("float32", "K"), "eps": ("float32", 1)},
    )
    _define(
        builder,
        "rope",
        lambda x, table, positions: relax.op.astype(emit(_rotate, x, table, positions), act),
        {"x": (act, "T", "H", "D"), "table": ("float32", "P", "R"), "positions": ("int32", "T")},
    )
    _define(builder, "linear", times, {**x, "w": (act, "N", "K")})
    _define(
        builder,
        "linear_residual",
        lambda x, w, residual: relax.op.add(residual, times(x, w)),
        {**x, "w": (act, "N", "K"), "residual": ("float32", "T", "N")},
    )
    _define(builder, "gate_up_silu", gate_up_silu, gated)
    _define(builder, "mlp", mlp, {**gated, "down": (act, "K", "N"), "residual": ("float32", "T", "K")})
    _define(
        builder,
        "lm_head",
        lambda x, w, rows: emit(
            lambda x, w, rows: product(_taken(rows, x), widened(w, "b")), x, w, rows, primfunc_attrs=PRODUCT
        ),
        {**x, "w": (act, "V", "K"), **rows},
    )
    _define(builder, "greedy", lambda logits: emit(_greedy, logits), {"logits": ("float32", "R", "V")})
    _define(
        builder,
        "sample",
        partial(_sampled, builder),
        {
            "logits": ("float32", "R", "V"),
            "uniform": ("float32", "R"),
            "limits": ("float32", 2),
            "top_k": ("int32", 1),
        },
    )


def _define_attention(builder: relax.BlockBuilder, act: str, head_dim: int) -> None:
    emit = builder.emit_te
    kept = (act, "seen", "kv_heads", head_dim)

    def attention(q: relax.Var, keys: relax.Var, values: relax.Var, mask: relax.Var, scale: relax.Var) -> relax.Expr:
        scores = emit(_scores, q, keys, mask, scale, primfunc_attrs=PRODUCT)
        y = emit(_mix, builder.emit(relax.op.nn.softmax(scores, -1)), values, primfunc_attrs=PRODUCT)
        return emit(_by_token, y, q)

    _define(
        builder,
        "attention",
        attention,
        {
            "q": (act, "length", "kv_heads", "group", head_dim),
            "keys": kept,
            "values": kept,
            "mask": ("float32", "length", "seen"),
            "scale": ("float32", 1),
        },
    )
    for bias in (False, True):
        for norm in (False, True):
            _define_qkv(builder, act, head_dim, bias, norm)


def _variant(bias: bool, norm: bool) -> str:
    return "qkv_rope_append" + "_bias" * bias + "_norm" * norm


def _define_qkv(builder: relax.BlockBuilder, act: str, head_dim: int, bias: bool, norm: bool) -> None:
    emit = builder.emit_te
    columns: dict[str, Any] = {"q": "Nq", "k": ("kv_heads", head_dim), "v": ("kv_heads", head_dim)}
    arguments: dict[str, tuple[Any, ...]] = {"x": (act, "T", "K")}
    arguments |= {f"w{name}": (act, size, "K") for name, size in columns.items()}
    arguments |= {f"bias_{name}": ("float32", size) for name, size in columns.items() if bias}
    arguments |= {f"norm_{name}": ("float32", head_dim) for name in "qk" if norm}
    arguments |= {
        "eps": ("float32", 1),
        "table": ("float32", "P", "R"),
        "cache": (act, "rows", "kv_heads", head_dim),
        **dict.fromkeys(("positions", "key_rows", "value_rows"), ("int32", "T")),
    }

    def body(*variables: relax.Var) -> relax.Expr:
        given = dict(zip(arguments, variables, strict=True))
        heads = {}
        for name in columns:
            y = emit(linear, given["x"], given[f"w{name}"], primfunc_attrs=PRODUCT)
            if bias:
                y = builder.emit(relax.op.add(y, given[f"bias_{name}"]))
            y = emit(_heads, y, given["cache"])
            if name != "v":
                y = emit(_rms_norm, y, given[f"norm_{name}"], given["eps"]) if norm else y
                y = emit(_rotate, y, given["table"], given["positions"])
            heads[name] = builder.emit(relax.op.astype(y, act))
        cache = given["cache"]
        for name, rows in (("k", given["key_rows"]), ("v", given["value_rows"])):
            function = builder.add_func(_append(cache.ty, heads[name].ty, act), "append")
            written = relax.op.call_tir_inplace(function, (cache, heads[name], rows), 0, cache.ty)
            cache = builder.emit(written)
        return relax.Tuple([heads["q"], cache])

    _define(builder, _variant(bias, norm), body, arguments)


# Stages.


def _taken(rows: te.Tensor, table: te.Tensor) -> te.Tensor:
    """``table[rows]`` in float32."""
    return te.compute((rows.shape[0], table.shape[1]), lambda m, k: table[rows[m], k].astype("float32"), "a")


def _rms_norm(x: te.Tensor, weight: te.Tensor, eps: te.Tensor) -> te.Tensor:
    """Over the last axis; Relax's own operator wants eps at compile time."""
    width = x.shape[-1]
    k = te.reduce_axis((0, width), "k")
    squares = te.compute(x.shape[:-1], lambda *at: te.sum(x[(*at, k)] * x[(*at, k)], axis=k), "squares")
    return te.compute(
        x.shape,
        lambda *at: x[at] * tirx.rsqrt(squares[at[:-1]] / tirx.Cast("float32", width) + eps[0]) * weight[at[-1]],
        "normed",
    )


def _rotate(x: te.Tensor, table: te.Tensor, positions: te.Tensor) -> te.Tensor:
    """Rotates the first ``table.shape[1]`` elements of the heads; float32."""
    half = table.shape[1] // 2

    def rotated(t: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.Expr:
        def element(i: tirx.Expr) -> tirx.Expr:
            return x[t, h, i].astype("float32")

        def cos(i: tirx.Expr) -> tirx.Expr:
            return table[positions[t], i]

        def sin(i: tirx.Expr) -> tirx.Expr:
            return table[positions[t], half + i]

        low = element(d) * cos(d) - element(d + half) * sin(d)
        high = element(d) * cos(d - half) + element(d - half) * sin(d - half)
        return tirx.if_then_else(d < half, low, tirx.if_then_else(d < 2 * half, high, element(d)))

    return te.compute(x.shape, rotated, "rotated")


def _heads(y: te.Tensor, cache: te.Tensor) -> te.Tensor:
    """``[T, heads * head_dim]`` as ``[T, heads, head_dim]``."""
    head_dim = cache.shape[2]
    shape = (y.shape[0], y.shape[1] // head_dim, head_dim)
    return te.compute(shape, lambda t, h, d: y[t, h * head_dim + d], "heads")


def _append(cache: relax.TensorType, new: relax.TensorType, dtype: str) -> tirx.PrimFunc:
    """Writes ``new [T, kv_heads, head_dim]`` to rows of ``cache [rows, kv_heads, head_dim]``."""
    from tvm.script import tirx as T

    (tokens, heads, head_dim), cache_shape = new.shape, list(cache.shape)

    @T.prim_func(s_tir=True, private=True)
    def function(cache_handle: T.handle, new_handle: T.handle, rows_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True})
        cache = T.match_buffer(cache_handle, cache_shape, dtype)
        new = T.match_buffer(new_handle, (tokens, heads, head_dim), dtype)
        rows = T.match_buffer(rows_handle, (tokens,), "int32")
        for t, h, d in T.grid(tokens, heads, head_dim):
            with T.sblock("append"):
                vt, vh, vd = T.axis.remap("SSS", [t, h, d])
                cache[rows[vt], vh, vd] = new[vt, vh, vd]

    return function


def _scores(q: te.Tensor, keys: te.Tensor, mask: te.Tensor, scale: te.Tensor) -> te.Tensor:
    """Scaled and masked products ``[kv_heads, length * group, seen]``."""
    length, kv_heads, group, head_dim = q.shape
    a = te.compute(
        (kv_heads, length * group, head_dim), lambda h, r, d: q[r // group, h, r % group, d].astype("float32"), "a"
    )
    b = te.compute((kv_heads, keys.shape[0], head_dim), lambda h, t, d: keys[t, h, d].astype("float32"), "b")
    y = product(a, b)
    return te.compute(y.shape, lambda h, r, t: y[h, r, t] * scale[0] + mask[r // group, t], "masked")


def _mix(attention: te.Tensor, values: te.Tensor) -> te.Tensor:
    """Sums of values ``[kv_heads, length * group, head_dim]``."""
    seen, kv_heads, head_dim = values.shape
    b = te.compute((kv_heads, seen, head_dim), lambda h, t, d: values[t, h, d].astype("float32"), "b")
    return product(attention, b, inner_depth=False)


def _by_token(y: te.Tensor, q: te.Tensor) -> te.Tensor:
    group = q.shape[2]
    return te.compute(q.shape, lambda s, h, g, d: y[h, s * group + g, d].astype(q.dtype), "by_token")


def _number_or_lowest(value: tirx.Expr) -> tirx.Expr:
    return tirx.Select(tirx.isnan(value), _LOWEST, value)


_LOWEST = tirx.const(float("-inf"), "float32")


def _greedy(logits: te.Tensor) -> te.Tensor:
    """Index of the largest value of each row, the lowest of equal ones; NaN counts as minus infinity."""

    def better(a: tuple[tirx.Expr, ...], b: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
        first = tirx.any(a[1] > b[1], tirx.all(a[1] == b[1], a[0] < b[0]))
        return tirx.Select(first, a[0], b[0]), tirx.Select(first, a[1], b[1])

    def nothing(index: str, value: str) -> tuple[tirx.Expr, ...]:
        return tirx.const(2**31 - 1, index), tirx.const(float("-inf"), value)

    largest = te.comm_reducer(better, nothing, "largest")
    rows, width = logits.shape
    k = te.reduce_axis((0, width), "k")
    index, _ = te.compute(
        (rows,), lambda r: largest((k.var.astype("int32"), _number_or_lowest(logits[r, k])), axis=k), "best"
    )
    return index


def _sampled(
    builder: relax.BlockBuilder, logits: relax.Var, uniform: relax.Var, limits: relax.Var, top_k: relax.Var
) -> relax.Expr:
    """One id per row; ``limits`` are temperature and top_p."""
    emit = builder.emit_te
    known = emit(lambda x: te.compute(x.shape, lambda *at: _number_or_lowest(x[at]), "known"), logits)
    order = builder.emit(relax.op.argsort(known, -1, descending=True, dtype="int32"))
    weights = emit(_weights, known, order, limits, top_k)
    mass = builder.emit(relax.op.cumsum(weights, 1))
    weights = emit(_nucleus, weights, mass, limits)
    mass = builder.emit(relax.op.cumsum(weights, 1))
    return emit(_chosen, weights, mass, uniform, order)


def _weights(scores: te.Tensor, order: te.Tensor, limits: te.Tensor, top_k: te.Tensor) -> te.Tensor:
    """Unnormalised probabilities by falling score; 0 beyond the first ``top_k``."""

    def weight(r: tirx.Var, j: tirx.Var) -> tirx.Expr:
        largest = te.max(scores[r, order[r, 0]], tirx.min_value("float32"))
        return tirx.Select(j < top_k[0], tirx.exp((scores[r, order[r, j]] - largest) / limits[0]), 0.0)

    return te.compute(scores.shape, weight, "weights")


def _nucleus(weights: te.Tensor, mass: te.Tensor, limits: te.Tensor) -> te.Tensor:
    """0 beyond the smallest set whose mass reaches ``top_p``."""
    last = weights.shape[1] - 1

    def weight(r: tirx.Var, j: tirx.Var) -> tirx.Expr:
        before = tirx.if_then_else(j > 0, mass[r, j - 1], 0.0)
        kept = tirx.any(j == 0, limits[1] >= 1.0, before < limits[1] * mass[r, last])
        return tirx.Select(kept, weights[r, j], 0.0)

    return te.compute(weights.shape, weight, "nucleus")


def _chosen(weights: te.Tensor, mass: te.Tensor, uniform: te.Tensor, order: te.Tensor) -> te.Tensor:
    """The first id whose mass exceeds ``uniform`` times all mass, of those with a weight."""
    rows, width = weights.shape
    k, m = te.reduce_axis((0, width), "k"), te.reduce_axis((0, width), "m")
    passed = te.compute(
        (rows,),
        lambda r: te.sum((mass[r, k] <= uniform[r] * mass[r, width - 1]).astype("int32"), axis=k),
        "passed",
    )
    count = te.compute((rows,), lambda r: te.sum((weights[r, m] > 0.0).astype("int32"), axis=m), "count")
    return te.compute(
        (rows,), lambda r: order[r, te.max(te.min(passed[r], count[r] - 1), tirx.const(0, "int32"))], "chosen"
    )
