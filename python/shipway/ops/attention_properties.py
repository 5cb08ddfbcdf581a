"""Facts that hold for every correct attention over a KV cache, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shipway.ops.attention_reference import reference, visible, written
from shipway.ops.data import sequences
from shipway.ops.op import Case, Inputs, Output, Property, Runner
from shipway.ops.properties import repeatable


def _within_values(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    out = run(inputs)["out"]
    heads, kv_heads = out.shape[1], inputs["cache"].shape[4]
    slack = {"f32": 1e-5, "bf16": 2.0**-7, "f16": 2.0**-10}[run.dtype]
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


def future_left(value: float) -> Callable[[Runner, Case], str]:
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
    normal = np.abs(once) > max(2.0**-100, 2.0**run.format.min_exponent)
    doubled = run.round(2 * once[normal].astype(np.float64))
    return "" if np.array_equal(twice[normal], doubled) else "doubling v does not double the output"


def key_order_is_free(run: Runner, case: Case) -> str:
    """One query that sees every key does not care about their order."""
    inputs = run.inputs(case)
    inputs["window"] = 0
    expected = reference(**inputs)
    order = np.random.default_rng(case.seed)
    for *_, keys, values in written(inputs):
        shuffled = order.permutation(len(keys))
        keys[:], values[:] = keys[shuffled], values[shuffled]
    return run.against(inputs, expected)


def prefill_row_is_decode(run: Runner, case: Case) -> str:
    """Token t of a prefill sees what a decode step at its position sees."""
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


def unseeing_rows_are_zero(run: Runner, case: Case) -> str:
    """More queries than keys: aligned bottom-right, the first rows stand before the first key and see nothing."""
    inputs = run.inputs(case.with_dims(start=0))
    inputs["start"] = -np.minimum(np.diff(inputs["offsets"]), 1 + case.seed % 6).astype(np.int32)
    out = run(inputs)["out"]
    for b, new, cached, _ in sequences(inputs["offsets"], inputs["start"]):
        if out[new][:-cached].any():  # NaN counts too
            return f"sequence {b}: a row that sees no key is not 0"
    return run.judge(inputs, {"out": out})


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
