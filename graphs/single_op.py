"""Every catalogue op as a function on torch CPU tensors: one small MAX graph each, compiled together.

All dimensions but head_dim are symbolic, so one compile serves every shape. Arguments are checked here, against
:data:`SIGNATURES`: a wrong call is a ``ValueError`` that names the values, and never reaches a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType
from torch.utils.dlpack import from_dlpack

from shipway.artefacts import artefact, cpu_target
from shipway.graphs import ops
from shipway.graphs.extension import kernels_extension, source_hash

_ACT, _F32, _INDEX = "act", "f32", "int32"
_CACHE = (_ACT, "slots", "layers", 2, "capacity", "kv_heads", "D")

SIGNATURES: Mapping[str, Mapping[str, tuple[Any, ...] | type]] = {
    "embedding": {"ids": (_INDEX, "T"), "table": (_ACT, "V", "K")},
    "rms_norm": {"x": (_F32, "T", "K"), "weight": (_F32, "K"), "eps": float},
    "rope": {"x": (_ACT, "T", "H", "Dx"), "table": (_F32, "positions", "R"), "positions": (_INDEX, "T")},
    "qkv_rope_append": {
        "x": (_ACT, "T", "K"),
        "wq": (_ACT, "Nq", "K"),
        "wk": (_ACT, "Nk", "K"),
        "wv": (_ACT, "Nk", "K"),
        "bias_q": (_F32, "Nq"),
        "bias_k": (_F32, "Nk"),
        "bias_v": (_F32, "Nk"),
        "norm_q": (_F32, "D"),
        "norm_k": (_F32, "D"),
        "eps": float,
        "table": (_F32, "positions", "R"),
        "cache": _CACHE,
        "offsets": (_INDEX, "B1"),
        "start": (_INDEX, "B"),
        "layer": int,
    },
    "attention": {
        "q": (_ACT, "T", "H", "D"),
        "cache": _CACHE,
        "offsets": (_INDEX, "B1"),
        "start": (_INDEX, "B"),
        "layer": int,
        "scale": float,
        "window": int,
    },
    "linear": {"x": (_ACT, "T", "K"), "w": (_ACT, "N", "K")},
    "linear_residual": {"x": (_ACT, "T", "K"), "w": (_ACT, "N", "K"), "residual": (_F32, "T", "N")},
    "gate_up_silu": {"x": (_ACT, "T", "K"), "gate": (_ACT, "N", "K"), "up": (_ACT, "N", "K")},
    "mlp": {
        "x": (_ACT, "T", "K"),
        "gate": (_ACT, "N", "K"),
        "up": (_ACT, "N", "K"),
        "down": (_ACT, "K", "N"),
        "residual": (_F32, "T", "K"),
    },
    "lm_head": {"x": (_ACT, "T", "K"), "w": (_ACT, "V", "K"), "rows": (_INDEX, "R")},
    "greedy": {"logits": (_F32, "R", "V")},
    "sample": {
        "logits": (_F32, "R", "V"),
        "uniform": (_F32, "R"),
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "vocab": int,
    },
}
"""Arguments of each op in call order: ``(dtype, *dims)`` of an array, or the type of a scalar. A name stands for one
number throughout a call; D is the head_dim the op was compiled for."""

_OPTIONAL = ("bias_q", "bias_k", "bias_v", "norm_q", "norm_k")
_HEAD_OPS = ("qkv_rope_append", "attention")
_TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32}


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op in one activation dtype.

    Args:
        dtype: ``"f32"`` or ``"bf16"``: activations, matrices and KV cache.
        head_dim: head_dim of the attention ops.

    Returns:
        A function per catalogue op; arguments as in :data:`SIGNATURES`, ``attention`` under both of its names.
    """
    session = InferenceSession(devices=[CPU()])
    models = _load(session, dtype, None) | _load(session, dtype, head_dim)

    def function(name: str) -> Callable[..., torch.Tensor]:
        return lambda *arguments: _run(models, name, dtype, head_dim, arguments)

    found = {name: function(name) for name in SIGNATURES}
    attention = found.pop("attention")
    return found | {"attention_prefill": attention, "attention_decode": attention}


