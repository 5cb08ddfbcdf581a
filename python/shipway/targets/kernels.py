"""The kernels that a GPU can launch: one row per entry of ``mojo/kernels/gpu``, with the instantiations that exist."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shipway.errors import ShipwayError
from shipway.signature import WORDS

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "int8": "int8", "uint8": "uint8"}
_TF32 = "tf32"  # float32 that a kernel multiplies as tf32: its parameters `t` and `tf32`
_MATRIX_DTYPES = frozenset({"bf16", "f16", _TF32})


@dataclass(frozen=True)
class DeviceKernel:
    """A launchable Mojo function.

    Attributes:
        name: Its name in Mojo, unique in this table.
        module: The Mojo module it stands in, such as ``"kernels.gpu.linear"``.
        parameters: Names of its compile-time parameters; one that is a ``Bool`` is written ``"paged: Bool"``.
        variants: The instantiations that exist, each one word per parameter: a dtype (``f32``, ``bf16``, ``f16``,
            ``int8``, ``uint8``; ``tf32`` for f32 with the parameter ``tf32``), a number, ``0`` or ``1`` for a Bool, or
            a Mojo expression.
        ops: Ops of the catalogue that launch it.
        matrix: Whether its variants of 16-bit dtypes and of tf32 must show matrix instructions.
        targets: The only targets it is written for; empty for all.
    """

    name: str
    module: str
    parameters: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...]
    ops: tuple[str, ...]
    matrix: bool
    targets: tuple[str, ...] = ()

    def every(self, target: str | None = None) -> list[Variant]:
        """Returns all its variants, or those written for a target."""
        variants = [Variant(self, values) for values in self.variants]
        return variants if target is None else [variant for variant in variants if variant.runs_on(target)]


@dataclass(frozen=True)
class Variant:
    """An instantiation of a kernel.

    Attributes:
        kernel: The kernel.
        values: One word per parameter of it.
    """

    kernel: DeviceKernel
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel.name}[{','.join(self.values)}]" if self.values else self.kernel.name

    @property
    def matrix(self) -> bool:
        """Whether it must show matrix instructions."""
        return self.kernel.matrix and not _MATRIX_DTYPES.isdisjoint(self.values)

    @property
    def tf32(self) -> bool:
        """Whether it multiplies float32 as tf32, which NVIDIA has."""
        return _TF32 in self.values

    def runs_on(self, target: str) -> bool:
        """Whether it is written for a target."""
        if self.tf32 and not target.startswith("sm_"):
            return False
        return target in (self.kernel.targets or (target,))

    def arguments(self) -> str:
        """Returns its parameters as Mojo takes them, such as ``"[t=DType.bfloat16, D=64]"``, or nothing."""
        words = []
        for parameter, value in zip(self.kernel.parameters, self.values, strict=True):
            name, _, type_name = parameter.partition(":")
            if type_name.strip() == "Bool":
                value = {"0": "False", "1": "True"}[value]
            elif value == _TF32:
                words.append("tf32=True")
                value = "DType.float32"
            elif value in _DTYPES:
                value = f"DType.{_DTYPES[value]}"
            words.append(f"{name}={value}")
        return f"[{', '.join(words)}]" if words else ""


HOPPER = ("sm_90a",)
"""The target that has ``wgmma``."""
_ROWS = ("16", "64")  # of x in a tile of a GEMM
_BATCHES = ("1", "4", "8")  # rows of x for which a GEMV reads the weights once
_ACTS = ("f32", "bf16", "f16")
_HALVES = ("bf16", "f16")
_PRODUCTS = (*_ACTS, _TF32)
_EACH = tuple((act,) for act in _ACTS)
# Format of the weights, uint8 for int4, dtype of x, rows of x.
_GEMV = (
    *((act, act, batch) for act in _ACTS for batch in _BATCHES),
    *((packed, "bf16", batch) for packed in ("int8", "uint8") for batch in ("1", "4")),
)
_HEAD_DIMS = ("16", "64", "80", "96", "128", "160")
# A contiguous cache for all of them, pages for what a server is likely to run.
_CACHES = (
    *((act, head_dim, "0") for act in _ACTS for head_dim in _HEAD_DIMS),
    *((act, head_dim, "1") for act in _ACTS for head_dim in ("64", "128")),
)
_FLAGS = (("0", "0"), ("1", "0"), ("0", "1"))  # residual, gather


def _packed(op: str) -> tuple[str, ...]:
    """The ops of that name with packed matrices."""
    return tuple(f"{op}_{word}" for word in WORDS)


KERNELS: tuple[DeviceKernel, ...] = (
    DeviceKernel(
        "linear_gemm",
        "kernels.gpu.linear",
        ("t", "MT", "residual: Bool", "gather: Bool"),
        tuple((act, rows, *flags) for act in _PRODUCTS for rows in _ROWS for flags in _FLAGS),
        ("linear", "linear_residual", "mlp", "lm_head"),
        matrix=True,
    ),
    DeviceKernel(
        "linear_wgmma",
        "kernels.gpu.linear",
        ("t", "residual: Bool", "gather: Bool"),
        tuple((act, *flags) for act in _HALVES for flags in _FLAGS),
        ("linear", "linear_residual", "mlp", "lm_head"),
        matrix=True,
        targets=HOPPER,
    ),
    DeviceKernel(
        "linear_gemv",
        "kernels.gpu.linear",
        ("w", "t", "BATCH", "residual: Bool", "gather: Bool"),
        tuple((*shape, *flags) for shape in _GEMV for flags in _FLAGS),
        ("linear", "linear_residual", "mlp", "lm_head", *_packed("linear")),
        matrix=False,
    ),
    DeviceKernel(
        "gate_up_silu_gemm",
        "kernels.gpu.gate_up_silu",
        ("t", "MT"),
        tuple((act, rows) for act in _PRODUCTS for rows in _ROWS),
        ("gate_up_silu", "mlp"),
        matrix=True,
    ),
    DeviceKernel(
        "gate_up_silu_wgmma",
        "kernels.gpu.gate_up_silu",
        ("t",),
        tuple((act,) for act in _HALVES),
        ("gate_up_silu", "mlp"),
        matrix=True,
        targets=HOPPER,
    ),
    DeviceKernel(
        "gate_up_silu_gemv",
        "kernels.gpu.gate_up_silu",
        ("w", "t", "BATCH"),
        _GEMV,
        ("gate_up_silu", "mlp", *_packed("gate_up_silu")),
        matrix=False,
    ),
    DeviceKernel(
        "qkv_gemm",
        "kernels.gpu.qkv",
        ("t", "MT"),
        tuple((act, rows) for act in _PRODUCTS for rows in _ROWS),
        ("qkv_rope_append",),
        matrix=True,
    ),
    DeviceKernel(
        "qkv_wgmma",
        "kernels.gpu.qkv",
        ("t",),
        tuple((act,) for act in _HALVES),
        ("qkv_rope_append",),
        matrix=True,
        targets=HOPPER,
    ),
    DeviceKernel(
        "qkv_gemv",
        "kernels.gpu.qkv",
        ("w", "t", "BATCH"),
        # int4's nine pointers and the offsets of several rows of x are more than CDNA's scalar registers hold.
        tuple(shape for shape in _GEMV if shape != ("uint8", "bf16", "4")),
        ("qkv_rope_append", *_packed("qkv_rope_append")),
        matrix=False,
    ),
    DeviceKernel(
        "rope_append",
        "kernels.gpu.rope_append",
        ("t", "paged: Bool"),
        tuple((act, paged) for act in _ACTS for paged in ("0", "1")),
        ("qkv_rope_append", *_packed("qkv_rope_append")),
        matrix=False,
    ),
    DeviceKernel(
        "attention_prefill",
        "kernels.gpu.attention_prefill",
        ("t", "D", "paged: Bool"),
        _CACHES,
        ("attention_prefill",),
        matrix=True,
    ),
    DeviceKernel(
        "attention_prefill_wgmma",
        "kernels.gpu.attention_prefill_wgmma",
        ("t", "D", "paged: Bool"),
        tuple(cache for cache in _CACHES if cache[0] in _MATRIX_DTYPES),
        ("attention_prefill",),
        matrix=True,
        targets=HOPPER,
    ),
    DeviceKernel(
        "attention_decode",
        "kernels.gpu.attention_decode",
        ("t", "D", "paged: Bool", "ROWS"),
        tuple((*cache, rows) for cache in _CACHES for rows in ("1", "4")),
        ("attention_decode",),
        matrix=False,
    ),
    DeviceKernel(
        "attention_combine",
        "kernels.gpu.attention_decode",
        ("t", "D"),
        tuple((act, head_dim) for act in _ACTS for head_dim in _HEAD_DIMS),
        ("attention_decode",),
        matrix=False,
    ),
    DeviceKernel("rms_norm", "kernels.gpu.rms_norm", ("t",), _EACH, ("rms_norm",), matrix=False),
    DeviceKernel("rope", "kernels.gpu.rope", ("t",), _EACH, ("rope",), matrix=False),
    DeviceKernel("embedding", "kernels.gpu.embedding", ("t",), _EACH, ("embedding",), matrix=False),
    DeviceKernel("greedy_spans", "kernels.gpu.greedy", (), ((),), ("greedy",), matrix=False),
    DeviceKernel("greedy", "kernels.gpu.greedy", (), ((),), ("greedy",), matrix=False),
    DeviceKernel("sample", "kernels.gpu.sample", (), ((),), ("sample",), matrix=False),
)
"""In the order of the table that ``shipway targets`` prints."""


def find(name: str, values: tuple[str, ...]) -> Variant:
    """Returns the variant of that kernel.

    Raises:
        ShipwayError: There is none.
    """
    kernel = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if kernel is None:
        raise ShipwayError(f"no kernel {name}: choose one of {', '.join(kernel.name for kernel in KERNELS)}")
    if values not in kernel.variants:
        known = ", ".join(map(str, kernel.every()))
        raise ShipwayError(f"{name}[{','.join(values)}] is not compiled: choose one of {known}")
    return Variant(kernel, values)


def matching(pattern: str) -> list[Variant]:
    """Returns the variants whose name, or kernel's name, a pattern of ``*`` and ``?`` matches."""
    pattern = pattern.replace("[", "[[]")
    return [
        variant
        for kernel in KERNELS
        for variant in kernel.every()
        if fnmatchcase(kernel.name, pattern) or fnmatchcase(str(variant), pattern)
    ]
