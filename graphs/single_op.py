"""Every catalogue op as a function on torch CPU tensors: one small MAX graph each, compiled together.

All dimensions but head_dim are symbolic, so one compile serves every shape. Nothing is checked here: arguments are
contiguous ones that ``shipway.signature.check`` lets pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, TensorValue, Value
from torch.utils.dlpack import from_dlpack

from shipway.artefacts import artefact, cpu_target
from shipway.graphs import ops
from shipway.graphs.extension import kernels_extension, one_line_errors
from shipway.signature import MATRICES, SIGNATURES, WORDS, Number, Signature, packed_arguments

OPS = {
    "embedding": ("embedding",),
    "rms_norm": ("rms_norm",),
    "rope": ("rope",),
    "qkv_rope_append": ("qkv_rope_append",),
    "attention": ("attention_prefill", "attention_decode"),
    "linear": ("linear",),
    "linear_residual": ("linear_residual",),
    "gate_up_silu": ("gate_up_silu",),
    "mlp": ("mlp",),
    "lm_head": ("lm_head",),
    "greedy": ("greedy",),
    "sample": ("sample",),
}
"""Functions of ``shipway.graphs.ops`` with the catalogue's ops that each serves."""
PACKED = {f"{op}_{word}": (op, word) for op in MATRICES for word in WORDS}
"""Ops of packed matrices, on GPUs, with the function that each is and the format."""

_DTYPES = ("f32", "bf16")
_MORE_DTYPES = {"rms_norm": ("f16",)}  # whose range a square leaves
PRODUCTS = ("qkv_rope_append", "linear", "linear_residual", "gate_up_silu", "mlp", "lm_head")
"""Functions that multiply matrices: on NVIDIA's GPUs, in tf32 where they are asked to."""
_HEAD_OPS = ("qkv_rope_append", "attention", *(name for name in PACKED if PACKED[name][0] == "qkv_rope_append"))
_NUMBERS = {float: DType.float32, int: DType.int32}


class OpCall:
    """One op as a function on torch CPU tensors that ``shipway.signature.check`` lets pass."""

    def __init__(self, models: Mapping[str, Model], name: str, dtype: str, device: Device | None = None) -> None:
        """Takes the compiled graphs by name, the function's name, the activation dtype, and the device that arrays are
        copied to and back from, where it is not the tensors' own."""
        self._models = models
        self._name = name
        self._dtype = dtype
        self._device = device

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Runs the op."""
        model, given, inputs = self._bound(arguments)
        out = model.execute(*inputs.values())[0]
        if self._device is not None:
            out, *cache = (buffer.to(CPU()) for buffer in (out, *([inputs["cache"]] if "cache" in inputs else [])))
            self._device.synchronize()
            if cache:
                given["cache"].copy_(from_dlpack(cache[0]))
        return from_dlpack(out)

    def bind(self, *arguments: Any) -> Callable[[], Buffer]:
        """Returns the call alone, its arguments as MAX's buffers, which on the CPU share the tensors' memory."""
        model, _, inputs = self._bound(arguments)
        return lambda: model.execute(*inputs.values())[0]

    def _bound(self, arguments: tuple[Any, ...]) -> tuple[Model, dict[str, Any], dict[str, Buffer]]:
        """The graph, the arguments that are given, and these as MAX's buffers."""
        signature = _signature(self._name)
        given = {key: value for key, value in zip(signature, arguments, strict=True) if value is not None}
        inputs = {}
        for key, value in given.items():
            kind = signature[key]
            if isinstance(kind, Number):
                inputs[key] = Buffer.scalar(kind.kind(value), _NUMBERS[kind.kind], CPU())
            else:
                buffer = Buffer.from_dlpack(value.detach())
                inputs[key] = buffer if self._device is None else buffer.copy(self._device)
        if self._device is not None:
            self._device.synchronize()  # MAX does not order copies before what reads them, at least not on a CPU
        return self._models[_graph_name(self._name, self._dtype, "bias_q" in given, "norm_q" in given)], given, inputs


