"""Every catalogue op on this machine's first GPU: the graphs of ``single_op``, on arrays that go there and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from max.driver import CPU, Accelerator
from max.engine import InferenceSession
from max.graph import DeviceRef

from shipway.graphs.single_op import OPS, OpCall, load_graphs, on_gpus


def load_ops(dtype: str, head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Compiles (or takes from the artefact cache) every op in one activation dtype, those of tf32 that multiply.

    Args:
        dtype: ``"f32"``, ``"bf16"``, ``"f16"`` or ``"tf32"``: activations, matrices and KV cache.
        head_dim: head_dim of the attention ops.

    Returns:
        A function per catalogue op on torch CPU tensors; arguments as in ``shipway.signature.SIGNATURES``.
    """
    gpu = Accelerator()
    names = on_gpus(dtype)
    models = load_graphs(
        InferenceSession(devices=[CPU(), gpu]),
        DeviceRef.GPU(),
        dict.fromkeys(names, (dtype,)),
        head_dim,
        {"gpu": f"{gpu.api} {gpu.architecture_name}"},
    )
    return {op: OpCall(models, name, dtype, gpu) for name in names for op in OPS.get(name, (name,))}
