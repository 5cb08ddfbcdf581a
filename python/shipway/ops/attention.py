"""Causal attention with grouped queries over the KV cache: ``attention_prefill`` and ``attention_decode``.

Both read ``cache [B, layers, 2, S, kv_heads, head_dim]`` after the new tokens were appended: sequence ``b`` has
``start[b] + offsets[b + 1] - offsets[b]`` valid rows, and its new token ``i`` stands at position ``start[b] + i``. It
sees the positions up to its own (causal, aligned bottom-right), with a window only the last ``window`` of them, its
own included. Query head ``h`` reads KV head ``h // (heads / kv_heads)``. ``attention_decode`` is the case of exactly
one new token per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shipway.ops.data import fill, ragged, sequences
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, KnownFailure, Op, Output, Property, Runner
from shipway.ops.properties import repeatable


def visible(queries: int, keys: int, window: int = 0, causal: bool = True) -> np.ndarray:
    """Which key each query sees, ``[queries, keys]`` bool: bottom-right causal, at most ``window`` keys (0: all)."""
    position = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None, :]
    seen = key <= position if causal else np.ones((queries, keys), bool)
    return seen & (key > position - window) if window else seen


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int = 0, causal: bool = True
) -> np.ndarray:
    """Softmax attention of one sequence by definition, one query at a time, float64.

    Args:
        q: ``[queries, heads, head_dim]``.
        k: ``[keys, kv_heads, head_dim]``.
        v: ``[keys, kv_heads, head_dim]``.
        scale: Factor on ``q . k``.
        window: Keys a query sees, its own included; 0 for all.
        causal: Whether keys after a query's own position are hidden.

    Returns:
        ``[queries, heads, head_dim]``; a query that sees no key gives 0.
    """
    out = np.zeros(q.shape)
    for row, seen in enumerate(visible(len(q), len(k), window, causal)):
        if seen.any():
            grouped, keys, values = _grouped(q[row], k[seen], v[seen])
            out[row] = (_softmax(grouped, keys, scale) @ values).reshape(q.shape[1:])
    return out


def attend_magnitude(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, scale: float, window: int = 0, causal: bool = True
) -> np.ndarray:
    """Magnitude of ``out = attend(...)`` for the a-priori bound, float64 of the same shape.

    ``sum_j p_j |v_j|``, plus what an error of the scores carries over to first order: ``sum_j p_j e_j |v_j - out|``
    with ``e_j = scale * sum_d |q_d| |k_jd|``.
    """
    magnitude = np.zeros(q.shape)
    for row, seen in enumerate(visible(len(q), len(k), window, causal)):
        if seen.any():
            grouped, keys, values = _grouped(q[row], k[seen], v[seen])
            p = _softmax(grouped, keys, scale)
            shaken = p * scale * (np.abs(grouped) @ np.abs(keys).swapaxes(1, 2))
            away = np.abs(values[:, None] - out[row].reshape(grouped.shape)[:, :, None])
            total = p @ np.abs(values) + (shaken[:, :, None] @ away)[:, :, 0]
            magnitude[row] = total.reshape(q.shape[1:])
    return magnitude


def _grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query's heads by the KV head they share ``[kv_heads, group, head_dim]``, keys and values
    ``[kv_heads, keys, head_dim]``, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    return q.reshape(k.shape[1], -1, q.shape[-1]), k.swapaxes(0, 1), v.swapaxes(0, 1)


def _softmax(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    scores = scale * (q @ k.swapaxes(1, 2))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def reference(
    q: np.ndarray, cache: np.ndarray, offsets: np.ndarray, start: np.ndarray, layer: int, scale: float, window: int
) -> dict[str, Output]:
    """``q [T, heads, head_dim]`` and ``cache`` in the activation dtype -> ``out [T, heads, head_dim]`` in it."""
    out, magnitude = np.zeros(q.shape), np.zeros(q.shape)
    longest = q.shape[-1]
    for b, new, _, total in sequences(offsets, start):
        keys, values = cache[b, layer, 0, :total], cache[b, layer, 1, :total]
        out[new] = attend(q[new], keys, values, scale, window)
        magnitude[new] = attend_magnitude(q[new], keys, values, out[new], scale, window)
        longest = max(longest, total)
    return {"out": Output(out, "act", magnitude, longest)}


def draw(case: Case, rng: np.random.Generator) -> Inputs:
    """A ragged batch whose cache is NaN wherever nothing was written: past each sequence, and in every other layer."""
    batch, kv_heads, group, head_dim = (case.dims[name] for name in ("B", "kv_heads", "group", "head_dim"))
    if "length" in case.dims:
        offsets, start = ragged(rng, batch, case.dims["length"], case.dims["start"])
    else:
        _, start = ragged(rng, batch, 1, case.dims["start"])
        offsets = np.arange(batch + 1, dtype=np.int32)
    layers = int(rng.integers(1, 4))
    layer = int(rng.integers(0, layers))
    context = max(1, *(total for *_, total in sequences(offsets, start))) + int(rng.integers(0, 9))
    cache = np.full((batch, layers, 2, context, kv_heads, head_dim), np.nan, np.float32)
    # Scores beyond a few dozen make the softmax a step function that no dtype can follow: the scale goes to v.
    for b, _, _, total in sequences(offsets, start):
        cache[b, layer, 0, :total] = fill(rng, (total, kv_heads, head_dim), case.distribution)
        cache[b, layer, 1, :total] = fill(rng, (total, kv_heads, head_dim), "normal", case.scale)
    return {
        "q": fill(rng, (int(offsets[-1]), kv_heads * group, head_dim), "normal", min(case.scale, 2.0)),
        "cache": cache,
        "offsets": offsets,
        "start": start,
        "layer": layer,
        "scale": head_dim**-0.5,
        "window": case.dims["window"],
    }


def _torch(dtype: str) -> Callable[..., Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Any, cache: Any, offsets: Any, start: Any, layer: int, scale: float, window: int) -> Any:
        out = torch.zeros_like(q)
        for b, new, _, total in sequences(offsets.numpy(), start.numpy()):
            if new.start == new.stop:
                continue
            keys, values = cache[b, layer, :, :total].transpose(1, 2)
            mask = torch.from_numpy(visible(new.stop - new.start, total, window))
            attended = scaled_dot_product_attention(
                q[new].transpose(0, 1)[None], keys[None], values[None], mask, scale=scale, enable_gqa=True
            )
            out[new] = attended[0].transpose(0, 1)
        return out

    return attention


def written(inputs: Inputs) -> list[tuple[int, slice, int, np.ndarray, np.ndarray]]:
    """Per sequence ``(index, rows of the new tokens, cached tokens, keys, values)``, keys and values as views."""
    cache, layer = inputs["cache"], inputs["layer"]
    return [
        (b, new, cached, cache[b, layer, 0, :total], cache[b, layer, 1, :total])
        for b, new, cached, total in sequences(inputs["offsets"], inputs["start"])
    ]


def _within_values(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    out = run(inputs)["out"]
    heads, kv_heads = out.shape[1], inputs["cache"].shape[4]
    slack = {"f32": 1e-5, "bf16": 2.0**-7}[run.dtype]
    for b, new, _, _, values in written(inputs):
        if not len(values) or new.start == new.stop:
            continue
        low, high = (np.repeat(bound, heads // kv_heads, axis=0) for bound in (values.min(0), values.max(0)))
        margin = slack * np.maximum(np.abs(low), np.abs(high)) + 1e-37
        if ((out[new] < low - margin) | (out[new] > high + margin)).any():
            return f"sequence {b}: an output lies outside the range of its values"
    return ""


def _equal_values(run: Runner, case: Case) -> str:
    # Weights sum to 1, so identical values come back.
    inputs = run.inputs(case)
    expected = np.zeros(inputs["q"].shape)
    group = expected.shape[1] // inputs["cache"].shape[4]
    for _, new, _, _, values in written(inputs):
        if len(values):
            values[:] = values[0]
            expected[new] = np.repeat(values[0], group, axis=0)
    longest = inputs["cache"].shape[3]
    return run.against(inputs, {"out": Output(expected, "act", np.abs(expected), longest)})


def _equal_keys(run: Runner, case: Case) -> str:
    # Equal scores: each query returns the plain mean of the values it sees.
    inputs = run.inputs(case)
    for *_, keys, _ in written(inputs):
        keys[:] = keys[:1]
    return _gives_the_mean(run, inputs)


def _large_scores(run: Runner, case: Case) -> str:
    # Equal scores of +-64 * 64 * sqrt(head_dim): their exponentials are infinite or zero in float32, but a softmax only
    # sees differences.
    inputs = run.inputs(case)
    inputs["q"][:] = 64
    inputs["q"][:, ::2] = -64
    for *_, keys, _ in written(inputs):
        keys[:] = 64
    return _gives_the_mean(run, inputs, exact_scores=True)


def _gives_the_mean(run: Runner, inputs: Inputs, exact_scores: bool = False) -> str:
    """Expects of each query the plain mean of the values it sees; the keys of a sequence are all equal."""
    value, magnitude = np.zeros(inputs["q"].shape), np.zeros(inputs["q"].shape)
    group = value.shape[1] // inputs["cache"].shape[4]
    for _, new, _, keys, values in written(inputs):
        if not len(keys):
            continue
        seen = visible(new.stop - new.start, len(keys), inputs["window"]).astype(np.float64)
        share = seen / seen.sum(1, keepdims=True)
        wide = np.repeat(values.astype(np.float64), group, axis=1)
        value[new] = np.einsum("qk,khd->qhd", share, wide)
        magnitude[new] = np.einsum("qk,khd->qhd", share, np.abs(wide))
    # Equal keys need not get equal scores: a blocked product sums its last columns in another order.
    expected = replace(reference(**inputs)["out"], value=value)
    return run.against(inputs, {"out": replace(expected, magnitude=magnitude) if exact_scores else expected})


def _future(value: float) -> Callable[[Runner, Case], str]:
    """Causal: whatever stands after a token, its output keeps its bits."""

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        before = run(inputs)["out"]
        kept: list[int] = []
        for _, new, cached, keys, values in written(inputs):
            past = (new.stop - new.start + 1) // 2
            keys[cached + past :] = value
            values[cached + past :] = value
            kept += range(new.start, new.start + past)
        after = run(inputs)["out"]
        return "" if np.array_equal(before[kept], after[kept], equal_nan=True) else "the future changes the past"

    return check


def _unwritten(run: Runner, case: Case) -> str:
    # The drawn cache holds NaN wherever nothing was written; no other value may be seen there either.
    inputs = run.inputs(case)
    before = run(inputs)["out"]
    empty = np.isnan(inputs["cache"])
    for value in (np.inf, -np.inf):
        inputs["cache"][empty] = value
        if not np.array_equal(run(inputs)["out"], before):
            return f"{value} in cache slots that were never written changes the result"
    return ""


def _before_window(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["window"] = window = 1 + case.seed % 5
    before = run(inputs)["out"]
    for _, new, cached, keys, values in written(inputs):
        if new.start < new.stop:
            hidden = max(cached - window + 1, 0)
            keys[:hidden] = np.nan
            values[:hidden] = np.nan
    after = run(inputs)["out"]
    return "" if np.array_equal(before, after) else "keys before the window change the result"


def _window_of_one(run: Runner, case: Case) -> str:
    # A window of one is the token itself: its own value comes back exactly.
    inputs = run.inputs(case)
    inputs["window"] = 1
    expected = np.zeros(inputs["q"].shape)
    group = expected.shape[1] // inputs["cache"].shape[4]
    for _, new, cached, _, values in written(inputs):
        expected[new] = np.repeat(values[cached:], group, axis=1)
    return run.against(inputs, {"out": Output(expected, "exact")})


def _wide_window(run: Runner, case: Case) -> str:
    # A window the context just reaches, and one more, hide nothing.
    inputs = run.inputs(case)
    longest = max(len(keys) for *_, keys, _ in written(inputs))
    everything = run({**inputs, "window": 0})
    for window in (max(longest, 1), longest + 1):
        if reason := run.same({**inputs, "window": window}, everything):
            return f"window {window} over {longest} tokens: {reason}"
    return ""


def _repeated_heads(run: Runner, case: Case) -> str:
    # GQA is MHA whose KV heads are repeated.
    inputs = run.inputs(case)
    group = inputs["q"].shape[1] // inputs["cache"].shape[4]
    return run.same({**inputs, "cache": np.repeat(inputs["cache"], group, axis=4)}, run(inputs))


def _alone(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    together = run(inputs)["out"]
    for b, new, cached, _ in sequences(inputs["offsets"], inputs["start"]):
        alone = {
            **inputs,
            "q": inputs["q"][new],
            "cache": inputs["cache"][b : b + 1],
            "offsets": np.array([0, new.stop - new.start], np.int32),
            "start": np.array([cached], np.int32),
        }
        if reason := run.same(alone, {"out": together[new]}):
            return f"sequence {b} alone differs from itself in the batch: {reason}"
    return ""


def _shifted_scores(run: Runner, case: Case) -> str:
    # The same vector added to every key adds one constant per query to its scores; the softmax does not see it.
    inputs = run.inputs(case)
    shift = run.round(np.full(inputs["q"].shape[-1], 0.5, np.float32))
    for *_, keys, _ in written(inputs):
        keys[:] = run.round(np.rint(keys * 8) / 8)  # multiples of 1/8: adding 1/2 stays exact
        keys[:] = np.clip(keys, -7, 7)
    expected = reference(**inputs)["out"].value
    for *_, keys, _ in written(inputs):
        keys += shift
    return run.against(inputs, {"out": replace(reference(**inputs)["out"], value=expected)})


def _doubled_values(run: Runner, case: Case) -> str:
    # Linear in v: doubling is exact in every step, wherever nothing is subnormal.
    inputs = run.inputs(case)
    once = run(inputs)["out"]
    for *_, values in written(inputs):
        values *= 2
    twice = run(inputs)["out"]
    normal = np.abs(once) > 2.0**-100
    return "" if np.array_equal(twice[normal], 2 * once[normal]) else "doubling v does not double the output"


def _permuted(run: Runner, case: Case) -> str:
    # One query that sees every key does not care about their order.
    inputs = run.inputs(case)
    inputs["window"] = 0
    expected = reference(**inputs)
    order = np.random.default_rng(case.seed)
    for *_, keys, values in written(inputs):
        shuffled = order.permutation(len(keys))
        keys[:], values[:] = keys[shuffled], values[shuffled]
    return run.against(inputs, expected)


def _decode_rows(run: Runner, case: Case) -> str:
    # Token t of a prefill sees what a decode step at its position sees.
    inputs = run.inputs(case)
    prefilled = run(inputs)["out"]
    decode = run.other("attention_decode")
    for b, new, cached, _ in sequences(inputs["offsets"], inputs["start"]):
        for row in sorted({0, new.stop - new.start - 1} & set(range(new.stop - new.start))):
            step = {
                **inputs,
                "q": inputs["q"][new][row : row + 1],
                "cache": inputs["cache"][b : b + 1],
                "offsets": np.array([0, 1], np.int32),
                "start": np.array([cached + row], np.int32),
            }
            # The two kernels may sum in different orders, so each is judged by the same reference.
            reason = decode.against(step) or run.judge(step, {"out": prefilled[new][row : row + 1]})
            if reason:
                return f"sequence {b}: prefill row {row} is not the decode step: {reason}"
    return ""


def _unseeing_rows(run: Runner, case: Case) -> str:
    # More queries than keys: aligned bottom-right, the first rows stand before the first key and see nothing.
    inputs = run.inputs(case.with_dims(start=0))
    inputs["start"] = -np.minimum(np.diff(inputs["offsets"]), 1 + case.seed % 6).astype(np.int32)
    out = run(inputs)["out"]
    for b, new, cached, _ in sequences(inputs["offsets"], inputs["start"]):
        if out[new][:-cached].any():  # NaN counts too
            return f"sequence {b}: a row that sees no key is not 0"
    return run.judge(inputs, {"out": out})


HEADS = {
    "kv_heads": Dim(1, 5, (2, 3, 4)),
    "group": Dim(1, 8, (2, 3, 4, 7)),
    "head_dim": Dim(16, 160, (16, 64, 80, 96, 128, 160), static=True),
}
WINDOW = Dim(0, 80, (1, 2, 7, 8, 9, 16, 17, 33))
FILLS = ("normal", "uniform", "constant", "spike", "zero_row", "levels")
SHARED = (
    repeatable(),
    Property("output_within_the_values", _within_values),
    Property("equal_values_come_back", _equal_values),
    Property("equal_keys_give_the_mean", _equal_keys),
    Property("large_equal_scores_give_the_mean", _large_scores),
    Property("keys_before_the_window_are_not_read", _before_window),
    Property("window_of_one_is_the_token_itself", _window_of_one),
    Property("window_of_the_whole_context_hides_nothing", _wide_window),
    Property("gqa_is_mha_with_repeated_heads", _repeated_heads),
    Property("sequence_alone", _alone),
    Property("unwritten_slots_are_not_read", _unwritten),
    Property("constant_added_to_scores_changes_nothing", _shifted_scores),
    Property("linear_in_v", _doubled_values),
)
PREFILL_DIMS = {"B": Dim(1, 4, (2, 3)), "length": Dim(0, 70, (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65))}
START = Dim(0, 70, (1, 2, 7, 8, 9, 31, 33, 63, 64, 65))
ONE = Case({"B": 1, "length": 1, "start": 0, "window": 0, "kv_heads": 2, "group": 2, "head_dim": 64}, seed=1)
HEAD_DIMS = (16, 80, 96, 128, 160)
PREFILL_TRAPS = (
    ONE,  # one query, one key
    ONE.with_dims(length=0),
    ONE.with_dims(length=0, start=5),
    ONE.with_dims(length=4, start=16),  # 4 queries, 20 keys; 10 over 4 is TEN_OVER_FOUR
    ONE.with_dims(B=2, length=5, start=3),  # as many sequences as KV heads
    *(ONE.with_dims(length=16, window=window) for window in (15, 16, 17)),  # the prompt reaches 16 exactly
    *(ONE.with_dims(length=9, start=7, head_dim=head_dim) for head_dim in HEAD_DIMS),
)
STEP = Case({"B": 1, "start": 0, "window": 0, "kv_heads": 2, "group": 2, "head_dim": 64}, seed=1)
DECODE_TRAPS = (
    STEP,
    STEP.with_dims(start=19),
    STEP.with_dims(B=2, start=3),
    *(STEP.with_dims(start=15, window=window) for window in (15, 16, 17)),
    *(STEP.with_dims(start=15, head_dim=head_dim) for head_dim in HEAD_DIMS),
)
NAN_FUTURE = Case({"B": 1, "length": 2, "start": 0, "window": 0, "kv_heads": 1, "group": 1, "head_dim": 64})

TEN_OVER_FOUR = replace(NAN_FUTURE.with_dims(length=10), seed=5)  # 10 queries, 4 keys
BEHIND_WINDOW = Case({"B": 1, "start": 2, "window": 0, "kv_heads": 1, "group": 1, "head_dim": 64})
LEAK = "a masked key weighs 0 in one product with all values, and 0 times NaN or infinity is NaN"


def _leaks(name: str, case: Case) -> KnownFailure:
    return KnownFailure(name, LEAK, case, ("f32", "bf16"))


DENSE = ("jax", "tvm")
DECODE_LEAKS = (_leaks("keys_before_the_window_are_not_read", BEHIND_WINDOW),)
PREFILL_LEAKS = (
    _leaks("keys_before_the_window_are_not_read", BEHIND_WINDOW.with_dims(length=1)),
    _leaks("nan_in_the_future_does_not_leak", NAN_FUTURE),
    _leaks("infinity_in_the_future_does_not_leak", NAN_FUTURE),
)

ATTENTION_PREFILL = Op(
    name="attention_prefill",
    summary="causal attention of new tokens over the KV cache",
    dims={**PREFILL_DIMS, "start": START, "window": WINDOW, **HEADS},
    distributions=FILLS,
    draw=draw,
    activations=frozenset({"q", "cache"}),
    reference=reference,
    result="out",
    strided=("q", "cache"),
    traps=PREFILL_TRAPS,
    properties=(
        *SHARED,
        Property("future_changes_leave_the_past", _future(3.0)),
        Property("nan_in_the_future_does_not_leak", _future(np.nan), (NAN_FUTURE,)),
        Property("infinity_in_the_future_does_not_leak", _future(np.inf), (NAN_FUTURE,)),
        Property("prefill_row_is_the_decode_step", _decode_rows),
        Property("rows_that_see_no_key_are_zero", _unseeing_rows, (TEN_OVER_FOUR,)),
    ),
    implementations=rows(
        torch_row(_torch, known=PREFILL_LEAKS),
        # MAX's row slices away what lies before the window.
        *compiled_rows("attention_prefill", {"max": PREFILL_LEAKS[1:], **dict.fromkeys(DENSE, PREFILL_LEAKS)}),
    ),
)

ATTENTION_DECODE = Op(
    name="attention_decode",
    summary="attention of one new token per sequence over the KV cache",
    dims={
        "B": PREFILL_DIMS["B"],
        "start": Dim(0, 300, (1, 2, 7, 8, 9, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257)),
        "window": WINDOW,
        **HEADS,
    },
    distributions=FILLS,
    draw=draw,
    activations=frozenset({"q", "cache"}),
    reference=reference,
    result="out",
    strided=("q", "cache"),
    traps=DECODE_TRAPS,
    properties=(*SHARED, Property("order_of_the_keys_does_not_matter", _permuted)),
    implementations=rows(
        torch_row(_torch, known=DECODE_LEAKS),
        *compiled_rows("attention_decode", dict.fromkeys(DENSE, DECODE_LEAKS)),
    ),
)
