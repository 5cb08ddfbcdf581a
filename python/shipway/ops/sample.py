"""The next token of each row drawn from its logits by temperature, top-k and top-p, given one uniform number a row.

In this order: only ids below ``vocab`` count (a checkpoint may pad its logits); logits are divided by the temperature;
the ``top_k`` largest are kept (0: all); of these the smallest set of most probable ones whose mass, over that of the
kept, reaches ``top_p``, at least one. The kept are laid out by falling probability, ties by lower id, and the token
under ``uniform`` times their mass is chosen. NaN counts as minus infinity, whose probability is 0; a row of nothing
else gives id 0. Temperature 0 is ``greedy``.

Where a set or an interval ends depends on the last bits of a sum, so the reference accepts every id whose interval
comes within :data:`SLACK` of the uniform number, under every set that ends within it of ``top_p``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shipway.ops.data import fill
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.op import Case, Dim, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import repeatable, row_alone

SLACK = 1e-5
"""Error of a float32 cumulative sum over a row, as a share of the row's mass."""


def accepted(
    logits: np.ndarray, uniform: float, temperature: float, top_k: int, top_p: float, vocab: int
) -> np.ndarray:
    """Which ids a correct float32 sampler may choose for one row ``logits [V]``: bool ``[V]``."""
    scores = np.where(np.isnan(logits[:vocab]), -np.inf, np.asarray(logits[:vocab], np.float64))
    chosen = np.zeros(len(logits), bool)
    if scores.max() == -np.inf:
        chosen[0] = True
        return chosen
    order = np.argsort(-scores, kind="stable")[: top_k or vocab]
    scaled = (scores[order] - scores[order[0]]) / temperature
    weights = np.exp(scaled)
    mass = np.cumsum(weights) / weights.sum()
    ends = (1 + int(np.searchsorted(mass, top_p + slack)) if top_p < 1 else len(order) for slack in (-SLACK, SLACK))
    fewest, most = (min(end, len(order)) for end in ends)
    # Unequal logits whose probabilities are equal to float32's last bits may stand in either order.
    gap = -np.diff(np.maximum(scaled, -1e30))
    near = np.concatenate([[0], np.cumsum((gap > 1e-6 * (1 + np.abs(scaled[:-1]))) | (gap == 0))])
    for kept in range(fewest, most + 1):
        end = mass[:kept] / mass[kept - 1]
        begin = np.concatenate([[0.0], end[:-1]])
        hit = (begin - SLACK <= uniform) & (uniform <= end + SLACK)
        chosen[order[:kept][np.isin(near[:kept], near[:kept][hit])]] = True
    chosen[order[weights == 0]] = False
    return chosen


def reference(
    logits: np.ndarray, uniform: np.ndarray, temperature: float, top_k: int, top_p: float, vocab: int
) -> dict[str, Output]:
    """``logits [R, V]`` float32, ``uniform [R]`` float32 in [0, 1) -> ``ids [R]`` int32, as a mask ``[R, V]``."""
    masks = [accepted(row, float(u), temperature, top_k, top_p, vocab) for row, u in zip(logits, uniform, strict=True)]
    return {"ids": Output(np.array(masks, bool).reshape(logits.shape), "choice")}


def _draw(case: Case, rng: np.random.Generator) -> Inputs:
    count, width = case.dims["R"], case.dims["V"]
    vocab = max(1, width - case.dims["padding"])
    logits = fill(rng, (count, width), case.distribution, case.scale)
    logits[:, vocab:] = 1e6  # the padded tail would win every draw
    return {
        "logits": logits,
        "uniform": rng.random(count, np.float32),
        "temperature": float(rng.choice([0.3, 1.0, 1.7])),
        "top_k": min(case.dims["top_k"], vocab),
        "top_p": float(rng.choice([1.0, 0.9, 0.5, 1e-6])),
        "vocab": vocab,
    }


def _torch(dtype: str) -> Callable[..., Any]:
    import torch

    def sample(logits: Any, uniform: Any, temperature: float, top_k: int, top_p: float, vocab: int) -> Any:
        known = torch.where(logits[:, :vocab].isnan(), -torch.inf, logits[:, :vocab])
        scores, order = torch.sort(known, descending=True, stable=True)
        scores = scores[:, : top_k or vocab]
        weights = ((scores - scores[:, :1].clamp(min=torch.finfo().min)) / temperature).exp()
        mass = weights.cumsum(1)
        if top_p < 1:
            weights[:, 1:] *= mass[:, :-1] < top_p * mass[:, -1:]
            mass = weights.cumsum(1)
        at = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)
        last = (weights.count_nonzero(1)[:, None] - 1).clamp(min=0)
        return order.gather(1, torch.minimum(at, last))[:, 0].to(torch.int32)

    return sample


