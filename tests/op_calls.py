"""Valid calls of every op, built from the signatures alone, and every row's checked callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from shipway.numerics.campaign import missing
from shipway.numerics.check import OpRunner
from shipway.ops.catalogue import OPS
from shipway.ops.op import Outputs
from shipway.signature import SIGNATURES, Array, Number

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int32": torch.int32}
STORED = {"int8": torch.int8, "uint8": torch.uint8}  # elements and zero points of packed matrices

# head_dim is one that the properties compile anyway; N is wide, as the roundings of few values do not average out.
SMALL = {"T": 2, "K": 6, "V": 5, "R": 2, "N": 64, "H": 4, "D": 64, "kv_heads": 2, "Nq": 256, "Nk": 128, "slots": 2}
SMALL |= {"width": 64, "layers": 2, "capacity": 8, "positions": 8, "rotary_dim": 64, "B": 2, "B1": 3}
SMALL |= {"groups": 1, "pairs": 3}
LARGE = SMALL | {"T": 3, "K": 33, "V": 40, "R": 4, "N": 97, "H": 3, "kv_heads": 1, "Nq": 192, "Nk": 64, "slots": 4}
LARGE |= {"width": 80, "layers": 1, "capacity": 20, "positions": 30, "rotary_dim": 32, "B": 3, "B1": 4}
LARGE |= {"groups": 2, "pairs": 17}
NUMBERS = {
    "eps": 1e-5,
    "scale": 0.125,
    "window": 0,
    "layer": 0,
    "temperature": 0.8,
    "top_k": 3,
    "top_p": 0.9,
    "vocab": 4,
}
INTEGERS = {"ids": [1, 0, 4], "rows": [1, 0, 1, 1], "positions": [3, 0, 7], "offsets": [0, 1, 2, 3], "start": [4, 0, 7]}

Arguments = dict[str, Any]


def arguments_of(op: str, dtype: str = "f32", sizes: Mapping[str, int] = SMALL, seed: int = 0) -> Arguments:
    """A valid call: normal numbers, one new row per sequence, biases and norms there."""
    generator = torch.Generator().manual_seed(seed)

    def array(name: str, kind: Array) -> torch.Tensor:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in kind.dims]
        if kind.dtype == "int32":
            return torch.tensor(INTEGERS[name][: shape[0]], dtype=torch.int32)
        if stored := STORED.get(kind.dtype):
            kinds = torch.iinfo(stored)
            return torch.randint(kinds.min, kinds.max + 1, shape, dtype=stored, generator=generator)
        drawn = torch.rand(shape, generator=generator)
        return (drawn if name == "uniform" else 2 * drawn - 1).to(TORCH[dtype if kind.dtype == "act" else kind.dtype])

    signature = SIGNATURES[op]
    return {name: NUMBERS[name] if isinstance(kind, Number) else array(name, kind) for name, kind in signature.items()}


def rows() -> Iterator[OpRunner]:
    for op in OPS.values():
        for row in op.implementations.values():
            if row.device != "cpu":
                continue  # a wrong call is refused by the same check, and a right one is slow
            for dtype in row.dtypes:
                yield OpRunner(op, row, dtype)


def name_of(runner: OpRunner) -> str:
    return f"{runner.op.name}-{runner.implementation.name}-{runner.dtype}"


RUNNERS = {name_of(runner): runner for runner in rows()}


@lru_cache
def callable_of(name: str) -> Callable[..., Any]:
    """The row's checked callable for head_dim 64."""
    runner = RUNNERS[name]
    if reason := missing(runner.implementation):
        pytest.skip(reason)
    return runner.op.load(runner.implementation, runner.dtype, SMALL["D"])


def call(name: str, arguments: Arguments) -> Outputs:
    """Runs a call on copies of its arguments, so that what it writes in place stays apart."""
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    return RUNNERS[name].outputs(own, callable_of(name)(*own.values()))


def assert_same_bits(one: Outputs, other: Outputs) -> None:
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])
