"""What each op must read, write and compute, and the shapes it is timed at by default.

Bytes: every argument that takes part is read once and every output written once, whatever the kernel does; tensors of
the activation dtype count in it, the rest at 4 bytes an element. FLOPs: 2 per multiply-add of the products, one per
element of whatever else is done to it; exponentials, roots and divisions count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from shipway.measure.limits import BYTES
from shipway.ops.attention_reference import visible
from shipway.ops.data import sequences
from shipway.ops.op import Inputs
from shipway.ops.packed import plain
from shipway.signature import MATRICES, WORDS, packed_arguments

_HIDDEN, _INNER, _VOCAB = 576, 1536, 49152  # of the default model, as the heads below
_HEADS = {"kv_heads": 3, "group": 3, "head_dim": 64}
_CONTEXT, _PROMPT = 512, 128
_DECODE_AND_PREFILL = {"decode": {"T": 1}, "prefill": {"T": _PROMPT}}


def _rows(**dims: int) -> dict[str, dict[str, int]]:
    """The shapes of an op that takes ``T`` rows: one, and a prompt's."""
    return {name: {**rows, **dims} for name, rows in _DECODE_AND_PREFILL.items()}


_SHAPES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "embedding": _rows(V=_VOCAB, K=_HIDDEN),
    "rms_norm": _rows(K=_HIDDEN),
    "rope": _rows(H=9, rotary_quarters=4, head_dim=64),
    "qkv_rope_append": {
        name: {"B": 1, **new, "K": _HIDDEN, **_HEADS, "rotary_quarters": 4, "bias": 0, "norm": 0}
        for name, new in {
            "decode": {"length": 1, "start": _CONTEXT - 1},
            "prefill": {"length": _PROMPT, "start": 0},
        }.items()
    },
    "attention_prefill": {"prefill": {"B": 1, "length": _PROMPT, "start": 0, "window": 0, **_HEADS}},
    "attention_decode": {"decode": {"B": 1, "start": _CONTEXT - 1, "window": 0, **_HEADS}},
    "linear": _rows(N=_INNER, K=_HIDDEN),
    "linear_residual": _rows(N=_HIDDEN, K=_INNER),
    "gate_up_silu": _rows(N=_INNER, K=_HIDDEN),
    "mlp": _rows(N=_INNER, K=_HIDDEN),
    "lm_head": _rows(V=_VOCAB, K=_HIDDEN, R=1),
    "greedy": {"decode": {"R": 1, "V": _VOCAB}},
    "sample": {"decode": {"R": 1, "V": _VOCAB, "top_k": 40, "padding": 0}},
}
SHAPES = {**_SHAPES, **{f"{op}_{word}": _SHAPES[op] for op in MATRICES for word in WORDS}}
"""Dims of each op by shape name: the default model's decode step (512 tokens of context) and its prefill of 128."""

INDICES: Mapping[str, tuple[str, str]] = {"embedding": ("ids", "table")}
"""Ops that read a few rows of a large array: the argument that names the rows, and the array."""


@dataclass(frozen=True)
class Work:
    """What one call must do: ``bytes`` read and written, ``flops`` computed."""

    bytes: float
    flops: float


def _embedding(a: int, ids: np.ndarray, table: np.ndarray) -> Work:
    elements = len(ids) * table.shape[1]
    return Work(4 * len(ids) + elements * (a + 4), 0)


def _rms_norm(a: int, x: np.ndarray, weight: np.ndarray, eps: float) -> Work:
    return Work(4 * x.size + 4 * weight.size + a * x.size, 4 * x.size)


def _rope(a: int, x: np.ndarray, table: np.ndarray, positions: np.ndarray) -> Work:
    rotated = len(x) * x.shape[1] * table.shape[1]
    return Work(2 * a * x.size + 4 * len(x) * (table.shape[1] + 1), 3 * rotated)