def _top_one(run: Runner, case: Case) -> str:
    # One candidate: greedy choice, whatever the uniform number.
    inputs = run.inputs(case)
    inputs["logits"] = np.random.default_rng(case.seed).permuted(
        np.broadcast_to(np.arange(inputs["logits"].shape[1], dtype=np.float32), inputs["logits"].shape), axis=1
    )
    best = inputs["logits"][:, : inputs["vocab"]].argmax(1).astype(np.int32)
    for limit in ({"top_k": 1, "top_p": 1.0}, {"top_k": 0, "top_p": 1e-6}):
        if reason := run.against({**inputs, **limit}, {"ids": Output(best, "exact")}):
            return f"{limit}: {reason}"
    return ""


def _equal_logits(run: Runner, case: Case) -> str:
    # n equal logits: the uniform number picks the id, in order; taken mid-interval so that no rounding decides.
    inputs = run.inputs(case)
    inputs["logits"][:] = 2.0
    kept = min(inputs["top_k"] or inputs["vocab"], inputs["vocab"])
    inputs["top_p"] = 1.0
    at = np.random.default_rng(case.seed).integers(0, kept, len(inputs["uniform"]))
    inputs["uniform"] = ((at + 0.5) / kept).astype(np.float32)
    return run.against(inputs, {"ids": Output(at.astype(np.int32), "exact")})


def _frequencies(run: Runner, case: Case) -> str:
    # A grid of uniform numbers reproduces the distribution: each id as often as its probability says, within one.
    inputs = run.inputs(case.with_dims(R=1))
    inputs.update(top_k=0, top_p=1.0)
    inputs["logits"] = np.clip(inputs["logits"], -5, 5)
    width, vocab, draws = inputs["logits"].shape[1], inputs["vocab"], 400
    grid = {**inputs, "logits": np.repeat(inputs["logits"], draws, 0)}
    grid["uniform"] = ((np.arange(draws) + 0.5) / draws).astype(np.float32)
    ids = run(grid)["ids"]
    if ids.min() < 0 or ids.max() >= vocab:
        return f"ids {ids.min()} to {ids.max()} for a vocabulary of {vocab}"
    logits = inputs["logits"][0, :vocab].astype(np.float64)
    p = np.exp((logits - logits.max()) / inputs["temperature"])
    off = np.abs(np.bincount(ids, minlength=width)[:vocab] - draws * p / p.sum())
    return (
        "" if off.max() <= 1.5 else f"id {off.argmax()} is drawn {off.max():.1f} of {draws} times too often or seldom"
    )


def _padding(run: Runner, case: Case) -> str:
    # Whatever stands past the vocabulary, the choice keeps its bits.
    inputs = run.inputs(case)
    before = run(inputs)["ids"]
    for value in (np.nan, np.inf, -np.inf, 0.0):
        inputs["logits"][:, inputs["vocab"] :] = value
        if not np.array_equal(run(inputs)["ids"], before):
            return f"{value} past the vocabulary changes the choice"
    return "" if (before < inputs["vocab"]).all() else "an id past the vocabulary is chosen"


def _forbidden(value: float) -> Callable[[Runner, Case], str]:
    """Tokens of probability 0 are never chosen, not even by the largest uniform number."""

    def check(run: Runner, case: Case) -> str:
        inputs = run.inputs(case)
        keep = case.seed % inputs["vocab"]
        inputs["logits"][:, : inputs["vocab"]] = value
        inputs["logits"][:, keep] = 3.0
        for uniform in (0.0, 1 - 2.0**-24):
            inputs["uniform"][:] = uniform
            expected = np.full(len(inputs["uniform"]), keep, np.int32)
            if reason := run.against(inputs, {"ids": Output(expected, "exact")}):
                return f"uniform {uniform}: {reason}"
        return ""

    return check


def _nothing(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    inputs["logits"][:] = -np.inf
    return run.against(inputs, {"ids": Output(np.zeros(len(inputs["uniform"]), np.int32), "exact")})


OP = Op(
    name="sample",
    summary="temperature, top-k, top-p, then the token under a uniform number",
    dims={
        "R": Dim(0, 6, (1, 2, 3)),
        "V": Dim(1, 700, (2, 15, 16, 17, 63, 64, 65, 257, 509)),
        "top_k": Dim(0, 80, (1, 2, 40)),
        "padding": Dim(0, 9, (1,)),
    },
    distributions=("normal", "constant", "spike", "levels", "tiny"),
    draw=_draw,
    activations=frozenset(),
    reference=reference,
    result="ids",
    strided=("logits",),
    traps=(Case({"R": 9, "V": 700, "top_k": 0, "padding": 1}),),  # enough for several threads
    scales=(1.0, 1e-2, 5.0, 30.0),
    properties=(
        repeatable(),
        row_alone("ids", "logits", "uniform"),
        Property("one_candidate_is_greedy", _top_one),
        Property("equal_logits_are_drawn_in_order", _equal_logits),
        Property("frequencies_are_the_probabilities", _frequencies),
        Property("padded_tail_is_never_chosen", _padding),
        Property("forbidden_tokens_are_never_chosen", _forbidden(-np.inf)),
        Property("nan_is_never_chosen", _forbidden(np.nan)),
        Property("nothing_to_choose_from_gives_zero", _nothing),
    ),
    implementations=rows(torch_row(_torch), *compiled_rows("sample")),
)
