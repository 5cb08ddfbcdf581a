"""One function per op: the Mojo op of the same name, called inside a MAX graph.

Shapes: T tokens of a ragged batch of B sequences, ``offsets [B + 1]`` their first rows, ``start [B]`` the tokens
already in the KV cache: one buffer ``[slots, layers, 2, capacity, kv_heads, head_dim]``, or :class:`Pages`. ``act`` is
the activation dtype. ``tf32``, on NVIDIA GPUs, lets float32 of more than eight rows be multiplied as tf32.
A :class:`Packed` matrix calls the op of the name with ``_int8`` or ``_int4``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, TensorType, TensorValue, Value, ops


@dataclass(frozen=True)
class Pages:
    """MAX's paged KV cache.

    Attributes:
        blocks: ``[pages, 2, layers, page_size, kv_heads, head_dim]``, page_size a multiple of 128.
        lookup: uint32 ``[B, pages of a sequence]``, the page of each page_size positions.
        page_stride: int64 ``[1]``, elements from a page to the next, negative when packed.
    """

    blocks: BufferValue
    lookup: TensorValue
    page_stride: TensorValue


@dataclass(frozen=True)
class Packed:
    """A matrix ``[N, K]`` as ``shipway.signature.packed_arguments`` has it; without zero points it is int8.

    Ops of packed matrices, all of one format, are on GPUs alone, over a KV cache in one buffer. They are GEMVs, of as
    many rows of act as there are, and have no tf32.
    """

    stored: TensorValue
    scales: TensorValue
    zeros: TensorValue | None = None


Matrix: TypeAlias = TensorValue | Packed

DTYPES = {"f32": DType.float32, "bf16": DType.bfloat16, "f16": DType.float16}


def _products(tf32: bool) -> dict[str, bool]:
    """The parameter of ops that multiply, which those of other devices do not have."""
    return {"tf32": True} if tf32 else {}


def _call(
    name: str, values: Sequence[Value], dtype: DType, shape: Sequence[object], **parameters: bool | int
) -> TensorValue:
    return _call_all(name, values, [(dtype, shape)], **parameters)[0]


def _call_all(
    name: str, values: Sequence[Value], outs: Sequence[tuple[DType, Sequence[object]]], **parameters: bool | int
) -> list[TensorValue]:
    device = values[0].device
    types = [TensorType(dtype, shape, device) for dtype, shape in outs]
    call = ops.inplace_custom if any(isinstance(v, BufferValue) for v in values) else ops.custom
    results = call(name, device=device, values=list(values), out_types=types, parameters=parameters or None)
    return [result.tensor for result in results]


def _on(cache: BufferValue | Pages, op: str) -> tuple[str, list[Value]]:
    """Name of an op for this cache's layout, and the cache's inputs."""
    if isinstance(cache, Pages):
        return f"{op}_paged", [cache.blocks, cache.lookup, cache.page_stride]
    return op, [cache]


def _of(op: str, matrices: Sequence[Matrix]) -> tuple[str, list[Value]]:
    """Name of an op for these matrices, and their inputs."""
    parts = [
        (one.stored, one.scales, *([one.zeros] if one.zeros is not None else [])) if isinstance(one, Packed) else (one,)
        for one in matrices
    ]
    return op + {1: "", 2: "_int8", 3: "_int4"}[len(parts[0])], [part for one in parts for part in one]


def _rows(matrix: Matrix) -> Dim:
    return (matrix.stored if isinstance(matrix, Packed) else matrix).shape[0]


def scalar(value: float, dtype: DType) -> TensorValue:
    """A host constant: ops take their scalars from the CPU on every device."""
    return ops.constant(value, dtype, device=DeviceRef.CPU())


def embedding(ids: TensorValue, table: TensorValue) -> TensorValue:
    """``table[ids]``: ids ``[T]``, table ``[V, K]`` -> f32 ``[T, K]``."""
    return _call("embedding", [ids, table], DType.float32, [ids.shape[0], table.shape[1]])


def rms_norm(x: TensorValue, weight: TensorValue, eps: float | TensorValue, act: DType) -> TensorValue:
    """RMSNorm of f32 x ``[T, K]`` with f32 weight ``[K]`` -> act ``[T, K]``."""
    eps = scalar(eps, DType.float32) if isinstance(eps, float) else eps
    return _call("rms_norm", [x, weight, eps], act, x.shape)


def rope(x: TensorValue, table: TensorValue, positions: TensorValue) -> TensorValue:
    """Rotates act x ``[T, heads, head_dim]`` by the rows int32 positions ``[T]`` of table ``[P, rotary_dim]``."""
    return _call("rope", [x, table, positions], x.dtype, x.shape)


def qkv_rope_append(
    x: TensorValue,
    weights: tuple[Matrix, Matrix, Matrix],
    biases: tuple[TensorValue, TensorValue, TensorValue] | None,
    norms: tuple[TensorValue, TensorValue] | None,
    eps: float | TensorValue,
    table: TensorValue,
    cache: BufferValue | Pages,
    offsets: TensorValue,
    start: TensorValue,
    layer: int | TensorValue,
    head_dim: int,
    tf32: bool = False,
) -> TensorValue:
    """Projects act x ``[T, K]`` by wq, wk, wv ``[heads * head_dim, K]``, adds f32 biases, norms q and k heads by f32
    ``[head_dim]``, rotates by ``table [positions, rotary_dim]``, writes k and v into the cache.

    Returns:
        q ``[T, heads, head_dim]`` in the cache's dtype.
    """
    unused = ops.constant(np.zeros(1, np.float32), DType.float32, device=x.device)
    eps = scalar(eps, DType.float32) if isinstance(eps, float) else eps
    layer = scalar(layer, DType.int32) if isinstance(layer, int) else layer
    heads = _rows(weights[0]) // head_dim
    name, matrices = _of("qkv_rope_append", weights)
    name, cached = _on(cache, name)
    return _call(
        name,
        [
            *cached,
            x,
            *matrices,
            *(biases or (unused,) * 3),
            *(norms or (unused,) * 2),
            eps,
            table,
            offsets,
            start,
            layer,
        ],
        cached[0].dtype,
        [x.shape[0], heads, head_dim],
        head_dim=head_dim,
        has_bias=biases is not None,
        has_norm=norms is not None,
        **_products(tf32),
    )


def attention(
    q: TensorValue,
    cache: BufferValue | Pages,
    offsets: TensorValue,
    start: TensorValue,
    layer: int | TensorValue,
    scale: float | TensorValue,
    window: int | TensorValue,
) -> TensorValue:
    """Causal attention of q ``[T, heads, head_dim]`` over the cache, which already holds these tokens' k and v.

    Sequences with one new token run the ``attention_decode`` kernel, longer ones ``attention_prefill``. ``window`` is
    the number of last keys a row sees, itself included; 0 for all.
    """
    layer = scalar(layer, DType.int32) if isinstance(layer, int) else layer
    scale = scalar(scale, DType.float32) if isinstance(scale, float) else scale
    window = scalar(window, DType.int32) if isinstance(window, int) else window
    name, cached = _on(cache, "attention")
    return _call(name, [*cached, q, offsets, start, layer, scale, window], q.dtype, q.shape, head_dim=int(q.shape[2]))


def linear(x: TensorValue, w: Matrix, tf32: bool = False) -> TensorValue:
    """act x ``[T, K]`` @ w ``[N, K]``^T -> f32 ``[T, N]``."""
    name, matrices = _of("linear", [w])
    return _call(name, [x, *matrices], DType.float32, [x.shape[0], _rows(w)], **_products(tf32))


def linear_residual(x: TensorValue, w: TensorValue, residual: TensorValue, tf32: bool = False) -> TensorValue:
    """f32 residual ``[T, N]`` + act x ``[T, K]`` @ w ``[N, K]``^T -> f32 ``[T, N]``."""
    return _call("linear_residual", [x, w, residual], DType.float32, residual.shape, **_products(tf32))


def gate_up_silu(x: TensorValue, gate: Matrix, up: Matrix, tf32: bool = False) -> TensorValue:
    """silu(x @ gate^T) * (x @ up^T): act x ``[T, K]``, matrices ``[N, K]`` -> act ``[T, N]``."""
    name, matrices = _of("gate_up_silu", [gate, up])
    return _call(name, [x, *matrices], x.dtype, [x.shape[0], _rows(gate)], **_products(tf32))


def mlp(
    x: TensorValue, gate: TensorValue, up: TensorValue, down: TensorValue, residual: TensorValue, tf32: bool = False
) -> TensorValue:
    """residual + gate_up_silu @ down^T: act x ``[T, K]``, down ``[K, N]``, residual and result f32 ``[T, K]``."""
    return linear_residual(gate_up_silu(x, gate, up, tf32), down, residual, tf32)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices ``[out, in]``, and its f32 norm weights and biases.

    Attributes:
        norm_in: Of the layer's input ``[K]``.
        qkv: wq, wk, wv ``[heads * head_dim, K]``.
        biases: Of q, k and v.
        norms: Of q and k heads ``[head_dim]``.
        wo: Output projection ``[K, heads * head_dim]``.
        norm_mlp: Of the MLP's input ``[K]``.
        gate: ``[N, K]``, as ``up``; ``down`` is ``[K, N]``.
    """

    norm_in: TensorValue
    qkv: tuple[TensorValue, TensorValue, TensorValue]
    biases: tuple[TensorValue, TensorValue, TensorValue] | None
    norms: tuple[TensorValue, TensorValue] | None
    wo: TensorValue
    norm_mlp: TensorValue
    gate: TensorValue
    up: TensorValue
    down: TensorValue


