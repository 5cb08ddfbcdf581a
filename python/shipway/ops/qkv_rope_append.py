"""The attention block's input side in one op: q, k and v projections with optional bias, optional RMSNorm of each q
and k head (Qwen3), RoPE, and the append of k and v to the KV cache.

Token ``i`` of sequence ``b`` stands at position ``start[b] + i``: that row of the RoPE table rotates it, and that row
of ``cache [B, layers, 2, S, kv_heads, head_dim]`` receives its key (0) and value (1). No other row is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill, ragged, sequences, weights
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.linear import product
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable
from shipway.ops.rms_norm import rms_norm
from shipway.ops.rope import only_turned, rotate, rotated_magnitude, same_scores, table_of


def project(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    norm: np.ndarray | None,
    eps: float,
    head_dim: int,
) -> tuple[np.ndarray, np.ndarray]:
    """One projection before RoPE, float64: ``x [T, K]``, ``w [N, K]`` -> heads ``[T, N / head_dim, head_dim]``.

    Args:
        x: Input rows.
        w: Weight.
        bias: ``[N]`` or ``None``.
        norm: RMSNorm weight ``[head_dim]`` or ``None``.
        eps: Of the RMSNorm.
        head_dim: Elements of a head.

    Returns:
        The heads and their magnitudes for the a-priori bound. Through the norm, with r the root mean square, an error
        d of the row gives to first order ``w_i / r * (d_i - x_i / r^2 * mean(x_j d_j))``.
    """
    out, magnitude = product(x, w)
    if bias is not None:
        out, magnitude = out + bias, magnitude + np.abs(bias)
    shape = (len(x), -1, head_dim) if len(x) else (0, len(w) // head_dim, head_dim)
    out, magnitude = out.reshape(shape), magnitude.reshape(shape)
    if norm is None:
        return out, magnitude
    square = np.square(out).mean(-1, keepdims=True) + eps
    carried = magnitude + np.abs(out) / square * (np.abs(out) * magnitude).mean(-1, keepdims=True)
    normed = rms_norm(out, norm, eps)
    return normed, np.abs(norm) / np.sqrt(square) * carried + np.abs(normed)


def positions_of(offsets: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Position of every token of a ragged batch, ``[T]``."""
    runs = [np.arange(cached, total) for _, _, cached, total in sequences(offsets, start)]
    return np.concatenate(runs).astype(np.int64)


def reference(
    x: np.ndarray,
    wq: np.ndarray,
    wk: np.ndarray,
    wv: np.ndarray,
    bias_q: np.ndarray | None,
    bias_k: np.ndarray | None,
    bias_v: np.ndarray | None,
    norm_q: np.ndarray | None,
    norm_k: np.ndarray | None,
    eps: float,
    table: np.ndarray,
    cache: np.ndarray,
    offsets: np.ndarray,
    start: np.ndarray,
    layer: int,
) -> dict[str, Output]:
    """``x [T, K]``, ``wq [heads * head_dim, K]``, ``wk``, ``wv [kv_heads * head_dim, K]`` and the cache in the
    activation dtype, biases, norms and table float32 -> ``q [T, heads, head_dim]`` and the cache, in it."""
    head_dim = cache.shape[-1]
    at = positions_of(offsets, start)
    q, q_magnitude = project(x, wq, bias_q, norm_q, eps, head_dim)
    k, k_magnitude = project(x, wk, bias_k, norm_k, eps, head_dim)
    v, v_magnitude = project(x, wv, bias_v, None, eps, head_dim)
    k, k_magnitude = rotate(k, table, at), rotated_magnitude(k_magnitude, table, at)
    after, magnitude = np.array(cache, np.float64), np.zeros(cache.shape)
    for b, new, cached, total in sequences(offsets, start):
        after[b, layer, 0, cached:total], magnitude[b, layer, 0, cached:total] = k[new], k_magnitude[new]
        after[b, layer, 1, cached:total], magnitude[b, layer, 1, cached:total] = v[new], v_magnitude[new]
    reduction = max(x.shape[-1], head_dim)
    q, q_magnitude = rotate(q, table, at), rotated_magnitude(q_magnitude, table, at)
    return {
        "q": Output(q, "act", q_magnitude, reduction),
        "cache": Output(after, "act", magnitude, reduction),
    }


