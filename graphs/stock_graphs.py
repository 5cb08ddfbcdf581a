"""The stock MAX graphs, none of our kernels, that ``stock_ops`` makes the catalogue's ops of.

All dimensions are symbolic, head_dim too, so one compile serves every shape. Stock kernels compile slowly (a matrix
product with symbolic dimensions takes half a minute), so there are few: both dtypes share one module, and what is f32
in both dtypes is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable

from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Graph, Module, TensorType, TensorValue, ops

from shipway.graphs.ops import DTYPES

EPSILONS = (1e-5, 1e-6, 256e-5, 256e-6)
"""``ops.rms_norm`` takes epsilon as a constant: a graph each. Those of the models, and those times 256, by which the
check of RMSNorm's scale invariance scales them."""

ACTS = ("f32", "bf16")
"""Activation dtypes."""

_F32, _INT = DType.float32, DType.int64
_DEVICE = DeviceRef.CPU()


def build_graphs(module: Module) -> None:
    """Adds every graph that the ops call to ``module``."""

    def add(name: str, body: Callable[..., TensorValue | None], *inputs: TensorType | BufferType) -> None:
        with Graph(name, input_types=inputs, module=module) as graph:
            out = body(*(value.buffer if isinstance(value, BufferValue) else value.tensor for value in graph.inputs))
            graph.output(*(() if out is None else (out,)))

    def f32(*dims: object) -> TensorType:
        return TensorType(_F32, dims, _DEVICE)

    index = TensorType(_INT, [], _DEVICE)
    for dtype in ACTS:
        act = DTYPES[dtype]
        rows, cache = TensorType(act, ["T", "K"], _DEVICE), BufferType(act, [2, "S", "row"], _DEVICE)
        new = TensorType(act, ["T", "row"], _DEVICE)
        ids = TensorType(DType.int32, ["R"], _DEVICE)
        add(f"gather_{dtype}", lambda x, ids: ops.gather(x, ids, 0), rows, ids)
        add(f"product_{dtype}", lambda x, w: ops.cast(x @ w.T, _F32), rows, TensorType(act, ["N", "K"], _DEVICE))
        add(f"append_{dtype}", _append, cache, new, new, index)
    add("widen", lambda x: ops.cast(x, _F32), TensorType(DType.bfloat16, ["n"], _DEVICE))
    add("narrow", lambda x: ops.cast(x, DType.bfloat16), f32("n"))
    add("add", lambda x, y: x + y, f32("n"), f32("n"))
    add("bias", lambda x, y: x + y, f32("T", "N"), f32("N"))
    add("silu_product", lambda gate, up: ops.silu(gate) * up, f32("n"), f32("n"))
    for eps in EPSILONS:
        add(f"rms_norm_{eps:g}", lambda x, weight, eps=eps: ops.rms_norm(x, weight, eps), f32("T", "K"), f32("K"))
    positions = TensorType(DType.int32, ["T"], _DEVICE)
    add("rotate", _rotate, f32("T", "heads", "D"), f32("positions", 2, "half"), positions)
    kept = f32("keys", "kv_heads", "D")
    at = TensorType(_INT, ["T"], _DEVICE)
    add("seen", _seen, at, TensorType(_INT, ["keys"], _DEVICE), index)
    seen = TensorType(DType.bool, ["T", "keys"], _DEVICE)
    add("attention", _attention, f32("T", "kv_heads", "group", "D"), kept, kept, f32(), seen, at)
    add("greedy", _greedy, f32("R", "V"))
    add("order", _order, f32("V"), index)
    uniform, ranks = f32("R"), TensorType(_INT, ["R", "V"], _DEVICE)
    add("sample", _sample, f32("R", "V"), ranks, uniform, f32(), index, f32(), index)


def _append(cache: BufferValue, keys: TensorValue, values: TensorValue, start: TensorValue) -> None:
    """Writes rows ``[T, row]`` of keys and values from row ``start`` of ``cache [2, S, row]`` on."""
    tokens = keys.shape[0]
    end = start + ops.shape_to_tensor([tokens])[0]
    for kind, new in enumerate((keys, values)):
        cache[kind, (slice(start, end), tokens), :] = new