def _load(session: InferenceSession, dtype: str, head_dim: int | None) -> dict[str, Model]:
    """The ops that depend on head_dim, or with ``None`` all others."""

    def build(directory: Path) -> None:
        module = Module()
        for name, signature in SIGNATURES.items():
            if (name in _HEAD_OPS) != (head_dim is not None):
                continue
            variants = [(b, n) for b in (0, 1) for n in (0, 1)] if name == "qkv_rope_append" else [(0, 0)]
            for bias, norm in variants:
                _build(module, name, signature, dtype, head_dim, bool(bias), bool(norm))
        session.compile(module, custom_extensions=[kernels_extension()]).export_mef(directory / "ops.mef")

    parts = {
        "sources": source_hash(),
        "dtype": dtype,
        "head_dim": head_dim,
        "target": cpu_target(),
        "max": version("max"),
    }
    made = artefact("ops", parts, build)
    return dict(session.init_all(session.compile(made.path / "ops.mef")))


def _graph_name(op: str, bias: bool, norm: bool) -> str:
    return op + ("_bias" if bias else "") + ("_norm" if norm else "")


def _build(
    module: Module,
    name: str,
    signature: Mapping[str, tuple[Any, ...] | type],
    dtype: str,
    head_dim: int | None,
    bias: bool,
    norm: bool,
) -> None:
    device = DeviceRef.CPU()
    act = ops.DTYPES[dtype]
    dtypes = {_ACT: act, _F32: DType.float32, _INDEX: DType.int32}
    absent = [key for key in _OPTIONAL if not (bias if key.startswith("bias") else norm)]
    types: dict[str, TensorType | BufferType] = {}
    for key, kind in signature.items():
        if key in absent:
            continue
        if isinstance(kind, type):
            types[key] = TensorType(DType.float32 if kind is float else DType.int32, [], device)
        else:
            dims = [head_dim if dim == "D" else dim for dim in kind[1:]]
            types[key] = (BufferType if key == "cache" else TensorType)(dtypes[kind[0]], dims, device)
    with Graph(
        _graph_name(name, bias, norm),
        input_types=list(types.values()),
        custom_extensions=[kernels_extension()],
        module=module,
    ) as graph:
        v: dict[str, Any] = {
            key: value.buffer if key == "cache" else value.tensor
            for key, value in zip(types, graph.inputs, strict=True)
        }
        if name == "rms_norm":
            y = ops.rms_norm(**v, act=act)
        elif name == "qkv_rope_append":
            y = ops.qkv_rope_append(
                v["x"],
                (v["wq"], v["wk"], v["wv"]),
                (v["bias_q"], v["bias_k"], v["bias_v"]) if bias else None,
                (v["norm_q"], v["norm_k"]) if norm else None,
                v["eps"],
                v["table"],
                v["cache"],
                v["offsets"],
                v["start"],
                v["layer"],
                head_dim or 0,
            )
        else:
            y = getattr(ops, name)(**v)
        graph.output(y)


def _run(models: Mapping[str, Model], name: str, dtype: str, head_dim: int, arguments: tuple[Any, ...]) -> torch.Tensor:
    signature = SIGNATURES[name]
    if len(arguments) != len(signature):
        raise ValueError(f"{name} takes {', '.join(signature)}; {len(arguments)} arguments were given")
    given = dict(zip(signature, arguments, strict=True))
    sizes: dict[str, int] = {"D": head_dim}
    inputs: list[Buffer] = []
    for key, value in given.items():
        kind = signature[key]
        if value is None and key in _OPTIONAL:
            continue
        if isinstance(kind, type):
            inputs.append(_scalar(name, key, value, kind))
        else:
            inputs.append(_array(name, key, value, dtype if kind[0] == _ACT else kind[0], kind[1:], sizes))
    bias, norm = given.get("bias_q") is not None, given.get("norm_q") is not None
    for key in _OPTIONAL:
        if key in given and (given[key] is not None) != (bias if key.startswith("bias") else norm):
            raise ValueError(f"{name}: biases come all three or not at all, q and k norms both or not at all")
    _check_values(name, given, sizes)
    result = models[_graph_name(name, bias, norm)].execute(*inputs)[0]
    return from_dlpack(result)