def load_ops(dtype: str, head_dim: int, only: str | None = None) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op, or one, in both activation dtypes.

    A compilation costs MAX some ten seconds before the first kernel and about one per kernel: few large ones are best.

    Args:
        dtype: ``"f32"``, ``"bf16"``, or ``"f16"`` for RMSNorm: activations, matrices and KV cache of the functions.
        head_dim: head_dim of the attention ops.
        only: The catalogue op to compile; ``None`` for all.

    Returns:
        A function per catalogue op; arguments as in ``shipway.signature.SIGNATURES``.
    """
    names = [name for name, served in OPS.items() if only is None or only in served]
    dtypes = {name: (*_DTYPES, *_MORE_DTYPES.get(name, ())) for name in names}
    models = load_graphs(InferenceSession(devices=[CPU()]), DeviceRef.CPU(), dtypes, head_dim, {"target": cpu_target()})
    return {op: OpCall(models, name, dtype) for name in names for op in OPS[name]}


def load_graphs(
    session: InferenceSession,
    device: DeviceRef,
    dtypes: Mapping[str, tuple[str, ...]],
    head_dim: int,
    target: Mapping[str, object],
) -> dict[str, Model]:
    """Compiles (or takes from the artefact cache) ops, those that depend on head_dim apart from the others.

    Args:
        session: Where they run.
        device: The device of their arrays.
        dtypes: Activation dtypes by name of a function of ``shipway.graphs.ops``.
        head_dim: head_dim of the attention ops.
        target: What a compiled graph depends on besides.
    """
    models: dict[str, Model] = {}
    for size in (None, head_dim):
        if some := {name: of for name, of in dtypes.items() if (name in _HEAD_OPS) == (size is not None)}:
            models |= _load(session, device, some, size, target)
    return models


def _load(
    session: InferenceSession,
    device: DeviceRef,
    dtypes: Mapping[str, tuple[str, ...]],
    head_dim: int | None,
    target: Mapping[str, object],
) -> dict[str, Model]:
    """Compiles ops that depend on head_dim, or with ``None`` ops that do not."""
    extension = kernels_extension()

    def build(directory: Path) -> None:
        module = Module()
        for name in dtypes:
            for dtype in dtypes[name]:
                for bias, norm in _groups(name):
                    types = _inputs(device, name, dtype, head_dim, bias, norm)
                    with Graph(
                        _graph_name(name, dtype, bias, norm),
                        input_types=list(types.values()),
                        custom_extensions=[extension],
                        module=module,
                    ) as graph:
                        given = dict(zip(types, graph.inputs, strict=True))
                        graph.output(_output(name, dtype, head_dim, given))
        with one_line_errors():
            session.compile(module, custom_extensions=[extension]).export_mef(directory / "ops.mef")

    parts = {
        "sources": extension.parent.name,
        "signatures": repr([_signature(name) for name in dtypes]),
        "ops": dtypes,
        "head_dim": head_dim,
        **target,
        "max": version("max"),
    }
    made = artefact("ops", parts, build)
    return dict(session.init_all(session.compile(made.path / "ops.mef")))


def on_gpus(dtype: str) -> tuple[str, ...]:
    """The functions, and ops of packed matrices, that GPUs have in an activation dtype."""
    return PRODUCTS if dtype == "tf32" else (*OPS, *PACKED) if dtype == "bf16" else tuple(OPS)


def build_ops(device: DeviceRef, dtype: str, head_dim: int) -> Graph:
    """One graph of every op that GPUs have in one activation dtype, each with inputs and an output of its own."""
    calls = [(name, *groups) for name in on_gpus(dtype) for groups in _groups(name)]
    types = [_inputs(device, name, dtype, head_dim, bias, norm) for name, bias, norm in calls]
    extension = kernels_extension()
    every = [one for of_call in types for one in of_call.values()]
    with Graph(f"ops_{dtype}", input_types=every, custom_extensions=[extension]) as graph:
        left = iter(graph.inputs)
        outputs = [
            _output(name, dtype, head_dim, dict(zip(of_call, left, strict=False)))
            for (name, *_), of_call in zip(calls, types, strict=True)
        ]
        graph.output(*outputs)
    return graph


def _signature(name: str) -> Signature:
    return SIGNATURES[OPS[name][0] if name in OPS else name]


def _groups(name: str) -> list[tuple[bool, bool]]:
    """Which of the biases and the norms an op may be given."""
    may = (False, True) if name.startswith("qkv_rope_append") else (False,)
    return [(bias, norm) for bias in may for norm in may]


def _graph_name(op: str, dtype: str, bias: bool, norm: bool) -> str:
    return f"{op}_{dtype}" + ("_bias" if bias else "") + ("_norm" if norm else "")


def _act(dtype: str) -> DType:
    return DType.float32 if dtype == "tf32" else ops.DTYPES[dtype]


def _inputs(
    device: DeviceRef, name: str, dtype: str, head_dim: int | None, bias: bool, norm: bool
) -> dict[str, TensorType | BufferType]:
    """Types of an op's arguments by name, without the groups that are not there."""
    dtypes = {
        "act": _act(dtype),
        "f32": DType.float32,
        "f16": DType.float16,
        "int32": DType.int32,
        "int8": DType.int8,
        "uint8": DType.uint8,
    }
    absent = [group for group, there in (("biases", bias), ("norms", norm)) if not there]
    types: dict[str, TensorType | BufferType] = {}
    for key, kind in _signature(name).items():
        if isinstance(kind, Number):
            types[key] = TensorType(_NUMBERS[kind.kind], [], DeviceRef.CPU())
        elif kind.group not in absent:
            dims = [head_dim if dim == "D" and head_dim is not None else dim for dim in kind.dims]
            types[key] = (BufferType if key == "cache" else TensorType)(dtypes[kind.dtype], dims, device)
    return types


def _output(name: str, dtype: str, head_dim: int | None, given: Mapping[str, Value]) -> TensorValue:
    """The op's output for its arguments."""
    v: dict[str, Any] = {key: value.buffer if key == "cache" else value.tensor for key, value in given.items()}
    if name == "rms_norm":
        return ops.rms_norm(**v, act=_act(dtype))
    if name in PACKED:
        name, word = PACKED[name]
        for matrix in MATRICES[name]:
            v[matrix] = ops.Packed(*(v.pop(part) for part in packed_arguments(matrix, word)))
    tf32 = {"tf32": True} if dtype == "tf32" and name in PRODUCTS else {}
    if name == "qkv_rope_append":
        return ops.qkv_rope_append(
            v["x"],
            (v["wq"], v["wk"], v["wv"]),
            (v["bias_q"], v["bias_k"], v["bias_v"]) if "bias_q" in v else None,
            (v["norm_q"], v["norm_k"]) if "norm_q" in v else None,
            v["eps"],
            v["table"],
            v["cache"],
            v["offsets"],
            v["start"],
            v["layer"],
            head_dim or 0,
            **tf32,
        )
    made: TensorValue = getattr(ops, name)(**v, **tf32)
    return made
