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

from shipway.ops.attention_properties import (
    SHARED,
    future_left,
    key_order_is_free,
    prefill_row_is_decode,
    unseeing_rows_are_zero,
)
from shipway.ops.attention_reference import reference, visible
from shipway.ops.data import fill, ragged, sequences
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, KnownFailure, Op, Property


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


HEADS = {
    "kv_heads": Dim(1, 5, (2, 3, 4)),
    "group": Dim(1, 8, (2, 3, 4, 7)),
    "head_dim": Dim(16, 160, (16, 64, 80, 96, 128, 160), static=True),
}
WINDOW = Dim(0, 80, (1, 2, 7, 8, 9, 16, 17, 33))
FILLS = ("normal", "uniform", "constant", "spike", "zero_row", "levels")
PREFILL_DIMS = {"B": Dim(1, 4, (2, 3)), "length": Dim(0, 70, (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65))}
START = Dim(0, 70, (1, 2, 7, 8, 9, 14, 30, 31, 33, 62, 63, 64, 65))
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
    # A step of 64, 32 or 16 keys that all but the first row see whole.
    *(ONE.with_dims(length=3, start=62, head_dim=head_dim) for head_dim in (64, *HEAD_DIMS)),
    # Such a step, whose first key the window hides from the second row.
    *(ONE.with_dims(length=2, start=63, window=64, head_dim=head_dim) for head_dim in (64, *HEAD_DIMS)),
    ONE.with_dims(length=65, start=65, kv_heads=3, group=4),  # enough for several threads
)
STEP = Case({"B": 1, "start": 0, "window": 0, "kv_heads": 2, "group": 2, "head_dim": 64}, seed=1)
DECODE_TRAPS = (
    STEP,
    STEP.with_dims(start=19),
    STEP.with_dims(B=2, start=3),
    *(STEP.with_dims(start=15, window=window) for window in (15, 16, 17)),
    *(STEP.with_dims(start=15, head_dim=head_dim) for head_dim in HEAD_DIMS),
    STEP.with_dims(B=4, start=300, kv_heads=3, group=4),  # enough for several threads
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
        Property("future_changes_leave_the_past", future_left(3.0)),
        Property("nan_in_the_future_does_not_leak", future_left(np.nan), (NAN_FUTURE,)),
        Property("infinity_in_the_future_does_not_leak", future_left(np.inf), (NAN_FUTURE,)),
        Property("prefill_row_is_the_decode_step", prefill_row_is_decode),
        Property("rows_that_see_no_key_are_zero", unseeing_rows_are_zero, (TEN_OVER_FOUR,)),
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
    properties=(*SHARED, Property("order_of_the_keys_does_not_matter", key_order_is_free)),
    implementations=rows(
        torch_row(_torch, known=DECODE_LEAKS),
        *compiled_rows("attention_decode", dict.fromkeys(DENSE, DECODE_LEAKS)),
    ),
)
