"""Tests of the tests: deliberately broken variants of every op, each of which must turn a property red.

A variant with an empty defect is the unbroken form, which must stay green, so that a red one is red for its defect. And
every property must be turned red by at least one variant: a check that cannot fail is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch.nn import functional

from shipway.numerics.campaign import Failure, Plan, properties, run_property, smallest
from shipway.numerics.check import OpRunner
from shipway.numerics.defects import Call, Wrap, attention, qkv, rms, rope, sample
from shipway.ops.catalogue import OPS
from shipway.ops.packed import dequantised
from shipway.signature import MATRICES, SIGNATURES, WORDS

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
    "masked keys weighed by 0",
    "scores biased by position",
    "output clamped to 1",
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
ROPE = (
    "position off by one",
    "pairs interleaved",
    "sine's sign",
    "partial rotary scales the rest",
    "second half not rotated",
)
SAMPLE = (
    "vocabulary ignored",
    "NaN counts as 0",
    "ties go to the highest id",
    "top-k ignored",
    "top-k keeps one more",
    "temperature ignored",
    "temperature inverted",
    "probabilities floored",
    "top-p ignored",
    "top-p of an unnormalised mass",
    "always the most probable",
    "uniform number of the first row",
    "next id",
)


@dataclass(frozen=True)
class Mutant:
    """One variant.

    Attributes:
        op: Name of the op.
        defect: What is wrong with it; empty for an unbroken form.
        wrap: Makes it from the plain PyTorch callable.
        bitwise: Whether it claims that rows are independent bit for bit.
        plain: Whether the PyTorch callable still computes the result, with the failures its row declares.
    """

    op: str
    defect: str
    wrap: Wrap
    bitwise: bool = False
    plain: bool = True


def mutants() -> Iterator[Mutant]:
    """Every variant, the unbroken forms included."""
    written = {
        "attention_prefill": (attention, (*ATTENTION, "row without keys averages")),
        # With one query, "sees the next token" reads the slot after it, and bottom-right needs cached tokens.
        "attention_decode": (attention, ATTENTION),
        "qkv_rope_append": (qkv, QKV),
        "rope": (rope, ROPE),
        "sample": (sample, SAMPLE),
    }
    for op, (make, defects) in written.items():
        for defect in ("", *defects):
            yield Mutant(op, defect, _instead(make(defect)), plain=False)
    for defect in ("", *RMS):
        yield Mutant("rms_norm", defect, rms(defect))
    for op, defect, wrap in (*_simple(), *_packed()):
        yield Mutant(op, defect, wrap)
    yield Mutant("linear", "", lambda _: rows_apart, bitwise=True, plain=False)
    yield Mutant("linear", "a row alone summed in another order", lambda _: single_row_differs, bitwise=True)
    alone = "a sequence alone summed in another order"
    yield Mutant("attention_decode", alone, lambda _: attention(alone), bitwise=True, plain=False)
    for op in OPS:
        yield Mutant(op, "other last bits in every second call", unstable)
        yield Mutant(op, "strides ignored", ignoring_strides(op))
        if any(prop.name == "poisoned_row_stays" for prop in OPS[op].properties):
            yield Mutant(op, "NaN reaches the other rows", on_result(lambda out: out + 0 * out.sum(0, keepdim=True)))


def _instead(broken: Call) -> Wrap:
    return lambda _: broken


def _simple() -> Iterator[tuple[str, str, Wrap]]:
    """Defects of the ops whose variants are a line each."""
    for op in ("linear", "linear_residual", "gate_up_silu", "mlp", "lm_head", "greedy", "embedding"):
        yield op, "", on_result(lambda out: out)
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
    yield "gate_up_silu", "gelu for silu", lambda _: gated(functional.gelu)
    yield "gate_up_silu", "sigmoid for silu", lambda _: gated(torch.sigmoid)
    yield "gate_up_silu", "exponential overflows", lambda _: gated(lambda a: a * a.exp() / (1 + a.exp()))
    yield "gate_up_silu", "tail of K dropped", on_arguments(lambda x, g, u: (zero_tail(x, 1, 16), g, u))
    yield "mlp", "residual dropped", on_arguments(lambda x, g, u, d, r: (x, g, u, d, torch.zeros_like(r)))
    yield "mlp", "gate and up swapped", on_arguments(lambda x, g, u, d, r: (x, u, g, d, r))
    yield "mlp", "tail of N dropped", on_arguments(lambda x, g, u, d, r: (x, g, u, zero_tail(d, 1, 16), r))
    yield (
        "lm_head",
        "first rows instead of the chosen",
        on_arguments(lambda x, w, rows: (x, w, torch.arange(len(rows)).int() % len(x))),
    )
    yield "lm_head", "row off by one", on_arguments(lambda x, w, rows: (x, w, (rows + 1) % len(x)))
    yield "lm_head", "tail of the vocabulary not written", on_result(unwritten_tail)
    yield "lm_head", "all rows read", lambda f: lambda x, w, rows: f(x, w, rows) + 0 * x.sum()
    yield "greedy", "ties go to the highest id", lambda _: highest_of_ties
    yield "greedy", "NaN wins", lambda _: lambda logits: logits.argmax(1).int()
    yield (
        "greedy",
        "tail of the row ignored",
        on_arguments(lambda x: (x[:, : max(x.shape[1] // 8 * 8, 1)].contiguous(),)),
    )
    yield "greedy", "largest magnitude", on_arguments(lambda x: (x.abs(),))
    yield "greedy", "infinity skipped", on_arguments(lambda x: (x.nan_to_num(-torch.inf, -torch.inf, -torch.inf),))
    yield "embedding", "id off by one", on_arguments(lambda ids, table: ((ids + 1) % len(table), table))
    yield "embedding", "widened through f16", on_arguments(lambda ids, table: (ids, table.half().to(table.dtype)))
    yield "embedding", "tail of the row not written", on_result(unwritten_tail)


def _packed() -> Iterator[tuple[str, str, Wrap]]:
    """Defects of the ops with packed matrices: of their format, and what the plain op's checks do not see of theirs."""
    for op in MATRICES:
        for word in WORDS:
            name = f"{op}_{word}"
            yield name, "", on_result(lambda out: out)
            yield name, "tail of K dropped", on_arguments(lambda x, *rest: (zero_tail(x, 1, 16), *rest))
            yield name, "scale of the group before", on_parts(name, "_scales", lambda scales: scales.roll(1, 1))
            yield name, "scale of the row before", on_parts(name, "_scales", lambda scales: scales.roll(1, 0))
            if word == "int8":
                yield name, "sign dropped", on_parts(name, "", lambda stored: stored.view(torch.uint8))
            else:
                yield name, "halves swapped", on_parts(name, "", lambda stored: stored << 4 | stored >> 4)
                yield name, "zero point is always 8", on_parts(name, "_zeros", lambda zeros: torch.full_like(zeros, 8))
                yield name, "half behind an odd row read", odd_half_read
    extra = "one row too many written"
    for word in WORDS:
        yield f"linear_{word}", "NaN scale counts as 0", on_parts(f"linear_{word}", "_scales", torch.nan_to_num)
        yield f"qkv_rope_append_{word}", extra, _instead(dequantised(OPS["qkv_rope_append"], word, qkv(extra)))
    yield "linear_int4", "zero point is signed", on_parts("linear_int4", "_zeros", lambda zeros: zeros.view(torch.int8))