def _scalar(name: str, key: str, value: Any, kind: type) -> Buffer:
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ValueError(f"{name}: {key} must be {kind.__name__}, not {value!r}")
    return Buffer.scalar(kind(value), DType.float32 if kind is float else DType.int32, CPU())


def _array(name: str, key: str, value: Any, dtype: str, dims: tuple[Any, ...], sizes: dict[str, int]) -> Buffer:
    """Checks one array against its dims, adding the sizes it is the first to give."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: {key} must be a torch tensor, not {type(value).__name__}")
    if value.dtype != _TORCH[dtype] or value.device.type != "cpu":
        raise ValueError(f"{name}: {key} must be {_TORCH[dtype]} on cpu, not {value.dtype} on {value.device}")
    if value.dim() != len(dims):
        raise ValueError(f"{name}: {key} must have {len(dims)} dimensions {list(dims)}, not shape {list(value.shape)}")
    for dim, size in zip(dims, value.shape, strict=True):
        expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
        if size != expected:
            raise ValueError(f"{name}: {key} has shape {list(value.shape)}, but {dim} is {expected}")
    if not value.is_contiguous():
        raise ValueError(f"{name}: {key} is not contiguous (strides {value.stride()}): pass .contiguous()")
    return Buffer.from_dlpack(value.detach())


def _check_values(name: str, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Checks the numbers inside index arrays and the divisibility of head counts."""

    def within(key: str, limit: int) -> None:
        values = given[key]
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise ValueError(f"{name}: {key} must be in 0..{limit - 1}, not {values.tolist()}")

    if name == "embedding":
        within("ids", sizes["V"])
    if name == "lm_head":
        within("rows", sizes["T"])
    if name not in _HEAD_OPS:
        return
    d, kv_heads = sizes["D"], sizes["kv_heads"]
    heads = sizes["H"] if name == "attention" else sizes["Nq"] // d
    if name == "qkv_rope_append" and (sizes["Nq"] % d or sizes["Nk"] != kv_heads * d):
        raise ValueError(f"{name}: wq has {sizes['Nq']} and wk {sizes['Nk']} rows for {kv_heads} kv_heads of {d}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: {heads} heads cannot share {kv_heads} kv_heads evenly")
    if name == "qkv_rope_append" and (sizes["R"] > d or sizes["R"] % 2):
        raise ValueError(f"{name}: rotary_dim {sizes['R']} must be even and at most head_dim {d}")
    if not 0 <= given["layer"] < sizes["layers"]:
        raise ValueError(f"{name}: layer {given['layer']} of {sizes['layers']}")
    if name == "attention" and given["window"] < 0:
        raise ValueError(f"{name}: window must be from 0, not {given['window']}")
    offsets, start = given["offsets"].tolist(), given["start"].tolist()
    if len(offsets) != len(start) + 1 or len(start) > sizes["slots"]:
        raise ValueError(f"{name}: {len(offsets)} offsets and {len(start)} starts for {sizes['slots']} cache slots")
    if offsets[0] != 0 or offsets[-1] != sizes["T"] or offsets != sorted(offsets):
        raise ValueError(f"{name}: offsets {offsets} do not cover {sizes['T']} rows")
    limit = min(sizes["capacity"], sizes.get("positions", sizes["capacity"]))
    for b, first in enumerate(start):
        end = first + offsets[b + 1] - offsets[b]
        if (first < 0 and name == "qkv_rope_append") or end > limit:
            raise ValueError(f"{name}: sequence {b} goes from position {first} to {end}, the cache holds {limit}")
