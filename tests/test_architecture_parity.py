"""Every route computes what transformers computes, on every architecture, in float32.

One route is prepared once per checkpoint and serves all checks, because preparing may compile.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.utils

import tiny_checkpoints
from parity import TOLERANCE, assert_close, prepare, transformers_logits
from shipway.errors import ShipwayError
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import Route

# Routes whose compiler needs most of a minute or more for each checkpoint serve these, and the rest among the slow
# tests. Together qwen2 and qwen3 have grouped heads, a scaled RoPE, windows on some layers, biases, q and k norms, tied
# and untied heads, and a head_dim that is no power of two. Everything else about an architecture is in the RoPE table
# and the config, which all routes share.
FEWER = {"torch-compile": ("qwen2", "qwen3"), "max-graph": ("qwen3",)}


@dataclass(frozen=True)
class Served:
    route: Route
    expected: Callable[[np.ndarray], np.ndarray]  # tokens [B, S] -> logits [B, S, vocab]
    vocab_size: int
    window: int  # any number where the model has none

    def tokens(self, *shape: int) -> np.ndarray:
        return np.random.default_rng(sum(shape)).integers(3, self.vocab_size, shape, dtype=np.int32)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny_checkpoints.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, route), marks=() if name in FEWER.get(route, tiny_checkpoints.SPECS) else pytest.mark.slow)
        for route in ROUTES
        for name in tiny_checkpoints.SPECS
    ],
    ids="-".join,
)
def served(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Served]:
    name, route = request.param
    reason = ROUTES[route].why_not("f32", "f32", "cpu")
    if reason:
        pytest.skip(f"{route} {reason}")
    path = checkpoint(name)
    made = prepare(path, route)
    spec = tiny_checkpoints.SPECS[name]
    yield Served(made, transformers_logits(path), spec["vocab_size"], spec.get("sliding_window", 8))
    made.close()


@pytest.fixture(scope="module")
def compilations() -> Callable[[], int]:
    """Counts what Dynamo and XLA have compiled in this process, as far as they are there."""
    compiled_by_xla: list[str] = []
    if find_spec("jax") is not None:
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: compiled_by_xla.append(event) if event.endswith("backend_compile_duration") else None
        )
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"] + len(compiled_by_xla)


@pytest.mark.parametrize("length", [1, 7, 33])
def test_prefill_gives_the_logits_of_the_last_token(served: Served, length: int) -> None:
    tokens = served.tokens(1, length)
    served.route.reset()
    chosen = served.route.prefill(tokens)
    expected = served.expected(tokens)[:, -1]
    assert_close(served.route.logits(), expected)
    np.testing.assert_array_equal(chosen, expected.argmax(-1))


def test_prompts_that_end_beside_the_window_and_at_it(served: Served) -> None:
    for length in (served.window - 1, served.window, served.window + 1):
        tokens = served.tokens(1, length + 2)
        expected = served.expected(tokens)
        served.route.reset()
        served.route.prefill(tokens[:, :length])
        assert_close(served.route.logits(), expected[:, length - 1])
        for position in (length, length + 1):
            served.route.decode(tokens[:, position])
            assert_close(served.route.logits(), expected[:, position])


def test_decode_continues_the_prompt(served: Served) -> None:
    tokens = served.tokens(1, 27)
    expected = served.expected(tokens)
    served.route.reset()
    served.route.prefill(tokens[:, :7])
    for position in range(7, tokens.shape[1]):
        chosen = served.route.decode(tokens[:, position])
        assert_close(served.route.logits(), expected[:, position])
        np.testing.assert_array_equal(chosen, expected[:, position].argmax(-1))


def test_a_second_prefill_attends_to_the_first(served: Served) -> None:
    tokens = served.tokens(1, 21)
    served.route.reset()
    served.route.prefill(tokens[:, :8])
    served.route.prefill(tokens[:, 8:])
    assert_close(served.route.logits(), served.expected(tokens)[:, -1])


def test_a_batch_of_two_keeps_its_sequences_apart(served: Served) -> None:
    tokens = served.tokens(2, 13)
    expected = served.expected(tokens)
    served.route.reset()
    served.route.prefill(tokens[:, :11])
    assert_close(served.route.logits(), expected[:, 10])
    for position in (11, 12):
        served.route.decode(tokens[:, position])
        assert_close(served.route.logits(), expected[:, position])


def test_score_gives_every_position_and_leaves_the_cache_empty(served: Served) -> None:
    tokens = served.tokens(1, 33)
    served.route.reset()
    served.route.prefill(served.tokens(1, 5))
    assert_close(served.route.score(tokens[0]), served.expected(tokens)[0])
    served.route.prefill(tokens[:, :9])
    assert_close(served.route.logits(), served.expected(tokens[:, :9])[:, -1])


def test_decoding_after_a_known_prompt_length_compiles_nothing(served: Served, compilations: Callable[[], int]) -> None:
    """Timed runs follow a prefill of the same length: whatever else they need must be compiled by then."""
    for length in (5, 20):
        served.route.reset()
        served.route.prefill(served.tokens(1, length))
    before = compilations()
    for length in (5, 20):
        served.route.reset()
        chosen = served.route.prefill(served.tokens(1, length))
        for _ in range(tiny_checkpoints.CONTEXT - length):
            chosen = served.route.decode(chosen)
    assert compilations() == before


def test_a_full_context_refuses_one_more_token_with_numbers(served: Served) -> None:
    served.route.reset()
    served.route.prefill(served.tokens(1, tiny_checkpoints.CONTEXT))
    with pytest.raises(ShipwayError, match=str(tiny_checkpoints.CONTEXT)):
        served.route.decode(np.zeros(1, np.int32))
    served.route.reset()
    with pytest.raises(ShipwayError, match=str(tiny_checkpoints.CONTEXT + 1)):
        served.route.prefill(served.tokens(1, tiny_checkpoints.CONTEXT + 1))


def test_a_batch_that_changes_between_steps_is_refused(served: Served) -> None:
    served.route.reset()
    served.route.prefill(served.tokens(2, 5))
    with pytest.raises(ShipwayError, match="a batch of 1 does not fit a KV cache for 2 sequences"):
        served.route.decode(np.zeros(1, np.int32))


def test_a_token_outside_the_vocabulary_is_refused(served: Served) -> None:
    served.route.reset()
    with pytest.raises(ShipwayError, match=str(served.vocab_size - 1)):
        served.route.prefill(np.array([[served.vocab_size]], np.int32))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"rope_scaling": None}),
        ("llama-linear", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama-yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama3", {"rope_scaling": tiny_checkpoints.LLAMA3_ROPE | {"factor": 32.0}}),
        ("llama3", {"rope_theta": 10000.0}),
        ("llama2", {"rms_norm_eps": 0.5}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"max_window_layers": 2, "layer_types": None}),
    ],
)
def test_parity_notices_a_setting_that_is_ignored(
    name: str, changes: dict[str, object], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The checks above can fail: a checkpoint whose setting is taken away is far outside the tolerance."""
    altered = shutil.copytree(checkpoint(name), tmp_path / name)
    config = json.loads((altered / "config.json").read_text())
    (altered / "config.json").write_text(json.dumps(config | changes))
    tokens = np.arange(3, 36, dtype=np.int32)
    expected = transformers_logits(checkpoint(name))(tokens[None])[0]
    error = np.abs(prepare(altered, "torch-eager").score(tokens) - expected).max() / np.abs(expected).max()
    assert error > 50 * TOLERANCE


@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3"])
def test_bf16_baseline_errs_no_more_than_transformers_in_bf16(name: str, checkpoint: Callable[[str], Path]) -> None:
    tokens = np.arange(3, 60, dtype=np.int32)
    expected = transformers_logits(checkpoint(name))(tokens[None])[0]
    model = tiny_checkpoints.reference(checkpoint(name)).bfloat16()
    with torch.inference_mode():
        base = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].float().numpy()
    got = prepare(checkpoint(name), "torch-eager", "bf16").score(tokens)
    assert np.sqrt(np.mean((got - expected) ** 2)) <= 1.25 * np.sqrt(np.mean((base - expected) ** 2))
