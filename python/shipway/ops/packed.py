"""The ops with packed matrices: each is the op of its name before ``_int8`` or ``_int4``, on the matrices that its own
stand for. How these are stored says ``shipway.signature.packed_arguments``.

They are GEMVs of the GPU kernels: a row of x at a time, or a few, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shipway.ops import gate_up_silu, qkv_rope_append
from shipway.ops.implementations import compiled_rows, rows, torch_row
from shipway.ops.linear import LINEAR
from shipway.ops.op import Case, Inputs, Op, Output, Property, Runner
from shipway.ops.properties import poisoned_row_stays, repeatable, row_alone
from shipway.signature import GROUP, MATRICES, SIGNATURES, WORDS, packed_arguments

_OF_BATCHES = ("repeatable", "only_the_new_rows_are_written", "sequence_alone")
_UNUSED = 15 << 4  # the high half of a row's last byte where K is odd


def pack(w: np.ndarray, word: str) -> tuple[np.ndarray, ...]:
    """Packs ``w [N, K]`` with the error of the nearest stored number; returns stored elements, scales, zero points."""
    columns = w.shape[1]
    starts = np.arange(0, columns, GROUP)
    least = np.minimum(np.minimum.reduceat(w, starts, axis=1), 0)
    most = np.maximum(np.maximum.reduceat(w, starts, axis=1), 0)
    scales = (np.maximum(-least, most) / 128 if word == "int8" else (most - least) / 15).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales.astype(np.float64))
    group = np.arange(columns) // GROUP
    if word == "int8":
        return np.clip(np.rint(w / divisors[:, group]), -128, 127).astype(np.int8), scales
    zeros = np.clip(np.rint(-least / divisors), 0, 15)
    values = np.clip(np.rint(w / divisors[:, group]) + zeros[:, group], 0, 15).astype(np.uint8)
    halves = np.pad(values, ((0, 0), (0, columns % 2)), constant_values=_UNUSED >> 4)
    return halves[:, ::2] | halves[:, 1::2] << 4, scales, zeros.astype(np.uint8)


def unpacked(columns: int, stored: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> np.ndarray:
    """The matrix ``[N, columns]`` that packed arguments stand for, float64."""
    k = np.arange(columns)
    if zeros is None:
        return stored[:, k] * scales[:, k // GROUP].astype(np.float64)
    values = stored[:, k // 2] >> (k % 2 * 4).astype(np.uint8) & 15
    return (values - zeros[:, k // GROUP].astype(np.float64)) * scales[:, k // GROUP]


def plain(op: str, word: str, given: Mapping[str, Any], unpack: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of ``op`` for those of its packed form.

    Args:
        op: Key of :data:`shipway.signature.MATRICES`.
        word: One of ``shipway.signature.WORDS``.
        given: Arguments by name.
        unpack: ``(x, *packed arguments of a matrix) -> matrix``.
    """
    packed = {matrix: packed_arguments(matrix, word) for matrix in MATRICES[op]}
    parts = {name for names in packed.values() for name in names[1:]}
    return {
        name: unpack(given["x"], *(given[part] for part in packed[name])) if name in packed else value
        for name, value in given.items()
        if name not in parts
    }


