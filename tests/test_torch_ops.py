"""The Mojo ops inside PyTorch programs: eager, compiled without a graph break, and wrong calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import tiny_checkpoints
from shipway.interop import torch_ops
from shipway.interop.max_module import MaxModule
from shipway.model.rope import RopeConfig, rope_table

T, K, N, HEADS, KV_HEADS, D = 5, 72, 40, 4, 2, 16


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * D, "gate": N, "up": N}
    found = {name: torch.randn(rows, K) / K**0.5 for name, rows in shapes.items()}
    return found | {"o": torch.randn(K, HEADS * D) / 8, "down": torch.randn(K, N) / 6, "norm": torch.rand(K) + 0.5}


def block(x: torch.Tensor, w: dict[str, torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
    """A whole decoder layer of our ops."""
    ops = torch.ops.shipway
    offsets, start = torch.tensor([0, T], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    table = torch.from_numpy(rope_table(RopeConfig(10000.0, D), 16))
    h = ops.rms_norm(x, w["norm"], 1e-5, torch.float32)
    none = (None,) * 5
    q = ops.qkv_rope_append(h, w["q"], w["k"], w["v"], *none, 1e-5, table, cache, offsets, start, 0)
    y = ops.attention(q, cache, offsets, start, 0, D**-0.5, 0)
    x = ops.linear_residual(y.reshape(T, HEADS * D), w["o"], x)
    h = ops.rms_norm(x, w["norm"], 1e-5, torch.float32)
    return ops.linear_residual(ops.gate_up_silu(h, w["gate"], w["up"]), w["down"], x)


def plain_block(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same layer in plain PyTorch."""
    cos, sin = torch.from_numpy(rope_table(RopeConfig(10000.0, D), 16))[:T, None].chunk(2, -1)

    def rotate(h: torch.Tensor) -> torch.Tensor:
        a, b = h.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(0, 1)

    h = functional.rms_norm(x, (K,), w["norm"], 1e-5)
    q, k = rotate((h @ w["q"].T).view(T, HEADS, D)), rotate((h @ w["k"].T).view(T, KV_HEADS, D))
    v = (h @ w["v"].T).view(T, KV_HEADS, D).transpose(0, 1)
    y = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    x = x + y.transpose(0, 1).reshape(T, -1) @ w["o"].T
    h = functional.rms_norm(x, (K,), w["norm"], 1e-5)
    return x + (functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T


def test_a_layer_of_our_ops_equals_plain_torch_and_compiles_without_a_graph_break(
    weights: dict[str, torch.Tensor],
) -> None:
    x = torch.randn(T, K)
    expected = plain_block(x, weights)
    cache, compiled_cache = (torch.full((1, 1, 2, 8, KV_HEADS, D), torch.nan) for _ in range(2))
    torch.testing.assert_close(block(x, weights, cache), expected, rtol=1e-5, atol=1e-5)
    assert not cache[:, :, :, :T].isnan().any()
    assert cache[:, :, :, T:].isnan().all()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weights, compiled_cache), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled_cache, cache, equal_nan=True)


def test_registrations_satisfy_torch_rules(weights: dict[str, torch.Tensor]) -> None:
    x = torch.randn(T, K)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch_ops.linear, (x, weights["gate"]), test_utils=checks)
    torch.library.opcheck(torch_ops.rms_norm, (x, weights["norm"], 1e-5, torch.bfloat16), test_utils=checks)
    torch.library.opcheck(torch_ops.gate_up_silu, (x, weights["gate"], weights["up"]), test_utils=checks)


def test_wrong_calls_raise_value_error(weights: dict[str, torch.Tensor]) -> None:
    x = torch.randn(T, K)
    with pytest.raises(ValueError, match="K is 72"):
        torch.ops.shipway.linear(x, weights["o"])
    with pytest.raises(ValueError, match="not contiguous"):
        torch.ops.shipway.linear(torch.randn(K, T).T, weights["gate"])
    with pytest.raises(ValueError, match="float16"):
        torch.ops.shipway.linear(x.half(), weights["gate"].half())


def test_a_compiled_model_is_a_torch_module(tmp_path: Path) -> None:
    directory = tiny_checkpoints.make("llama3", tmp_path)
    reference = tiny_checkpoints.reference(directory)
    module = MaxModule(directory, max_context=32)
    assert isinstance(module, torch.nn.Module)
    tokens = torch.arange(3, 20)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    torch.testing.assert_close(module(tokens), expected, rtol=1e-4, atol=1e-4)
