"""What a valid call of each op is, whoever implements it, and the check of one call.

The ops are those of ``shipway.ops``. The signatures stand below them, because the graphs that implement the ops take
their input types from here and the check comes before every implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LARGEST_INT32 = 2**31 - 1
_LARGEST_F32 = (2 - 2**-23) * 2.0**127
_LARGEST_HEAD_DIM = 256
_TORCH = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "tf32": "float32",
    "int32": "int32",
    "int8": "int8",
    "uint8": "uint8",
}
_MAY_BE_EMPTY = ("T", "R")  # no tokens and no rows are calls like any other


@dataclass(frozen=True)
class Array:
    """An array argument.

    Attributes:
        dtype: ``"act"`` (activations, matrices, KV cache), ``"f32"``, ``"int32"``, or of packed matrices ``"int8"``,
            ``"uint8"`` or ``"f16"``.
        dims: A number, or a name that stands for one number throughout a call; ``D`` is the head_dim
            that an implementation was made for.
        below: Elements are from 0 and below this number, or the number of this name; ``""``: any.
        group: Optional arguments are ``None`` all of a group or none of it; ``""``: never ``None``.
        written: Written in place.
    """

    dtype: str
    dims: tuple[int | str, ...]
    below: int | str = ""
    group: str = ""
    written: bool = False


@dataclass(frozen=True)
class Number:
    """A scalar argument: an int that an int32 holds, or where a float is due a float that a float32 holds.

    Attributes:
        kind: ``int``, or ``float``, which an int may stand for.
        low: Least value.
        high: Largest value.
        above: ``low`` itself is left out.
    """

    kind: type[int] | type[float]
    low: int
    high: float = math.inf
    above: bool = False


Signature = Mapping[str, Array | Number]

_CACHE = Array("act", ("slots", "layers", 2, "capacity", "kv_heads", "D"))
_TABLE = Array("f32", ("positions", "rotary_dim"))
_BATCH: Signature = {"offsets": Array("int32", ("B1",)), "start": Array("int32", ("B",)), "layer": Number(int, 0)}
_X = Array("act", ("T", "K"))
_ATTENTION: Signature = {
    "q": Array("act", ("T", "H", "D")),
    "cache": _CACHE,
    **_BATCH,
    "scale": Number(float, 0),
    "window": Number(int, 0),
}

_PLAIN: Mapping[str, Signature] = {
    "embedding": {"ids": Array("int32", ("T",), below="V"), "table": Array("act", ("V", "K"))},
    "rms_norm": {"x": Array("f32", ("T", "K")), "weight": Array("f32", ("K",)), "eps": Number(float, 0)},
    "rope": {
        "x": Array("act", ("T", "H", "width")),
        "table": _TABLE,
        "positions": Array("int32", ("T",), below="positions"),
    },
    "qkv_rope_append": {
        "x": _X,
        "wq": Array("act", ("Nq", "K")),
        "wk": Array("act", ("Nk", "K")),
        "wv": Array("act", ("Nk", "K")),
        "bias_q": Array("f32", ("Nq",), group="biases"),
        "bias_k": Array("f32", ("Nk",), group="biases"),
        "bias_v": Array("f32", ("Nk",), group="biases"),
        "norm_q": Array("f32", ("D",), group="norms"),
        "norm_k": Array("f32", ("D",), group="norms"),
        "eps": Number(float, 0),
        "table": _TABLE,
        "cache": replace(_CACHE, written=True),
        **_BATCH,
    },
    "attention_prefill": _ATTENTION,
    "attention_decode": _ATTENTION,
    "linear": {"x": _X, "w": Array("act", ("N", "K"))},
    "linear_residual": {"x": _X, "w": Array("act", ("N", "K")), "residual": Array("f32", ("T", "N"))},
    "gate_up_silu": {"x": _X, "gate": Array("act", ("N", "K")), "up": Array("act", ("N", "K"))},
    "mlp": {
        "x": _X,
        "gate": Array("act", ("N", "K")),
        "up": Array("act", ("N", "K")),
        "down": Array("act", ("K", "N")),
        "residual": Array("f32", ("T", "K")),
    },
    "lm_head": {"x": _X, "w": Array("act", ("V", "K")), "rows": Array("int32", ("R",), below="T")},
    "greedy": {"logits": Array("f32", ("R", "V"))},
    "sample": {
        "logits": Array("f32", ("R", "V")),
        "uniform": Array("f32", ("R",), below=1),
        "temperature": Number(float, 0, above=True),
        "top_k": Number(int, 0),
        "top_p": Number(float, 0, 1, above=True),
        "vocab": Number(int, 1),
    },
}

WORDS = ("int8", "int4")
"""Formats of packed matrices."""
GROUP = 32
"""Elements of a row of a packed matrix that share a scale, as in ``mojo/kernels/gpu/weight_format.mojo``."""

MATRICES: Mapping[str, tuple[str, ...]] = {
    "qkv_rope_append": ("wq", "wk", "wv"),
    "linear": ("w",),
    "gate_up_silu": ("gate", "up"),
}
"""Ops that take packed matrices too, under their names with ``_int8`` and ``_int4``, and which arguments these are."""


def packed_arguments(matrix: str, word: str) -> tuple[str, ...]:
    """Names of what stands for a matrix in a format of :data:`WORDS`: stored elements, scales, zero points.

    The elements of ``w [N, K]``: int8 ``[N, K]``, or for int4 uint8 ``[N, ceil(K / 2)]``, two of them in a byte, the
    even one in its low half. ``w_scales``: float16 ``[N, ceil(K / GROUP)]``. ``w_zeros``, of int4: uint8, like the
    scales. An element is ``(stored - zero) * scale``.
    """
    return (matrix, f"{matrix}_scales", *([f"{matrix}_zeros"] if word == "int4" else []))


def _packed(op: str, word: str) -> Signature:
    """The signature of an op with packed matrices."""
    arguments: dict[str, Array | Number] = {}
    for name, kind in _PLAIN[op].items():
        if name not in MATRICES[op]:
            arguments[name] = kind
            continue
        assert isinstance(kind, Array)
        rows = kind.dims[0]
        elements = Array("int8", (rows, "K")) if word == "int8" else Array("uint8", (rows, "pairs"))
        kinds = (elements, Array("f16", (rows, "groups")), Array("uint8", (rows, "groups")))
        arguments |= dict(zip(packed_arguments(name, word), kinds, strict=False))
    return arguments


SIGNATURES: Mapping[str, Signature] = {
    **_PLAIN,
    **{f"{op}_{word}": _packed(op, word) for op in MATRICES for word in WORDS},
}
"""Arguments of each op in call order."""


def check(
    op: str, dtype: str, arguments: Sequence[Any], *, head_dim: int | None = None, strided: str = "refused"
) -> Mapping[str, int]:
    """Checks one call of an op on torch CPU tensors.

    Args:
        op: Key of :data:`SIGNATURES`.
        dtype: ``"f32"``, ``"bf16"``, ``"f16"`` or ``"tf32"`` (float32, multiplied as tf32): activations, matrices and
            KV cache.
        arguments: In the order of the signature.
        head_dim: What the implementation was made for; ``None`` where it serves any.
        strided: Non-contiguous arrays are ``"handled"``; ``"copied"``, which one written in place cannot be; or
            ``"refused"``.

    Returns:
        The number that each name of a dimension stands for.

    Raises:
        ValueError: The call is wrong; one line with the op, the argument and the values.
    """
    signature = SIGNATURES[op]
    if len(arguments) != len(signature):
        raise ValueError(f"{op} takes {', '.join(signature)}; {len(arguments)} arguments were given")
    given = dict(zip(signature, arguments, strict=True))
    sizes: dict[str, int] = {} if head_dim is None else {"D": head_dim}
    for name, kind in signature.items():
        value = given[name]
        if isinstance(kind, Number):
            _number(op, name, kind, value)
        elif value is None and kind.group:
            _all_absent(op, name, kind.group, given)
        else:
            contiguous = strided == "refused" or (strided == "copied" and kind.written)
            _array(op, name, kind, dtype, value, sizes, contiguous)
    for name, kind in signature.items():
        if isinstance(kind, Array) and kind.below:
            _below(op, name, given[name], sizes[kind.below] if isinstance(kind.below, str) else kind.below)
    if "groups" in sizes:
        _groups(op, sizes)
    if "rotary_dim" in sizes:
        _table(op, sizes)
    if "cache" in given:
        _cache(op, given, sizes)
        _batch(op, given, sizes)
    if "vocab" in given and given["vocab"] > sizes["V"]:
        raise ValueError(f"{op}: vocab is {given['vocab']}, but logits has {sizes['V']} columns")
    return sizes


def _all_absent(op: str, name: str, group: str, given: Mapping[str, Any]) -> None:
    """Checks that the other optional arguments of a group are ``None`` like ``name``."""
    for other, kind in SIGNATURES[op].items():
        if isinstance(kind, Array) and kind.group == group and given[other] is not None:
            raise ValueError(f"{op}: {group} come all or not at all, but {name} is None and {other} is not")


def _number(op: str, name: str, kind: Number, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int if kind.kind is int else (int, float)):
        raise ValueError(f"{op}: {name} must be {kind.kind.__name__}, not {value!r}")
    high = min(kind.high, _LARGEST_INT32 if isinstance(value, int) else _LARGEST_F32)
    # NaN is in no range.
    if not kind.low <= value <= high or (kind.above and value == kind.low):
        raise ValueError(
            f"{op}: {name} must be {'above' if kind.above else 'from'} {kind.low} to {high}, not {value!r}"
        )


def _array(op: str, name: str, kind: Array, act: str, value: Any, sizes: dict[str, int], contiguous: bool) -> None:
    """Checks one array against its dims, adding the sizes it is the first to give."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{op}: {name} must be a torch tensor, not {type(value).__name__}")
    dtype = getattr(torch, _TORCH[act if kind.dtype == "act" else kind.dtype])
    if value.dtype is not dtype or not value.is_cpu:
        raise ValueError(f"{op}: {name} must be {dtype} on cpu, not {value.dtype} on {value.device}")
    if value.layout is not torch.strided or value.is_nested or value.is_neg():
        raise ValueError(f"{op}: {name} must be a plain dense tensor, not a {value.layout}, nested or negated one")
    shape = value.shape
    if len(shape) != len(kind.dims):
        raise ValueError(f"{op}: {name} must have {len(kind.dims)} dimensions {list(kind.dims)}, not shape {[*shape]}")
    for dim, size in zip(kind.dims, shape, strict=True):
        expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
        if size != expected:
            raise ValueError(f"{op}: {name} has shape {[*shape]}, but {dim} is {expected}")
        if not size and dim not in _MAY_BE_EMPTY:
            raise ValueError(f"{op}: {name} has shape {[*shape]}, but {dim} must be at least 1")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{op}: {name} is not contiguous (strides {value.stride()}): pass .contiguous()")


