"""Deliberately broken variants: each must turn the verdict or a property of its op red.

The unbroken form of every variant runs through the same checks and must stay green, so that a red one is red for its
defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.nn import functional

from shipway.numerics.check import OpRunner
from shipway.numerics.strategies import cases, layouts
from shipway.ops.catalogue import OPS
from shipway.ops.data import sequences
from shipway.ops.op import Case, Op, Property

Call = Callable[..., Any]
REFERENCE = Property("reference", lambda run, case: run.against(run.inputs(case)))


def attention(defect: str) -> Call:
    """Attention by explicit scores, with one defect; ``""`` is correct, NaN in masked slots included."""

    def call(q: Any, cache: Any, offsets: Any, start: Any, layer: int, scale: float, window: int) -> Any:
        out = torch.zeros(q.shape)
        group = q.shape[1] // cache.shape[4]
        for b, new, cached, total in sequences(offsets.numpy(), start.numpy()):
            slot = 0 if defect == "batch row 0 for all" else b
            at = 0 if defect == "layer 0 always" else layer
            keys, values = cache[slot, at].float()
            if defect == "key and value swapped":
                keys, values = values, keys
            for row in range(new.stop - new.start):
                position = row if defect == "causal top-left" else cached + row
                last = position + {"sees the next token": 1, "misses itself": -1}.get(defect, 0)
                first = 0
                if window:
                    first = position - window + {"window too narrow": 2, "window too wide": 0}.get(defect, 1)
                if defect == "window ignored":
                    first = 0
                seen = torch.arange(max(first, 0), max(min(last + 1, keys.shape[0]), first, 0))
                if defect == "tail of the keys dropped" and len(seen) > 8:
                    seen = seen[: len(seen) // 8 * 8]
                if not len(seen):
                    if defect == "row without keys averages" and total > 0:
                        out[new][row] = values[:total].mean(0).repeat_interleave(group, 0)
                    continue
                head = torch.arange(q.shape[1])
                head = head % keys.shape[1] if defect == "GQA mapping swapped" else head // group
                k, v = keys[seen][:, head], values[seen][:, head]
                scores = torch.einsum("hd,khd->hk", q[new][row].float(), k)
                scores = scores * (1.0 if defect == "1/sqrt(d) missing" else scale)
                if defect == "maximum not subtracted":
                    p = scores.exp()
                else:
                    p = (scores - scores.amax(1, keepdim=True)).exp()
                if defect == "weights rounded to bf16":
                    p = p.bfloat16().float()
                total_weight = p.sum(1, keepdim=True)
                if defect == "one more in the denominator":
                    total_weight = total_weight + 1
                out[new][row] = torch.einsum("hk,khd->hd", p / total_weight, v)
        return out.to(q.dtype)

    return call


def qkv(defect: str) -> Call:
    """The fused projections with one defect."""

    def call(*arguments: Any) -> Any:
        x, wq, wk, wv, bias_q, bias_k, bias_v, norm_q, norm_k, eps, table, cache, offsets, start, layer = arguments
        head_dim = cache.shape[-1]
        half = table.shape[1] // 2
        at = [
            cached + i
            for _, new, cached, _ in sequences(offsets.numpy(), start.numpy())
            for i in range(new.stop - new.start)
        ]
        if defect == "position off by one":
            at = [max(position - 1, 0) for position in at]
        if defect == "position restarts in each call":
            at = [i for _, new, _, _ in sequences(offsets.numpy(), start.numpy()) for i in range(new.stop - new.start)]
        cos, sin = (table[at][:, None, part] for part in (slice(half), slice(half, 2 * half)))
        if defect == "sine's sign":
            sin = -sin

        def heads(w: Any, bias: Any, norm: Any, rotated: bool) -> Any:
            y = functional.linear(x, w).float()
            if bias is not None and defect != "bias dropped":
                y = y + bias
            y = y.reshape(len(x), len(w) // head_dim, head_dim)
            if norm is not None and defect != "qk-norm dropped":
                added = {"eps missing in qk-norm": 0.0, "eps negative in qk-norm": -eps}.get(defect, eps)
                y = y * (y.square().mean(-1, keepdim=True) + added).rsqrt() * norm
            if rotated:
                low, high, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
                if defect == "pairs interleaved":
                    low, high = y[..., : 2 * half : 2], y[..., 1 : 2 * half : 2]
                second = high if defect == "second half not rotated" else high * cos + low * sin
                y = torch.cat([low * cos - high * sin, second, rest], -1)
            return y.to(x.dtype)

        k, v = heads(wk, bias_k, norm_k, defect != "k not rotated"), heads(wv, bias_v, None, defect == "v rotated")
        at_layer = 0 if defect == "layer 0 always" else layer
        for b, new, cached, total in sequences(offsets.numpy(), start.numpy()):
            if defect == "KV row off by one" and new.stop > new.start:
                cached, total = max(cached - 1, 0), max(cached - 1, 0) + new.stop - new.start
            cache[b, at_layer, 0, cached:total] = k[new]
            cache[b, at_layer, 1, cached:total] = v[new]
            if defect == "one row too many written" and total < cache.shape[3]:
                cache[b, at_layer, :, total] = 0
        return heads(wq, bias_q, norm_q, True)

    return call


def rms(defect: str) -> Callable[[Call], Call]:
    def wrap(function: Call) -> Call:
        def call(x: Any, weight: Any, eps: float) -> Any:
            match defect:
                case "eps missing":
                    return function(x, weight, 0.0)
                case "eps negative":
                    return function(x, weight, -eps)
                case "eps constant":
                    return function(x, weight, 1e-6)
                case "weight dropped":
                    return function(x, torch.ones_like(weight), eps)
                case "mean over the padded length":
                    padded = -(-x.shape[1] // 16) * 16
                    return function(x, weight * (padded / x.shape[1]) ** 0.5, eps)
                case "squares in f16":
                    square = x.half().square().float().mean(-1, keepdim=True)
                    return (x * (square + eps).rsqrt() * weight).to(function(x, weight, eps).dtype)
                case "mean over all rows":
                    square = x.square().mean()
                    return (x * (square + eps).rsqrt() * weight).to(function(x, weight, eps).dtype)
            return function(x, weight, eps)

        return call

    return wrap


def on_arguments(change: Callable[..., tuple[Any, ...]]) -> Callable[[Call], Call]:
    return lambda function: lambda *arguments: function(*change(*arguments))


def on_result(change: Callable[[Any], Any]) -> Callable[[Call], Call]:
    return lambda function: lambda *arguments: change(function(*arguments))


def zero_tail(x: Any, axis: int, tile: int) -> Any:
    x = x.clone()
    x.narrow(axis, x.shape[axis] // tile * tile, x.shape[axis] % tile).zero_()
    return x


def unwritten_tail(out: Any) -> Any:
    out = out.clone()
    out[..., out.shape[-1] // 8 * 8 :] = float("nan")
    return out


def overflowing_silu(x: Any, gate: Any, up: Any) -> Any:
    a = functional.linear(x, gate).float()
    return (a * a.exp() / (1 + a.exp()) * functional.linear(x, up).float()).to(x.dtype)


def single_row_differs(function: Call) -> Call:
    """A GEMV that sums in another order than the GEMM: right to the last bits but not the same bits."""

    def call(x: Any, *rest: Any) -> Any:
        out = function(x, *rest)
        return out * (1 + 2**-22) if len(x) == 1 else out

    return call


CALLS = count()


def unstable(function: Call) -> Call:
    """Differs in the last bits from call to call."""
    return lambda *arguments: function(*arguments) * (1 + 2**-22 * (next(CALLS) % 2))


def ignores_strides(x: Any, *rest: Any) -> tuple[Any, ...]:
    storage = x.untyped_storage().nbytes() // x.element_size()
    whole = x.as_strided((storage,), (1,), 0)
    return (whole[: x.numel()].reshape(x.shape), *rest)


def neighbours(logits: Any) -> Any:
    return logits.shape[1] - 1 - logits.flip(1).argmax(1).to(torch.int32)


ATTENTION = (
    "causal top-left",
    "sees the next token",
    "misses itself",
    "window too narrow",
    "window too wide",
    "window ignored",
    "GQA mapping swapped",
    "1/sqrt(d) missing",
    "maximum not subtracted",
    "one more in the denominator",
    "weights rounded to bf16",
    "tail of the keys dropped",
    "key and value swapped",
    "layer 0 always",
    "batch row 0 for all",
)
QKV = (
    "second half not rotated",
    "pairs interleaved",
    "sine's sign",
    "position off by one",
    "position restarts in each call",
    "bias dropped",
    "qk-norm dropped",
    "eps missing in qk-norm",
    "eps negative in qk-norm",
    "k not rotated",
    "v rotated",
    "layer 0 always",
    "KV row off by one",
    "one row too many written",
)
RMS = (
    "eps missing",
    "eps negative",
    "eps constant",
    "weight dropped",
    "mean over the padded length",
    "squares in f16",
    "mean over all rows",
)


def mutants() -> Iterator[tuple[str, str, Callable[[Call], Call]]]:
    """``(op, defect, wrap)``; an empty defect is the unbroken form."""
    for defect in ("", *ATTENTION, "row without keys averages"):
        yield "attention_prefill", defect, lambda _, d=defect: attention(d)
    for defect in ("", *ATTENTION):
        # With one query, "sees the next token" reads the slot after it, and bottom-right needs cached tokens.
        yield "attention_decode", defect, lambda _, d=defect: attention(d)
    for defect in ("", *QKV):
        yield "qkv_rope_append", defect, lambda _, d=defect: qkv(d)
    for defect in ("", *RMS):
        yield "rms_norm", defect, rms(defect)
    unbroken = on_result(lambda out: out)
    for op in ("linear", "linear_residual", "gate_up_silu", "lm_head", "greedy", "embedding"):
        yield op, "", unbroken
    yield "linear", "tail of K dropped", on_arguments(lambda x, w: (zero_tail(x, 1, 16), w))
    yield "linear", "tail of N not written", on_result(unwritten_tail)
    yield "linear", "tail of T repeats a row", on_result(lambda out: torch.cat([out[:-1], out[:1]]))
    yield "linear", "accumulated in bf16", on_result(lambda out: out.bfloat16().float())
    yield "linear", "weight not transposed in a tile", on_arguments(lambda x, w: (x, w.flip(0)))
    yield "linear", "absolute values", on_arguments(lambda x, w: (x, w.abs()))
    yield "linear_residual", "residual dropped", on_arguments(lambda x, w, r: (x, w, torch.zeros_like(r)))
    yield "linear_residual", "residual rounded to bf16", on_arguments(lambda x, w, r: (x, w, r.bfloat16().float()))
    yield "linear_residual", "residual of the first row", on_arguments(lambda x, w, r: (x, w, r[:1].expand_as(r)))
    yield "gate_up_silu", "gate and up swapped", on_arguments(lambda x, g, u: (x, u, g))
    yield (
        "gate_up_silu",
        "gelu for silu",
        lambda _: lambda x, g, u: functional.gelu(functional.linear(x, g)) * functional.linear(x, u),
    )
    yield "gate_up_silu", "exponential overflows", lambda _: overflowing_silu
    yield "gate_up_silu", "tail of K dropped", on_arguments(lambda x, g, u: (zero_tail(x, 1, 16), g, u))
    yield (
        "lm_head",
        "first rows instead of the chosen",
        on_arguments(lambda x, w, rows: (x, w, torch.arange(len(rows)).int() % len(x))),
    )
    yield "lm_head", "row off by one", on_arguments(lambda x, w, rows: (x, w, (rows + 1) % len(x)))
    yield "lm_head", "tail of the vocabulary not written", on_result(unwritten_tail)
    yield "greedy", "ties go to the highest id", lambda _: neighbours
    yield "greedy", "NaN wins", lambda _: lambda logits: logits.argmax(1).int()
    yield (
        "greedy",
        "tail of the row ignored",
        on_arguments(lambda x: (x[:, : max(x.shape[1] // 8 * 8, 1)].contiguous(),)),
    )
    yield "greedy", "largest magnitude", on_arguments(lambda x: (x.abs(),))
    yield "embedding", "id off by one", on_arguments(lambda ids, table: ((ids + 1) % len(table), table))
    yield "embedding", "widened through f16", on_arguments(lambda ids, table: (ids, table.half().to(table.dtype)))
    yield "embedding", "tail of the row not written", on_result(unwritten_tail)


def first_red(runner: OpRunner, prop: Property, examples: int) -> str:
    """The first failure of a property over drawn cases, or an empty string."""
    found = ""

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(runner.op))
    def run(case: Case) -> None:
        nonlocal found
        found = found or prop.check(runner, case)

    run()
    return found


def properties(op: Op) -> tuple[Property, ...]:
    return (REFERENCE, *op.properties)


@pytest.mark.parametrize(
    ("op", "defect", "wrap"), [pytest.param(*m, id=f"{m[0]}-{m[1] or 'unbroken'}") for m in mutants()]
)
def test_mutant_turns_red_and_the_unbroken_form_stays_green(op: str, defect: str, wrap: Callable[[Call], Call]) -> None:
    runner = OpRunner(OPS[op], OPS[op].implementations["torch"], "f32", wrap)
    if not defect:
        known = {failure.property for failure in runner.implementation.known} if wrap else set()
        for prop in properties(OPS[op]):
            if prop.name not in known:
                assert first_red(runner, prop, 3) == "", prop.name
        return
    red = (
        any(prop.check(runner, case) for prop in OPS[op].properties for case in prop.examples)
        or first_red(runner, REFERENCE, 40)
        or any(first_red(runner, prop, 10) for prop in OPS[op].properties)
    )
    assert red, f"{op} survives {defect!r}"


@pytest.mark.parametrize(("wrap", "name"), [(single_row_differs, "row_alone"), (unstable, "repeatable")])
def test_last_bits_that_differ_turn_a_bitwise_claim_red(wrap: Callable[[Call], Call], name: str) -> None:
    op = OPS["linear"]
    (prop,) = (prop for prop in op.properties if prop.name == name)
    claimed = replace(op.implementations["torch"], bitwise=True)
    assert first_red(OpRunner(op, claimed, "f32", wrap), prop, 20)


def test_ignored_strides_turn_the_policy_red() -> None:
    op = OPS["linear"]
    red = []

    @settings(max_examples=20, derandomize=True, database=None, deadline=None)
    @given(cases(op), layouts())
    def run(case: Case, layout: str) -> None:
        runner = OpRunner(op, op.implementations["torch"], "f32", on_arguments(ignores_strides))
        red.append(runner.strided(replace(case, layout=layout)))

    run()
    assert any(red)


def test_accepted_call_declared_refused_turns_red() -> None:
    op = OPS["linear"]
    refused = OpRunner(op, replace(op.implementations["torch"], strided="refused"), "f32")
    assert "declared refused" in refused.strided(Case({"T": 3, "N": 4, "K": 5}, layout="transposed"))
