"""Ops with one deliberate defect each, in PyTorch, and their unbroken forms: what the checks themselves are tested on.

A ``Wrap`` takes the plain PyTorch row's callable of an op and returns the broken one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from shipway.ops.data import sequences

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]


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
                if defect == "scores biased by position":
                    scores = scores + 0.01 * seen
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
                if defect == "masked keys weighed by 0":
                    out[new][row] += 0 * values.sum(0).repeat_interleave(group, 0)
            if defect == "a sequence alone summed in another order" and len(start) == 1:
                out[new] *= 1 + 2**-22
        return (out.clamp(-1, 1) if defect == "output clamped to 1" else out).to(q.dtype)

    return call


def rope(defect: str) -> Call:
    """RoPE with one defect."""

    def call(x: Any, table: Any, positions: Any) -> Any:
        at = positions.long()
        if defect == "position off by one":
            at = (at + 1) % len(table)
        half = table.shape[1] // 2
        cos, sin = table[at][:, None].split(half, -1)
        low, high, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
        if defect == "pairs interleaved":
            low, high = x[..., : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
        if defect == "sine's sign":
            sin = -sin
        if defect == "partial rotary scales the rest":
            rest = rest * cos[..., :1]
        second = high if defect == "second half not rotated" else high * cos + low * sin
        return torch.cat([low * cos - high * sin, second, rest], -1).to(x.dtype)

    return call


def sample(defect: str) -> Call:
    """Sampling with one defect."""

    def call(logits: Any, uniform: Any, temperature: float, top_k: int, top_p: float, vocab: int) -> Any:
        width = logits.shape[1] if defect == "vocabulary ignored" else vocab
        known = torch.nan_to_num(
            logits[:, :width], 0.0 if defect == "NaN counts as 0" else -torch.inf, torch.inf, -torch.inf
        )
        if defect == "ties go to the highest id":
            scores, order = torch.sort(known.flip(1), descending=True, stable=True)
            order = width - 1 - order
        else:
            scores, order = torch.sort(known, descending=True, stable=True)
        keep = 0 if defect == "top-k ignored" else top_k + (defect == "top-k keeps one more" and top_k > 0)
        scores = scores[:, : keep or width]
        divisor = {"temperature ignored": 1.0, "temperature inverted": 1 / temperature}.get(defect, temperature)
        weights = ((scores - scores[:, :1].clamp(min=torch.finfo().min)) / divisor).exp()
        if defect == "probabilities floored":
            weights = weights.clamp(min=1e-3)
        mass = weights.cumsum(1)
        if top_p < 1 and defect != "top-p ignored":
            share = top_p if defect == "top-p of an unnormalised mass" else top_p * mass[:, -1:]
            weights[:, 1:] *= mass[:, :-1] < share
            if defect == "top-p may keep nothing":
                weights[:, 0] *= mass[:, 0] < mass[:, -1] * top_p
            mass = weights.cumsum(1)
        drawn = torch.zeros_like(uniform) if defect == "always the most probable" else uniform
        if defect == "uniform number of the first row":
            drawn = drawn[:1].expand_as(drawn)
        at = torch.searchsorted(mass, drawn[:, None] * mass[:, -1:], right=True)
        last = (weights.count_nonzero(1)[:, None] - 1).clamp(min=0)
        ids = order.gather(1, torch.minimum(at, last))[:, 0].to(torch.int32)
        return (ids + 1) % vocab if defect == "next id" else ids

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


def rms(defect: str) -> Wrap:
    """RMSNorm with one defect."""

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