def _below(op: str, name: str, values: Any, limit: int) -> None:
    """Checks that every element of a vector is from 0 and below ``limit``, which NaN is not."""
    if not values.numel():
        return
    low, high = values.detach().aminmax()
    if not (low.item() >= 0 and high.item() < limit):
        at, wrong = next((i, v) for i, v in enumerate(values.tolist()) if not 0 <= v < limit)
        raise ValueError(f"{op}: {name} must be from 0 and below {limit}, but {name}[{at}] is {wrong}")


def _groups(op: str, sizes: Mapping[str, int]) -> None:
    """Checks what a row of packed matrices has against the K elements it stands for."""
    for name, each in (("groups", GROUP), ("pairs", 2)):
        if sizes.get(name, wanted := -(-sizes["K"] // each)) != wanted:
            raise ValueError(f"{op}: {name} of a row of {sizes['K']} elements are {wanted}, not {sizes[name]}")


def _table(op: str, sizes: Mapping[str, int]) -> None:
    """Checks the columns of a RoPE table."""
    rotary, head_dim = sizes["rotary_dim"], sizes["width"] if "width" in sizes else sizes["D"]
    if rotary % 2 or rotary > head_dim:
        raise ValueError(f"{op}: table has {rotary} columns, but must have an even number up to head_dim {head_dim}")


def _cache(op: str, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Checks head counts and layer against the KV cache."""
    head_dim, kv_heads = sizes["D"], sizes["kv_heads"]
    if head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(f"{op}: cache has a head_dim of {head_dim}, the largest is {_LARGEST_HEAD_DIM}")
    if "Nk" in sizes and (sizes["Nk"] != kv_heads * head_dim or sizes["Nq"] % head_dim):
        raise ValueError(
            f"{op}: wq has {sizes['Nq']} rows and wk {sizes['Nk']}, but cache has {kv_heads} kv_heads of {head_dim}"
        )
    queries, heads = ("q", sizes["H"]) if "H" in sizes else ("wq", sizes["Nq"] // head_dim)
    if heads % kv_heads:
        raise ValueError(f"{op}: the {heads} heads of {queries} cannot share the {kv_heads} kv_heads of cache evenly")
    if given["layer"] >= sizes["layers"]:
        raise ValueError(f"{op}: layer is {given['layer']}, but cache has {sizes['layers']} layers")


def _batch(op: str, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Checks that a ragged batch covers the rows and that its sequences lie within the KV cache."""
    offsets, start = given["offsets"].tolist(), given["start"].tolist()
    batch, tokens = len(start), sizes["T"]
    if len(offsets) != batch + 1 or batch > sizes["slots"]:
        raise ValueError(f"{op}: offsets has {len(offsets)} numbers, start {batch} and cache {sizes['slots']} slots")
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"{op}: offsets goes from {offsets[0]} to {offsets[-1]}, but there are {tokens} rows")
    last = min(sizes["capacity"], sizes.get("positions", sizes["capacity"]))
    for b, first in enumerate(start):
        rows = offsets[b + 1] - offsets[b]
        if rows < 0 or (op == "attention_decode" and rows != 1):
            fault = "takes one row per sequence" if op == "attention_decode" else "takes offsets that ascend"
            raise ValueError(f"{op} {fault}, but offsets[{b}:{b + 2}] is {offsets[b : b + 2]}")
        # A query may stand before the first key and sees none, but a token that is appended has a place.
        if first < (-rows if "q" in given else 0) or first + rows > last:
            raise ValueError(
                f"{op}: start[{b}] is {first}, so that {rows} new rows end at position {first + rows}, but cache has "
                f"{sizes['capacity']} positions" + (f" and table {sizes['positions']}" if "positions" in sizes else "")
            )