def draw(case: Case, rng: np.random.Generator) -> Inputs:
    """A ragged batch; the cache holds numbers where tokens were cached in this layer and NaN everywhere else."""
    names = ("B", "K", "kv_heads", "group", "head_dim")
    batch, hidden, kv_heads, group, head_dim = (case.dims[name] for name in names)
    offsets, start = ragged(rng, batch, case.dims["length"], case.dims["start"])
    layers = int(rng.integers(1, 4))
    layer = int(rng.integers(0, layers))
    context = max(1, *(total for *_, total in sequences(offsets, start))) + int(rng.integers(0, 9))
    cache = np.full((batch, layers, 2, context, kv_heads, head_dim), np.nan, np.float32)
    for b, _, cached, _ in sequences(offsets, start):
        cache[b, layer, :, :cached] = rng.standard_normal((2, cached, kv_heads, head_dim))
    bias, norm = case.dims["bias"], case.dims["norm"]
    sizes = {"q": kv_heads * group * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    # Quarters of the head are rotated: 4 is the whole head, less is partial rotary.
    rotary = head_dim // 4 * case.dims["rotary_quarters"]
    return {
        "x": fill(rng, (int(offsets[-1]), hidden), case.distribution, case.scale),
        **{f"w{name}": weights(rng, size, hidden) for name, size in sizes.items()},
        **{
            f"bias_{name}": rng.standard_normal(size).astype(np.float32) if bias else None
            for name, size in sizes.items()
        },
        **{
            f"norm_{name}": (1 + 0.3 * rng.standard_normal(head_dim)).astype(np.float32) if norm else None
            for name in "qk"
        },
        "eps": float(rng.choice([1e-5, 1e-6])),
        "table": table_of(context, rotary, float(rng.choice([1e4, 1e5, 5e5]))),
        "cache": cache,
        "offsets": offsets,
        "start": start,
        "layer": layer,
    }


def _torch(dtype: str) -> Callable[..., Any]:
    import torch
    from torch.nn.functional import linear

    def qkv_rope_append(
        x: Any,
        wq: Any,
        wk: Any,
        wv: Any,
        bias_q: Any,
        bias_k: Any,
        bias_v: Any,
        norm_q: Any,
        norm_k: Any,
        eps: float,
        table: Any,
        cache: Any,
        offsets: Any,
        start: Any,
        layer: int,
    ) -> Any:
        angles = table[torch.from_numpy(positions_of(offsets.numpy(), start.numpy()))][:, None]
        half = table.shape[1] // 2
        cos, sin = angles[..., :half], angles[..., half:]

        def heads(w: Any, bias: Any, norm: Any, rotated: bool) -> Any:
            y = linear(x, w).float()
            y = y if bias is None else y + bias
            y = y.reshape(len(x), len(w) // cache.shape[-1], cache.shape[-1])
            if norm is not None:
                y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * norm
            if rotated:
                low, high, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
                y = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
            return y.to(x.dtype)

        k, v = heads(wk, bias_k, norm_k, True), heads(wv, bias_v, None, False)
        for b, new, cached, total in sequences(offsets.numpy(), start.numpy()):
            cache[b, layer, 0, cached:total] = k[new]
            cache[b, layer, 1, cached:total] = v[new]
        return heads(wq, bias_q, norm_q, True)

    return qkv_rope_append


def _position_zero(run: Runner, case: Case) -> str:
    # Angle 0: the first token of an empty cache is only projected.
    case = case.with_dims(start=0)
    inputs = run.inputs(case)
    inputs["offsets"] = np.arange(len(inputs["start"]) + 1, dtype=np.int32)
    inputs["x"] = np.resize(inputs["x"], (len(inputs["start"]), inputs["x"].shape[1]))
    expected = reference(**inputs)
    value, magnitude = project(
        inputs["x"], inputs["wq"], inputs["bias_q"], inputs["norm_q"], inputs["eps"], inputs["cache"].shape[-1]
    )
    return run.against(inputs, {**expected, "q": Output(value, "act", magnitude, expected["q"].reduction)})


def _norm_preserved(run: Runner, case: Case) -> str:
    # A rotation: pairs (i, i + rotary/2) keep their length, and so do whole heads. Compared with the same call
    # under a table of angle 0.
    inputs = run.inputs(case)
    still = np.zeros_like(inputs["table"])
    still[:, : still.shape[1] // 2] = 1
    turned, plain = run(inputs)["q"].astype(np.float64), run({**inputs, "table": still})["q"].astype(np.float64)
    half = still.shape[1] // 2
    return only_turned(plain, turned, half, run.format)


def _distance_only(run: Runner, case: Case) -> str:
    # Scores between two tokens depend on their distance: moving the sequence by some positions keeps q . k.
    inputs = run.inputs(case.with_dims(B=1, length=max(case.dims["length"], 2), start=0))
    tokens, kv_heads, head_dim = len(inputs["x"]), inputs["cache"].shape[4], inputs["cache"].shape[5]
    shift = 1 + case.seed % 30
    # A slow and exactly periodic table: float32 cosines of large angles would hide the fact under their rounding.
    table = table_of(tokens + shift, inputs["table"].shape[1], 1e4)
    cache = np.full((1, 1, 2, tokens + shift, kv_heads, head_dim), np.nan, np.float32)
    heads = []
    for first in (0, shift):
        out = run({**inputs, "table": table, "cache": cache, "layer": 0, "start": np.array([first], np.int32)})
        keys = out["cache"][0, 0, 0, first : first + tokens].astype(np.float64)
        q = out["q"].astype(np.float64)[:, :: out["q"].shape[1] // kv_heads]
        heads.append((q, keys))
    return same_scores(heads, run.format)


def _zero_bias(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    biases = {f"bias_{name}": np.zeros(len(inputs[f"w{name}"]), np.float32) for name in "qkv"}
    without = {**inputs, **dict.fromkeys(biases)}
    return run.same({**inputs, **biases}, run(without))


def _token_by_token(run: Runner, case: Case) -> str:
    # Appending one token at a time fills the cache as one prefill does.
    inputs = run.inputs(case.with_dims(B=1))
    whole = run(inputs)
    cached = int(inputs["start"][0])
    cache = inputs["cache"]
    for row in range(len(inputs["x"])):
        step = {
            **inputs,
            "x": inputs["x"][row : row + 1],
            "cache": cache,
            "offsets": np.array([0, 1], np.int32),
            "start": np.array([cached + row], np.int32),
        }
        if reason := run.same(step, {"q": whole["q"][row : row + 1]}):
            return f"row {row} alone: {reason}"
        cache = run(step)["cache"]
    if run.bitwise and not np.array_equal(cache, whole["cache"], equal_nan=True):
        return "the cache filled token by token is not the prefilled one"
    return ""


def _sequence_alone(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    together = run(inputs)
    for b, new, cached, _ in sequences(inputs["offsets"], inputs["start"]):
        alone = {
            **inputs,
            "x": inputs["x"][new],
            "cache": inputs["cache"][b : b + 1],
            "offsets": np.array([0, new.stop - new.start], np.int32),
            "start": np.array([cached], np.int32),
        }
        if reason := run.same(alone, {"q": together["q"][new], "cache": together["cache"][b : b + 1]}):
            return f"sequence {b} alone differs from itself in the batch: {reason}"
    return ""


def _only_new_rows(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    after = run(inputs)["cache"]
    untouched = np.ones(after.shape, bool)
    for b, _, cached, total in sequences(inputs["offsets"], inputs["start"]):
        untouched[b, inputs["layer"], :, cached:total] = False
    same = np.array_equal(after[untouched], inputs["cache"][untouched], equal_nan=True)
    return "" if same else "a cache row that is not the batch's own changed"


ONE = Case(
    {
        "B": 1,
        "length": 1,
        "start": 0,
        "K": 65,
        "kv_heads": 2,
        "group": 2,
        "rotary_quarters": 4,
        "bias": 1,
        "norm": 0,
        "head_dim": 64,
    },
    seed=1,
)
TRAPS = (
    ONE,
    ONE.with_dims(length=0, start=3),
    ONE.with_dims(B=2, length=3, start=2),  # as many sequences as KV heads
    *(ONE.with_dims(length=5, K=hidden, bias=0) for hidden in (576, 960)),
    ONE.with_dims(length=5, rotary_quarters=1, norm=1),  # partial rotary
    *(ONE.with_dims(length=3, start=4, head_dim=head_dim, norm=1) for head_dim in (16, 80, 96, 128, 160)),
    ONE.with_dims(length=17, K=1040),  # enough for several threads
    ONE.with_dims(length=65, K=40),  # of tiles as in linear
)

OP = Op(
    name="qkv_rope_append",
    summary="q, k, v projections, bias, qk-norm, RoPE, append to the KV cache",
    dims={
        "B": Dim(1, 4, (2, 3)),
        "length": Dim(0, 20, (1, 2, 7, 8, 9, 17)),
        "start": Dim(0, 40, (1, 2, 7, 8, 9, 33)),
        "K": Dim(1, 1100, (2, 15, 16, 17, 33, 65, 576, 960, 1040)),
        "kv_heads": Dim(1, 3, (2, 3)),
        "group": Dim(1, 5, (2, 3)),
        "rotary_quarters": Dim(1, 4, (4,)),
        "bias": Dim(0, 1),
        "norm": Dim(0, 1),
        "head_dim": Dim(16, 160, (16, 64, 80, 96, 128, 160), static=True),
    },
    distributions=("normal", "uniform", "constant", "spike", "zero_row", "alternating"),
    draw=draw,
    activations=frozenset({"x", "wq", "wk", "wv", "cache"}),
    reference=reference,
    result="q",
    mutates=("cache",),
    strided=("x", "wq", "wk", "wv", "table", "cache"),
    traps=TRAPS,
    properties=(
        repeatable(),
        Property("only_the_new_rows_are_written", _only_new_rows),
        Property("position_zero_is_the_identity", _position_zero),
        Property("rotation_keeps_lengths_and_the_rest", _norm_preserved),
        Property("scores_depend_on_the_distance", _distance_only),
        Property("zero_bias_is_no_bias", _zero_bias),
        Property("token_by_token_is_the_prefill", _token_by_token),
        Property("sequence_alone", _sequence_alone),
    ),
    implementations=rows(torch_row(_torch), *compiled_rows("qkv_rope_append")),
)
