"""A graph of few stock ops, compiled for GPUs by tests, and some that are none."""

import os
from typing import Any


def build(device: Any, width: int) -> Any:
    from max.dtype import DType
    from max.graph import Graph, TensorType, ops

    types = [TensorType(DType.float32, ["T", width], device), TensorType(DType.float32, [width], device)]
    with Graph("small", input_types=types) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(ops.gelu(ops.rms_norm(x, weight, 1e-5) * 2.0 + weight) + x)
    return graph


def build_wrong(device: Any) -> Any:
    raise RuntimeError("please file an issue") from ValueError("note\nk.mojo:1:2: error: no such op\nmore")


def build_nothing(device: Any) -> Any:
    raise ValueError("no kernel of that name\nmore")


def build_dead(device: Any) -> Any:
    print("it said this", flush=True)
    os.abort()
