"""The op ``decoder_layers`` against the ops it is made of, called one by one: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from max.driver import CPU
from max.engine import InferenceSession, Model
from max.graph import BufferType, BufferValue, DeviceRef, Graph, Module, TensorType, TensorValue

from shipway.graphs import ops
from shipway.graphs.extension import kernels_extension
from shipway.routes.max_model import wrap

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CAPACITY, FIRST = 100, 72, 6, 2, 24, 2, 256, 1
EPS, WINDOWS = 1e-5, (0, 40)
OFFSETS, START = (0, 1, 6, 7, 77), (130, 3, 0, 90)  # decode beyond two splits, a continued prompt, a first token
TOKENS = OFFSETS[-1]


def _shapes(bias: bool, norm: bool) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"norm_in": (HIDDEN,), "q": (q, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN)}
    if bias:
        shapes |= {"bias_q": (q,), "bias_k": (kv,), "bias_v": (kv,)}
    if norm:
        shapes |= {"norm_q": (HEAD_DIM,), "norm_k": (HEAD_DIM,)}
    mlp = {"norm_mlp": (HIDDEN,), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return shapes | {"wo": (HIDDEN, q)} | mlp


def _weights(v: dict[str, TensorValue], bias: bool, norm: bool) -> ops.LayerWeights:
    return ops.LayerWeights(
        norm_in=v["norm_in"],
        qkv=(v["q"], v["k"], v["v"]),
        biases=(v["bias_q"], v["bias_k"], v["bias_v"]) if bias else None,
        norms=(v["norm_q"], v["norm_k"]) if norm else None,
        wo=v["wo"],
        norm_mlp=v["norm_mlp"],
        gate=v["gate"],
        up=v["up"],
        down=v["down"],
    )


def _one_by_one(
    x: TensorValue,
    w: ops.LayerWeights,
    table: TensorValue,
    cache: BufferValue,
    offsets: TensorValue,
    start: TensorValue,
    layer: int,
) -> TensorValue:
    act = cache.dtype
    h = ops.rms_norm(x, w.norm_in, EPS, act)
    q = ops.qkv_rope_append(h, w.qkv, w.biases, w.norms, EPS, table, cache, offsets, start, layer, HEAD_DIM)
    y = ops.attention(q, cache, offsets, start, layer, HEAD_DIM**-0.5, WINDOWS[layer - FIRST])
    x = ops.linear_residual(y.reshape((y.shape[0], HEADS * HEAD_DIM)), w.wo, x)
    return ops.linear_residual(ops.gate_up_silu(ops.rms_norm(x, w.norm_mlp, EPS, act), w.gate, w.up), w.down, x)


def _graph(module: Module, name: str, dtype: str, bias: bool, norm: bool) -> None:
    device, act, f32 = DeviceRef.CPU(), ops.DTYPES[dtype], ops.DTYPES["f32"]
    index = ops.DType.int32
    shapes = _shapes(bias, norm)
    kinds = [TensorType(act if len(shape) == 2 else f32, shape, device) for shape in shapes.values()]
    inputs = [
        TensorType(f32, ["T", HIDDEN], device),
        TensorType(index, ["B1"], device),
        TensorType(index, ["B"], device),
        TensorType(f32, ["positions", HEAD_DIM], device),
        BufferType(act, ["slots", FIRST + LAYERS, 2, CAPACITY, KV_HEADS, HEAD_DIM], device),
        *kinds * LAYERS,
    ]
    with Graph(name, input_types=inputs, custom_extensions=[kernels_extension()], module=module) as graph:
        x, offsets, start, table = (value.tensor for value in graph.inputs[:4])
        cache = graph.inputs[4].buffer
        values = [value.tensor for value in graph.inputs[5:]]
        layers = [
            _weights(dict(zip(shapes, values[i * len(shapes) :], strict=False)), bias, norm) for i in range(LAYERS)
        ]
        if name.startswith("together"):
            x = ops.decoder_layers(x, layers, WINDOWS, FIRST, EPS, table, cache, offsets, start, HEAD_DIM)
        else:
            for i, layer in enumerate(layers):
                x = _one_by_one(x, layer, table, cache, offsets, start, FIRST + i)
        graph.output(x)


@pytest.fixture(scope="module", params=["f32", "bf16"])
def compiled(request: pytest.FixtureRequest) -> tuple[str, dict[str, Model]]:
    """Both graphs of every variant, compiled at once."""
    module = Module()
    for bias, norm in ((False, False), (True, False), (False, True)):
        for name in ("together", "one_by_one"):
            _graph(module, f"{name}_{bias:d}{norm:d}", request.param, bias, norm)
    session = InferenceSession(devices=[CPU()])
    return request.param, dict(session.init_all(session.compile(module, custom_extensions=[kernels_extension()])))


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = (rng.standard_normal(shape) * 0.3).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values


@pytest.mark.parametrize(("bias", "norm"), [(False, False), (True, False), (False, True)])
def test_layers_together_have_the_bits_of_the_ops_one_by_one(
    compiled: tuple[str, dict[str, Model]], bias: bool, norm: bool
) -> None:
    dtype, models = compiled
    rng = np.random.default_rng(7)
    weights = [
        (_array(rng, shape, dtype if len(shape) == 2 else "f32"), dtype if len(shape) == 2 else "f32")
        for _ in range(LAYERS)
        for shape in _shapes(bias, norm).values()
    ]
    x = _array(rng, (TOKENS, HIDDEN), "f32")
    angles = rng.uniform(0, 6, (CAPACITY, HEAD_DIM // 2)).astype(np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    past = _array(rng, (len(START), FIRST + LAYERS, 2, CAPACITY, KV_HEADS, HEAD_DIM), dtype)
    results = []
    for name in ("together", "one_by_one"):
        cache = past.copy()
        (out,) = models[f"{name}_{bias:d}{norm:d}"].execute(
            x,
            np.array(OFFSETS, np.int32),
            np.array(START, np.int32),
            table,
            wrap(cache, dtype),
            *(wrap(array, kind) for array, kind in weights),
        )
        results.append((out.to_numpy(), cache))
    (together, cache), (apart, cache_apart) = results
    assert np.isfinite(together).all()
    assert together.std() > 0.1
    assert not np.array_equal(cache[:, FIRST], past[:, FIRST])
    np.testing.assert_array_equal(cache[:, 0], past[:, 0])
    np.testing.assert_array_equal(together.view(np.uint32), apart.view(np.uint32))
    np.testing.assert_array_equal(cache.view(np.uint8), cache_apart.view(np.uint8))
