"""Matrix products as Relax stages that the schedule rules know: what every function of a TVM module is made of."""

from __future__ import annotations

import tvm
from tvm import te

PRODUCT = {"op_pattern": 4}
"""Attributes of a product's function. 4 is Relax's kOutEWiseFusable: what follows element by element may join."""


# Products are of float32 stages: a schedule finds the conversion from bf16 as a stage to inline or to pack with.


def widened(x: te.Tensor, name: str) -> te.Tensor:
    """``x`` in float32."""
    return te.compute(x.shape, lambda *at: x[at].astype("float32"), name)


def product(a: te.Tensor, b: te.Tensor, inner_depth: bool = True) -> te.Tensor:
    """``[..., M, K]`` times ``[..., N, K]``, or ``[..., K, N]`` without ``inner_depth``: ``[..., M, N]`` f32."""
    *outer, rows, depth = a.shape
    columns = b.shape[-2] if inner_depth else b.shape[-1]
    k = te.reduce_axis((0, depth), "k")

    def entry(*at: tvm.tirx.Var) -> tvm.tirx.Expr:
        *batch, m, n = at
        return te.sum(a[(*batch, m, k)] * b[(*batch, n, k) if inner_depth else (*batch, k, n)], axis=k)

    return te.compute((*outer, rows, columns), entry, "product")


def linear(x: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """``x [M, K]`` times ``weight [N, K]`` transposed: ``[M, N]`` f32."""
    return product(widened(x, "a"), widened(weight, "b"))
