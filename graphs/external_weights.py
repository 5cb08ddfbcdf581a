"""Weights as inputs of a graph, bound by name when it is loaded: an artefact holds none."""

from __future__ import annotations

from collections.abc import Callable

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, Weight

from shipway.model.config import ModelConfig


def external_weights(
    graph: Graph, config: ModelConfig, matrix: DType, device: DeviceRef
) -> Callable[[str], TensorValue]:
    """Returns the function that declares a weight of the graph by its Hugging Face name; vectors are f32."""
    shapes = config.tensor_shapes()

    def weight(name: str) -> TensorValue:
        shape = shapes[name]
        # Alignment 1: a memory-mapped tensor starts wherever its file puts it.
        return graph.add_weight(Weight(name, matrix if len(shape) == 2 else DType.float32, shape, device, align=1))

    return weight
