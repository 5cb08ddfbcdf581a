"""Rows of the ops' tables: one function per kind of implementation, and every row an op has beside PyTorch's.

A compiled implementation is a module with ``load_ops(dtype, head_dim)``, which returns a callable per op on torch CPU
tensors. It is imported when a row first runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from shipway.ops.op import ONCE, PER_HEAD_DIM, Implementation, KnownFailure
from shipway.targets.kernels import KERNELS


def rows(*implementations: Implementation) -> Mapping[str, Implementation]:
    """The table of an op's implementations by name."""
    return {row.name: row for row in implementations}


DTYPES = ("f32", "bf16")
HALF = (*DTYPES, "f16")
SIMULATED = ("sm_80", "sm_90a", "gfx942", "gfx1100", "gfx1201")
"""Targets that ``shipway.simt`` runs."""


def torch_row(
    make: Callable[[str], Callable[..., Any]],
    *,
    bitwise: bool = False,
    dtypes: tuple[str, ...] = DTYPES,
    known: tuple[KnownFailure, ...] = (),
) -> Implementation:
    """The plain PyTorch row: ``make(dtype)`` returns a function on torch CPU tensors."""
    return Implementation(
        "torch",
        lambda dtype, head_dim: make(dtype),
        dtypes,
        strided="handled",
        bitwise=bitwise,
        requires=("torch",),
        install="torch==2.13.0",
        known=known,
    )


def compiled_rows(
    op: str,
    known: Mapping[str, tuple[KnownFailure, ...]] | None = None,
    only: tuple[str, ...] = ("mojo", "max", "jax", "tvm"),
    on_gpus: tuple[str, ...] = HALF,
) -> tuple[Implementation, ...]:
    """The compiled rows of an op; those of GPUs last, where it has GPU kernels.

    Args:
        op: Name of the op.
        known: Declared failures by row.
        only: The rows whose ``load_ops`` has the op.
        on_gpus: Dtypes of its GPU kernels, if it has any.
    """
    known = known or {}
    compiled = (
        _mojo_row(op),
        _max_row(op, known.get("max", ())),
        _jax_row(op, known.get("jax", ())),
        _tvm_row(op, known.get("tvm", ())),
    )
    gpus = (_gpu_row(op, on_gpus), *(_simulated_row(op, target, on_gpus) for target in SIMULATED))
    return (
        *(row for row in compiled if row.name in only),
        *(gpus if any(op in kernel.ops for kernel in KERNELS) else ()),
    )


def _mojo_row(op: str) -> Implementation:
    """Our Mojo CPU kernel, one MAX graph per op; all ops of a head_dim compile together."""
    return Implementation(
        "mojo",
        lambda dtype, head_dim: _loaded("shipway.graphs.single_op", dtype, head_dim)[op],
        HALF if op == "rms_norm" else DTYPES,
        strided="refused",
        bitwise=True,
        compiled=PER_HEAD_DIM,
        requires=("max", "mojo"),
        install="max==26.7.0 mojo==1.2.0",
        alone=lambda dtype, head_dim: _loaded("shipway.graphs.single_op", dtype, head_dim, op)[op],
    )


def _in_tf32(op: str, target: str) -> bool:
    return any(variant.tf32 for kernel in KERNELS if op in kernel.ops for variant in kernel.every(target))


def _simulated_row(op: str, target: str, dtypes: tuple[str, ...]) -> Implementation:
    """Our Mojo GPU kernels, compiled for a target and run by the simulator; each variant compiles as it is launched."""
    return Implementation(
        f"mojo@{target}",
        lambda dtype, head_dim: _loaded("shipway.simt.rows", dtype, head_dim, target)[op],
        (*dtypes, "tf32") if _in_tf32(op, target) else dtypes,
        strided="refused",
        # A few rows take a GEMV, which sums by multiply-adds; matrix units add in an order that no vendor documents.
        bitwise=False,
        compiled=PER_HEAD_DIM,
        requires=("max", "mojo", "llvmlite"),
        install="max==26.7.0 mojo==1.2.0 llvmlite==0.50.0",
        device="simulated",
    )


def _gpu_row(op: str, dtypes: tuple[str, ...]) -> Implementation:
    """Our Mojo GPU kernels on this machine's GPU; all ops of a dtype and head_dim compile together."""
    return Implementation(
        "mojo-gpu",
        lambda dtype, head_dim: _loaded("shipway.graphs.gpu_ops", dtype, head_dim)[op],
        (*dtypes, "tf32") if any(_in_tf32(op, target) for target in SIMULATED) else dtypes,
        strided="refused",
        bitwise=False,  # as on simulated ones
        compiled=PER_HEAD_DIM,
        requires=("max", "mojo"),
        install="max==26.7.0 mojo==1.2.0",
        device="gpu",
        absent=_no_gpu,
    )


@lru_cache
def _no_gpu(dtype: str) -> str:
    from max.driver import Accelerator, accelerator_count

    if not accelerator_count():
        return "MAX finds no GPU here: one of NVIDIA's or AMD's with its driver would make it run"
    return "tf32 wants one of NVIDIA's GPUs" if dtype == "tf32" and Accelerator().api != "cuda" else ""


def _max_row(op: str, known: tuple[KnownFailure, ...]) -> Implementation:
    """Stock MAX graphs, none of our kernels; all ops compile together, once for every dtype and head_dim."""
    return Implementation(
        "max",
        lambda dtype, head_dim: _loaded("shipway.graphs.stock_ops", dtype, head_dim)[op],
        DTYPES,
        strided="refused",
        bitwise=False,
        compiled=ONCE,
        requires=("max",),
        install="max==26.7.0",
        known=known,
    )


def _jax_row(op: str, known: tuple[KnownFailure, ...]) -> Implementation:
    """The maths of the ``xla`` route, compiled by XLA for a few sizes; alone, for the sizes of a call."""
    return Implementation(
        "jax",
        lambda dtype, head_dim: _loaded("shipway.ops.jax_ops", dtype, head_dim)[op],
        HALF if op == "rms_norm" else DTYPES,
        strided="copied",
        bitwise=False,
        compiled=PER_HEAD_DIM,
        compilations=lambda: _compilations("shipway.ops.jax_ops"),
        requires=("jax",),
        install="jax==0.10.2 jaxlib==0.10.2",
        known=known,
        alone=lambda dtype, head_dim: _loaded("shipway.ops.jax_ops", dtype, head_dim, op)[op],
    )


def _tvm_row(op: str, known: tuple[KnownFailure, ...]) -> Implementation:
    """Relax functions under the project's own schedules; all ops of a dtype and head_dim compile together."""
    return Implementation(
        "tvm",
        lambda dtype, head_dim: _loaded("shipway.ops.tvm_ops", dtype, head_dim)[op],
        DTYPES,
        strided="copied",
        bitwise=False,
        compiled=PER_HEAD_DIM,
        requires=("tvm",),
        install="apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1",
        known=known,
    )


def _compilations(module: str) -> int:
    """Compilations of a module's ops so far, none before it was imported."""
    return int(sys.modules[module].compilations()) if module in sys.modules else 0


@lru_cache
def _loaded(module: str, dtype: str, head_dim: int, *only: str) -> Mapping[str, Callable[..., Any]]:
    loaded: Mapping[str, Callable[..., Any]] = import_module(module).load_ops(dtype, head_dim, *only)
    return loaded