def _qkv_rope_append(a: int, **given: np.ndarray) -> Work:
    x, table, head_dim = given["x"], given["table"], given["cache"].shape[-1]
    matrices = [given[name] for name in ("wq", "wk", "wv")]
    vectors = [v for name, v in given.items() if name.startswith(("bias", "norm")) and v is not None]
    made = len(x) * sum(len(w) for w in matrices)
    rotated = len(x) * (len(given["wq"]) + len(given["wk"])) // head_dim * table.shape[1]
    read = a * (x.size + sum(w.size for w in matrices)) + 4 * sum(v.size for v in vectors) + 4 * len(x) * table.shape[1]
    return Work(read + a * made, 2 * made * x.shape[1] + 3 * rotated)


def _attention(
    a: int,
    q: np.ndarray,
    cache: np.ndarray,
    offsets: np.ndarray,
    start: np.ndarray,
    layer: int,
    scale: float,
    window: int,
) -> Work:
    keys = pairs = 0
    for _, new, _, total in sequences(offsets, start):
        seen = visible(new.stop - new.start, total, window)
        keys += int(seen.any(0).sum())
        pairs += int(seen.sum())
    kept = 2 * keys * cache.shape[4] * cache.shape[5]
    return Work(a * (2 * q.size + kept), 4 * pairs * q.shape[1] * q.shape[2])


def _linear(a: int, x: np.ndarray, w: np.ndarray) -> Work:
    made = len(x) * len(w)
    return Work(a * (x.size + w.size) + 4 * made, 2 * made * x.shape[1])


def _linear_residual(a: int, x: np.ndarray, w: np.ndarray, residual: np.ndarray) -> Work:
    product = _linear(a, x, w)
    return Work(product.bytes + 4 * residual.size, product.flops + residual.size)


def _gate_up_silu(a: int, x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> Work:
    made = len(x) * len(gate)
    return Work(a * (x.size + gate.size + up.size + made), 4 * made * x.shape[1] + 4 * made)


def _mlp(a: int, x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, residual: np.ndarray) -> Work:
    inner = _gate_up_silu(a, x, gate, up)
    between = len(x) * len(gate)
    # What stands between the products need not leave the cache.
    moved = inner.bytes - a * between + a * down.size + 8 * residual.size
    return Work(moved, inner.flops + 2 * between * len(down) + residual.size)


def _lm_head(a: int, x: np.ndarray, w: np.ndarray, rows: np.ndarray) -> Work:
    product = _linear(a, x[rows], w)
    return Work(product.bytes + 4 * len(rows), product.flops)


def _greedy(a: int, logits: np.ndarray) -> Work:
    return Work(4 * (logits.size + len(logits)), logits.size)


def _sample(
    a: int, logits: np.ndarray, uniform: np.ndarray, temperature: float, top_k: int, top_p: float, vocab: int
) -> Work:
    read = len(logits) * vocab
    return Work(4 * (read + 2 * len(logits)), 3 * read)


def _packed(op: str, word: str, a: int, **given: np.ndarray) -> Work:
    """The work of a plain op, with the bytes that its packed matrices have."""

    def matrix(x: np.ndarray, stored: np.ndarray, *parts: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.float32(0), (len(stored), x.shape[1]))

    arguments = plain(op, word, given, matrix)
    work = _WORK[op](a, **arguments)
    elements = sum(arguments[name].size for name in MATRICES[op])
    stored = sum(given[part].nbytes for name in MATRICES[op] for part in packed_arguments(name, word))
    return Work(work.bytes - a * elements + stored, work.flops)


_WORK: Mapping[str, Callable[..., Work]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "qkv_rope_append": _qkv_rope_append,
    "attention_prefill": _attention,
    "attention_decode": _attention,
    "linear": _linear,
    "linear_residual": _linear_residual,
    "gate_up_silu": _gate_up_silu,
    "mlp": _mlp,
    "lm_head": _lm_head,
    "greedy": _greedy,
    "sample": _sample,
    **{f"{op}_{word}": partial(_packed, op, word) for op in MATRICES for word in WORDS},
}


def work_of(op: str, inputs: Inputs, dtype: str) -> Work:
    """Returns what one call of ``op`` on these arguments must do in activation dtype ``dtype``."""
    return _WORK[op](BYTES[dtype], **inputs)