def decoder_layers(
    x: TensorValue,
    layers: Sequence[LayerWeights],
    windows: Sequence[int],
    first: int,
    eps: float,
    table: TensorValue,
    cache: BufferValue | Pages,
    offsets: TensorValue,
    start: TensorValue,
    head_dim: int,
    tf32: bool = False,
) -> TensorValue:
    """Decoder layers ``first``, ``first + 1``, ... of f32 x ``[T, K]`` -> f32 ``[T, K]``; their keys and values go into
    the cache.

    The phases of a layer are the ops above, by one team of workers that is forked once; see their arguments. The bits
    are those of the ops called one by one. ``windows`` has the sliding window of each layer, 0 for none.
    """
    one = layers[0]
    name, cached = _on(cache, "decoder_layers")
    act = cached[0].dtype
    rows, q_size = x.shape[0], one.qkv[0].shape[0]
    outs = [
        (DType.float32, x.shape),
        (act, x.shape),
        (act, [rows, q_size]),
        (act, [rows, q_size]),
        (DType.float32, x.shape),
        (act, [rows, one.gate.shape[0]]),
    ]
    matrices = [matrix for w in layers for matrix in (*w.qkv, w.wo, w.gate, w.up, w.down)]
    vectors = [v for w in layers for v in (w.norm_in, w.norm_mlp, *(w.biases or ()), *(w.norms or ()))]
    values = [
        *cached,
        x,
        *matrices,
        # An op takes one list of tensors; copying the few vectors into one costs less than a fork.
        ops.concat(vectors),
        ops.constant(np.array(windows, np.int32), DType.int32, device=DeviceRef.CPU()),
        scalar(first, DType.int32),
        scalar(eps, DType.float32),
        scalar(head_dim**-0.5, DType.float32),
        table,
        offsets,
        start,
    ]
    return _call_all(
        name,
        values,
        outs,
        head_dim=head_dim,
        has_bias=one.biases is not None,
        has_norm=one.norms is not None,
        matrix_count=len(matrices),
        **_products(tf32),
    )[0]