def on_parts(op: str, part: str, change: Call) -> Wrap:
    """Passes the scales or zero points, or with ``""`` the elements, of every packed matrix through ``change``."""
    matrices = MATRICES[op.rpartition("_")[0]]
    places = [list(SIGNATURES[op]).index(f"{matrix}{part}") for matrix in matrices]
    return on_arguments(lambda *given: [change(a) if i in places else a for i, a in enumerate(given)])


def odd_half_read(function: Call) -> Call:
    """Adds what is in the high half of each row's last byte of the first matrix."""

    def call(x: Any, stored: Any, *rest: Any) -> Any:
        return function(x, stored, *rest) + 1e-2 * (stored[:, -1] >> 4).float().mean()

    return call


def on_arguments(change: Any) -> Wrap:
    """Calls the op on ``change(*arguments)``."""
    return lambda function: lambda *arguments: function(*change(*arguments))


def on_result(change: Call) -> Wrap:
    """Passes the op's result through ``change``."""
    return lambda function: lambda *arguments: change(function(*arguments))


def zero_tail(x: Any, axis: int, tile: int) -> Any:
    """A copy with zeros where an axis leaves its last whole tile."""
    x = x.clone()
    x.narrow(axis, x.shape[axis] // tile * tile, x.shape[axis] % tile).zero_()
    return x


def unwritten_tail(out: Any) -> Any:
    """A copy with NaN where the last axis leaves its last whole vector."""
    out = out.clone()
    out[..., out.shape[-1] // 8 * 8 :] = float("nan")
    return out


def gated(activation: Call) -> Call:
    """The first half of an MLP with another activation."""

    def call(x: Any, gate: Any, up: Any) -> Any:
        a, b = functional.linear(x, gate).float(), functional.linear(x, up).float()
        return (activation(a) * b).to(x.dtype)

    return call


def rows_apart(x: Any, w: Any) -> Any:
    """A linear whose rows do not know of each other: no order of a float64 sum reaches float32's bits."""
    return functional.linear(x.double(), w.double()).float()


def single_row_differs(x: Any, w: Any) -> Any:
    """A GEMV that sums in another order than the GEMM: right to the last bits but not the same bits."""
    return rows_apart(x, w) * (1 + 2**-22 if len(x) == 1 else 1)


CALLS = count()


def unstable(function: Call) -> Call:
    """Differs in the last bits, or by one id, from call to call."""

    def call(*arguments: Any) -> Any:
        out = function(*arguments)
        odd = next(CALLS) % 2
        return out * (1 + 2**-22 * odd) if out.is_floating_point() else out + odd

    return call


def ignoring_strides(op: str) -> Wrap:
    """Reads the memory of the op's first strided argument as if it were contiguous."""
    arguments = OpRunner(OPS[op], OPS[op].implementations["torch"], "f32").inputs(smallest(op))
    at = list(arguments).index(OPS[op].strided[0])

    def wrap(function: Call) -> Call:
        def call(*arguments: Any) -> Any:
            x = arguments[at]
            storage = x.untyped_storage().nbytes() // x.element_size()
            whole = x.as_strided((storage,), (1,), 0)
            return function(*arguments[:at], whole[: x.numel()].reshape(x.shape), *arguments[at + 1 :])

        return call

    return wrap


def highest_of_ties(logits: Any) -> Any:
    """Greedy choice of the highest id of a tie."""
    return logits.shape[1] - 1 - logits.flip(1).argmax(1).to(torch.int32)


def red(mutant: Mutant, examples: int, seed: int = 0, first: bool = False) -> list[Failure]:
    """The properties that a variant turns red, each over ``examples`` drawn cases; only the ``first`` if asked."""
    op = OPS[mutant.op]
    row = op.implementations["torch"]
    declared = {failure.property for failure in row.known} if mutant.plain else set()
    runner = OpRunner(op, replace(row, known=(), bitwise=mutant.bitwise), "f32", mutant.wrap)
    found = []
    for prop in properties(op):
        if prop.name in declared:
            continue
        failure, _ = run_property(runner, prop, Plan(seed=seed), examples, shrink=False)
        if failure is not None:
            found.append(failure)
            if first:
                break
    return found
