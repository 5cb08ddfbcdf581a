"""Stages of the ops' ``tvm`` rows beside the products: tensor expressions, and the append to the KV cache."""

from __future__ import annotations

from tvm import relax, te, tirx

from shipway.schedule.products import product


def taken(rows: te.Tensor, table: te.Tensor) -> te.Tensor:
    """``table[rows]`` in float32."""
    return te.compute((rows.shape[0], table.shape[1]), lambda m, k: table[rows[m], k].astype("float32"), "a")


def rms_norm(x: te.Tensor, weight: te.Tensor, eps: te.Tensor) -> te.Tensor:
    """Over the last axis; Relax's own operator wants eps at compile time."""
    width = x.shape[-1]
    k = te.reduce_axis((0, width), "k")
    squares = te.compute(x.shape[:-1], lambda *at: te.sum(x[(*at, k)] * x[(*at, k)], axis=k), "squares")
    return te.compute(
        x.shape,
        lambda *at: x[at] * tirx.rsqrt(squares[at[:-1]] / tirx.Cast("float32", width) + eps[0]) * weight[at[-1]],
        "normed",
    )


def rotate(x: te.Tensor, table: te.Tensor, positions: te.Tensor) -> te.Tensor:
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


def heads(y: te.Tensor, cache: te.Tensor) -> te.Tensor:
    """``[T, heads * head_dim]`` as ``[T, heads, head_dim]``."""
    head_dim = cache.shape[2]
    shape = (y.shape[0], y.shape[1] // head_dim, head_dim)
    return te.compute(shape, lambda t, h, d: y[t, h * head_dim + d], "heads")


def append(cache: relax.TensorType, new: relax.TensorType, dtype: str) -> tirx.PrimFunc:
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


def scores(q: te.Tensor, keys: te.Tensor, mask: te.Tensor, scale: te.Tensor) -> te.Tensor:
    """Scaled and masked products ``[kv_heads, length * group, seen]``."""
    length, kv_heads, group, head_dim = q.shape
    a = te.compute(
        (kv_heads, length * group, head_dim), lambda h, r, d: q[r // group, h, r % group, d].astype("float32"), "a"
    )
    b = te.compute((kv_heads, keys.shape[0], head_dim), lambda h, t, d: keys[t, h, d].astype("float32"), "b")
    y = product(a, b)
    return te.compute(y.shape, lambda h, r, t: y[h, r, t] * scale[0] + mask[r // group, t], "masked")


def mix(attention: te.Tensor, values: te.Tensor) -> te.Tensor:
    """Sums of values ``[kv_heads, length * group, head_dim]``."""
    seen, kv_heads, head_dim = values.shape
    b = te.compute((kv_heads, seen, head_dim), lambda h, t, d: values[t, h, d].astype("float32"), "b")
    return product(attention, b, inner_depth=False)


def by_token(y: te.Tensor, q: te.Tensor) -> te.Tensor:
    """``y [kv_heads, length * group, head_dim]`` in the shape and dtype of ``q``."""
    group = q.shape[2]
    return te.compute(q.shape, lambda s, h, g, d: y[h, s * group + g, d].astype(q.dtype), "by_token")


def largest(logits: te.Tensor) -> te.Tensor:
    """Index of the largest value of each row, the lowest of equal ones; NaN counts as minus infinity."""

    def better(a: tuple[tirx.Expr, ...], b: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
        first = tirx.any(a[1] > b[1], tirx.all(a[1] == b[1], a[0] < b[0]))
        return tirx.Select(first, a[0], b[0]), tirx.Select(first, a[1], b[1])

    def nothing(index: str, value: str) -> tuple[tirx.Expr, ...]:
        return tirx.const(2**31 - 1, index), tirx.const(float("-inf"), value)

    largest = te.comm_reducer(better, nothing, "largest")
    rows, width = logits.shape
    k = te.reduce_axis((0, width), "k")
    index, _ = te.compute((rows,), lambda r: largest((k.var.astype("int32"), or_lowest(logits[r, k])), axis=k), "best")
    return index


def or_lowest(value: tirx.Expr) -> tirx.Expr:
    """``value``, or minus infinity for NaN."""
    return tirx.Select(tirx.isnan(value), tirx.const(float("-inf"), "float32"), value)


def known(logits: te.Tensor, vocab: te.Tensor) -> te.Tensor:
    """Logits of the vocabulary; minus infinity for the others and for NaN."""
    lowest = tirx.const(float("-inf"), "float32")
    return te.compute(logits.shape, lambda r, j: tirx.Select(j < vocab[0], or_lowest(logits[r, j]), lowest), "known")


def weights(scores: te.Tensor, order: te.Tensor, temperature: te.Tensor, top_k: te.Tensor) -> te.Tensor:
    """Unnormalised probabilities by falling score; 0 beyond the first ``top_k``."""

    def weight(r: tirx.Var, j: tirx.Var) -> tirx.Expr:
        largest = te.max(scores[r, order[r, 0]], tirx.min_value("float32"))
        weight = tirx.exp((scores[r, order[r, j]] - largest) / temperature[0])
        return tirx.Select(tirx.any(top_k[0] == 0, j < top_k[0]), weight, 0.0)

    return te.compute(scores.shape, weight, "weights")


def nucleus(weights: te.Tensor, mass: te.Tensor, top_p: te.Tensor) -> te.Tensor:
    """0 beyond the smallest set whose mass reaches ``top_p``."""
    last = weights.shape[1] - 1

    def weight(r: tirx.Var, j: tirx.Var) -> tirx.Expr:
        before = tirx.if_then_else(j > 0, mass[r, j - 1], 0.0)
        kept = tirx.any(j == 0, top_p[0] >= 1.0, before < top_p[0] * mass[r, last])
        return tirx.Select(kept, weights[r, j], 0.0)

    return te.compute(weights.shape, weight, "nucleus")


def chosen(weights: te.Tensor, mass: te.Tensor, uniform: te.Tensor, order: te.Tensor) -> te.Tensor:
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