def lm_head(x: TensorValue, w: TensorValue, rows: TensorValue, tf32: bool = False) -> TensorValue:
    """act x ``[T, K]``, its ``rows [R]`` only, @ w ``[V, K]``^T -> f32 logits ``[R, V]``."""
    return _call("lm_head", [x, w, rows], DType.float32, [rows.shape[0], w.shape[0]], **_products(tf32))


def greedy(logits: TensorValue) -> TensorValue:
    """Index of the largest of f32 logits ``[R, V]`` -> int32 ``[R]``."""
    return _call("greedy", [logits], DType.int32, [logits.shape[0]])


def probe_read(x: TensorValue) -> TensorValue:
    """Reads f32 x ``[n]`` once on all workers -> its sum ``[1]``."""
    return _call("probe_read", [x], DType.float32, [1])


def sample(
    logits: TensorValue,
    uniform: TensorValue,
    temperature: TensorValue,
    top_k: TensorValue,
    top_p: TensorValue,
    vocab: TensorValue,
) -> TensorValue:
    """Token of each row of f32 logits ``[R, V]`` under f32 uniform ``[R]``, scalars on the CPU -> int32 ``[R]``."""
    return _call("sample", [logits, uniform, temperature, top_k, top_p, vocab], DType.int32, [logits.shape[0]])