def dequantised(op: Op, word: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of a packed op of one of the plain ``op``, on torch tensors, in float32."""
    import torch

    def matrix(x: Any, stored: Any, scales: Any, zeros: Any = None) -> Any:
        def each(of_groups: Any) -> Any:
            return of_groups.float().repeat_interleave(GROUP, 1)[:, : x.shape[1]]

        if zeros is None:
            return stored.float() * each(scales)
        values = torch.stack([stored & 15, stored >> 4], -1).flatten(1)[:, : x.shape[1]]
        return (values.float() - each(zeros)) * each(scales)

    names = list(SIGNATURES[f"{op.name}_{word}"])

    def call(*arguments: Any) -> Any:
        given = plain(op.name, word, dict(zip(names, arguments, strict=True)), matrix)
        # Rounded to bfloat16, the matrices would have another error than the op.
        return function(*{**given, "x": given["x"].float()}.values())

    return call


def _draw(op: Op, word: str, case: Case, rng: np.random.Generator) -> Inputs:
    inputs: Inputs = {}
    for name, value in op.draw(case, rng).items():
        if name in MATRICES[op.name]:
            inputs |= dict(zip(packed_arguments(name, word), pack(value, word), strict=True))
        else:
            inputs[name] = value
    return inputs


def _reference(op: Op, word: str, **given: Any) -> dict[str, Output]:
    return op.reference(**plain(op.name, word, given, lambda x, *parts: unpacked(x.shape[1], *parts)))


def _every_number(word: str, run: Runner, case: Case) -> str:
    # A row with a 1 picks a column of the matrix, whose elements no format here rounds: scales are powers of two.
    inputs = run.inputs(case.with_dims(T=max(case.dims["T"], 1)))
    rng = np.random.default_rng(case.seed)
    x, stored, scales = inputs["x"], inputs["w"], inputs["w_scales"]
    kind = np.iinfo(stored.dtype)
    inputs["w"] = rng.integers(kind.min, kind.max, stored.shape, stored.dtype, endpoint=True)
    inputs["w_scales"] = (2.0 ** rng.integers(-14, 8, scales.shape)).astype(np.float16)
    if word == "int4":
        inputs["w_zeros"] = rng.integers(0, 255, scales.shape, np.uint8, endpoint=True)
    picked = rng.integers(0, x.shape[1], len(x))
    inputs["x"] = np.eye(x.shape[1], dtype=np.float32)[picked]
    parts = [inputs[name] for name in packed_arguments("w", word)]
    return run.against(inputs, {"out": Output(unpacked(x.shape[1], *parts)[:, picked].T, "exact")})


def _columns_alone(word: str, run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    cut = 1 + case.seed % len(inputs["w"])
    fewer = {name: inputs[name][:cut] for name in packed_arguments("w", word)}
    return run.same({**inputs, **fewer}, {"out": run(inputs)["out"][:, :cut]})


def _poisoned_scale(run: Runner, case: Case) -> str:
    inputs = run.inputs(case)
    clean = run(inputs)["out"]
    bad, group = (case.seed % size for size in inputs["w_scales"].shape)
    inputs["w_scales"][bad, group] = np.nan
    out = run(inputs)["out"]
    if not np.isnan(out[:, bad]).all():
        return f"the scale of group {group} in row {bad} is NaN but its output is not"
    others = np.arange(out.shape[1]) != bad
    same = np.array_equal(out[:, others], clean[:, others], equal_nan=True)
    return "" if same else f"a scale of NaN in row {bad} changes other columns"


def _unused_half(matrices: tuple[str, ...], run: Runner, case: Case) -> str:
    inputs = run.inputs(case.with_dims(K=(case.dims["K"] - 1) | 1))
    before = run(inputs)
    for name in matrices:
        inputs[name][:, -1] ^= _UNUSED
    after = run(inputs)
    same = all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)
    return "" if same else "the half byte behind an odd row is read"


def _op(op: Op, word: str, result: str, traps: tuple[Case, ...], properties: tuple[Property, ...]) -> Op:
    """The packed form of an op, whose result is in the dtype ``"act"`` or ``"f32"``."""
    matrices = MATRICES[op.name]
    name = f"{op.name}_{word}"
    if word == "int4":
        properties = (*properties, Property("unused_half_is_not_read", partial(_unused_half, matrices)))

    def torch(dtype: str) -> Callable[..., Any]:
        # head_dim is what an implementation was compiled for, and PyTorch is not.
        wide = dequantised(op, word, op.implementations["torch"].make("f32", 0))
        return wide if result == "f32" else lambda x, *rest: wide(x, *rest).to(x.dtype)

    return replace(
        op,
        name=name,
        summary=f"{op.summary}, matrices in {word}",
        draw=partial(_draw, op, word),
        activations=op.activations - {*matrices},
        reference=partial(_reference, op, word),
        strided=tuple(name for name in op.strided if name not in matrices),
        traps=traps,
        properties=properties,
        implementations=rows(torch_row(torch), *compiled_rows(name, only=(), on_gpus=("bf16",))),
    )


_ROWS = (repeatable(), row_alone("out", "x"), poisoned_row_stays("out", "x"))
# One row and more than a GEMV takes at a time; whole groups, a short one that chunks of 16 bytes end in, odd rows.
_TRAPS = tuple(
    Case({"T": tokens, "N": columns, "K": hidden})
    for tokens, columns, hidden in ((1, 97, 576), (5, 97, 1040), (9, 33, 1039), (2, 3, 33))
)
_NUMBERS = tuple(Case({"T": 9, "N": 33, "K": hidden}) for hidden in (64, 97))
_QKV = qkv_rope_append.OP

PACKED = tuple(
    packed
    for word in WORDS
    for packed in (
        _op(
            _QKV,
            word,
            "act",
            (qkv_rope_append.ONE, *(qkv_rope_append.ONE.with_dims(length=5, K=hidden) for hidden in (576, 1039))),
            tuple(prop for prop in _QKV.properties if prop.name in _OF_BATCHES),
        ),
        _op(
            LINEAR,
            word,
            "f32",
            _TRAPS,
            (
                *_ROWS,
                # Of whole groups, which are read 16 bytes at a time, and of a last one that is short.
                Property("every_stored_number_has_its_value", partial(_every_number, word), examples=_NUMBERS),
                Property("columns_alone", partial(_columns_alone, word)),
                Property("poisoned_scale_stays", _poisoned_scale),
            ),
        ),
        _op(gate_up_silu.OP, word, "act", _TRAPS, _ROWS),
    )
)