def _rotate(x: TensorValue, table: TensorValue, positions: TensorValue) -> TensorValue:
    """Rotates the first ``2 * half`` elements of the heads of ``x [T, heads, D]``; ``table [positions, 2, half]`` holds
    cosines and sines."""
    half, size = table.shape[2], x.shape[2]
    angles = ops.gather(table, positions, 0)
    cos, sin = angles[:, 0:1, :], angles[:, 1:2, :]
    n, end = (ops.shape_to_tensor([dim])[0] for dim in (half, size))
    a, b = x[:, :, (slice(0, n), half)], x[:, :, (slice(n, 2 * n), half)]
    rest = x[:, :, (slice(2 * n, end), size - 2 * half)]
    return ops.concat([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _seen(at: TensorValue, keys: TensorValue, window: TensorValue) -> TensorValue:
    """Which ``keys [keys]`` the rows ``at [T]`` see, both int64 positions: ``[T, keys]``.

    A graph of its own: fused into an operation of higher rank, MAX 26.7 computes element (0, 0) of the difference
    everywhere.
    """
    distance = ops.unsqueeze(at, 1) - ops.unsqueeze(keys, 0)
    return ops.logical_and(distance >= 0, distance < window)


def _attention(
    q: TensorValue, keys: TensorValue, values: TensorValue, scale: TensorValue, seen: TensorValue, at: TensorValue
) -> TensorValue:
    """Attention of one sequence.

    Args:
        q: ``[T, kv_heads, group, D]``.
        keys: ``[keys, kv_heads, D]``, as ``values``.
        scale: Factor on the scores.
        seen: Which keys each row sees, ``[T, keys]``.
        at: int64 positions of the rows, ``[T]``, below 0 where a row sees no key.
    """
    new, kv_heads, group, size = q.shape
    total = keys.shape[0]
    q = ops.permute(q, [1, 2, 0, 3]).reshape([kv_heads, group * new, size]) * scale
    scores = (q @ ops.permute(keys, [1, 2, 0])).reshape([kv_heads, group, new, total])
    weights = ops.softmax(ops.where(seen, scores, _constant(float("-inf")))).reshape([kv_heads, group * new, total])
    out = (weights @ ops.permute(values, [1, 0, 2])).reshape([kv_heads, group, new, size])
    # Of a row that sees no key the softmax makes NaN; it is 0.
    sees = (at >= 0).reshape([new, 1, 1, 1])
    return ops.where(sees, ops.permute(out, [2, 0, 1, 3]), _constant(0.0))


def _greedy(logits: TensorValue) -> TensorValue:
    numbers = ops.where(ops.is_nan(logits), _constant(float("-inf")), logits)
    return ops.cast(ops.squeeze(ops.argmax(numbers, -1), -1), DType.int32)


def _allowed(logits: TensorValue, vocab: TensorValue) -> TensorValue:
    """The logits ``[..., V]``, NaN and those from ``vocab`` on minus infinity."""
    hidden = ops.logical_or(_ids(logits) >= vocab, ops.is_nan(logits))
    return ops.where(hidden, _constant(float("-inf")), logits)


def _order(logits: TensorValue, vocab: TensorValue) -> TensorValue:
    """The ids of ``logits [V]`` by falling logit, ties by lower id: int64 ``[V]``."""
    logits = _allowed(logits, vocab)
    order = ops.argsort(logits, ascending=False)
    # The sort is not stable: equal logits, now neighbours, are sorted once more by id.
    scores, ids = ops.gather(logits, order, 0), _ids(logits)
    zero = ops.constant(0, _INT, device=_DEVICE)
    above = ops.gather(scores, ops.max(ids - 1, zero), 0)
    distinct = ops.cumsum(ops.cast(above > scores, _INT))
    width = ops.shape_to_tensor([logits.shape[0]])[0]
    return ops.gather(order, ops.argsort(distinct * width + order), 0)


def _ids(x: TensorValue) -> TensorValue:
    end = ops.shape_to_tensor([x.shape[-1]])[0]
    return ops.range(0, end, 1, out_dim=x.shape[-1], dtype=_INT, device=_DEVICE)


def _sample(
    logits: TensorValue,
    order: TensorValue,
    uniform: TensorValue,
    temperature: TensorValue,
    top_k: TensorValue,
    top_p: TensorValue,
    vocab: TensorValue,
) -> TensorValue:
    """Ids ``[R]`` drawn from ``logits [R, V]``, whose ids by falling logit are ``order [R, V]``.

    Args:
        logits: ``[R, V]``.
        order: int64 ``[R, V]``.
        uniform: ``[R]``, the number each row draws by.
        temperature: Divides the logits.
        top_k: Tokens kept, at least 1.
        top_p: Mass kept.
        vocab: Ids that count.
    """
    rank = _ids(logits)
    scores = ops.gather_nd(_allowed(logits, vocab), ops.unsqueeze(order, 2), batch_dims=1)
    # The lowest finite number stands for a largest logit of minus infinity, from which nothing can be subtracted.
    weights = ops.exp((scores - ops.max(scores[:, 0:1], _constant(-3e38))) / temperature)
    zero = _constant(0.0)
    weights = ops.where(rank < ops.min(ops.stack([top_k, vocab])), weights, zero)
    before = ops.cumsum(weights, -1, exclusive=True)
    weights = ops.where(ops.logical_or(before < top_p * ops.sum(weights, -1), rank == 0), weights, zero)
    mass = ops.cumsum(weights, -1)
    passed = ops.sum(ops.cast(mass <= ops.unsqueeze(uniform, 1) * mass[:, -1:], _INT), -1)
    kept = ops.sum(ops.cast(weights > 0, _INT), -1)
    at = ops.where(passed < kept, passed, ops.max(kept - 1, ops.constant(0, _INT, device=_DEVICE)))
    return ops.cast(ops.squeeze(ops.gather_nd(order, ops.unsqueeze(at, 2), batch_dims=1), 1), DType.int32)


def _constant(value: float) -> TensorValue:
    return ops.constant(value, _F32, device=_DEVICE)
