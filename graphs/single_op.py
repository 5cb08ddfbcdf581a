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
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType
from torch.utils.dlpack import from_dlpack

from shipway.artefacts import artefact, cpu_target
from shipway.graphs import ops
from shipway.graphs.extension import kernels_extension, one_line_errors
from shipway.signature import SIGNATURES, Number

_OPS = {
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

DTYPES = ("f32", "bf16")
_HALF_OPS = ("rms_norm",)  # also in f16, whose range a square leaves
_HEAD_OPS = ("qkv_rope_append", "attention")
_NUMBERS = {float: DType.float32, int: DType.int32}


class OpCall:
    """One op as a function on torch CPU tensors that ``shipway.signature.check`` lets pass."""

    def __init__(self, models: Mapping[str, Model], name: str, dtype: str) -> None:
        """Takes the compiled graphs by name, the function's name and the activation dtype."""
        self._models = models
        self._name = name
        self._dtype = dtype

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Runs the op."""
        return from_dlpack(self.bind(*arguments)())

    def bind(self, *arguments: Any) -> Callable[[], Buffer]:
        """Returns the call alone, its arguments as MAX's buffers, which share the tensors' memory."""
        signature = SIGNATURES[_OPS[self._name][0]]
        given = {key: value for key, value in zip(signature, arguments, strict=True) if value is not None}
        inputs = []
        for key, value in given.items():
            kind = signature[key]
            if isinstance(kind, Number):
                inputs.append(Buffer.scalar(kind.kind(value), _NUMBERS[kind.kind], CPU()))
            else:
                inputs.append(Buffer.from_dlpack(value.detach()))
        model = self._models[_graph_name(self._name, self._dtype, "bias_q" in given, "norm_q" in given)]
        return lambda: model.execute(*inputs)[0]


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
    session = InferenceSession(devices=[CPU()])
    wanted = [name for name, served in _OPS.items() if only is None or only in served]
    models: dict[str, Model] = {}
    for size in (None, head_dim):
        if names := [name for name in wanted if (name in _HEAD_OPS) == (size is not None)]:
            models |= _load(session, names, size)
    return {op: OpCall(models, name, dtype) for name in wanted for op in _OPS[name]}


def _load(session: InferenceSession, names: list[str], head_dim: int | None) -> dict[str, Model]:
    """Compiles ops that depend on head_dim, or with ``None`` ops that do not."""
    extension = kernels_extension()

    def build(directory: Path) -> None:
        module = Module()
        for name in names:
            variants = [(b, n) for b in (0, 1) for n in (0, 1)] if name == "qkv_rope_append" else [(0, 0)]
            for dtype in (*DTYPES, "f16") if name in _HALF_OPS else DTYPES:
                for bias, norm in variants:
                    _build(module, extension, name, dtype, head_dim, bool(bias), bool(norm))
        with one_line_errors():
            session.compile(module, custom_extensions=[extension]).export_mef(directory / "ops.mef")

    parts = {
        "sources": extension.parent.name,
        "signatures": repr([SIGNATURES[_OPS[name][0]] for name in names]),
        "ops": names,
        "head_dim": head_dim,
        "target": cpu_target(),
        "max": version("max"),
    }
    made = artefact("ops", parts, build)
    return dict(session.init_all(session.compile(made.path / "ops.mef")))


def _graph_name(op: str, dtype: str, bias: bool, norm: bool) -> str:
    return f"{op}_{dtype}" + ("_bias" if bias else "") + ("_norm" if norm else "")


def _build(
    module: Module, extension: Path, name: str, dtype: str, head_dim: int | None, bias: bool, norm: bool
) -> None:
    device = DeviceRef.CPU()
    act = ops.DTYPES[dtype]
    dtypes = {"act": act, "f32": DType.float32, "int32": DType.int32}
    absent = [group for group, there in (("biases", bias), ("norms", norm)) if not there]
    types: dict[str, TensorType | BufferType] = {}
    for key, kind in SIGNATURES[_OPS[name][0]].items():
        if isinstance(kind, Number):
            types[key] = TensorType(_NUMBERS[kind.kind], [], device)
        elif kind.group not in absent:
            dims = [head_dim if dim == "D" and head_dim is not None else dim for dim in kind.dims]
            types[key] = (BufferType if key == "cache" else TensorType)(dtypes[kind.dtype], dims, device)
    with Graph(
        _graph_name(name, dtype, bias, norm),
        input_types=list(types.values()),
        custom_extensions=[extension],
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
