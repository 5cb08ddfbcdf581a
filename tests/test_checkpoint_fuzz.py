"""Whatever a checkpoint's headers hold, it loads or is refused in one line: nothing else is raised, and nothing hangs.

Hypothesis mutates fields of the configuration and of the safetensors header, and bytes of that and of the GGUF header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_checkpoints
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.rope import rope_table

fuzz = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# Keys that the tiny checkpoints leave to their defaults.
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 16,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "attention_factor": None,
        "truncate": True,
    },
    "quantization_config": None,
}

NUMBERS = (0, 1, -1, 2, 3, 0.5, 1e-320, 1e38, 1e308, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63))
OTHERS = (None, True, False, float("nan"), float("inf"), float("-inf"), "", "x", "8", "yarn", "llama3", "a\nb", [], {})
NESTED: tuple[Any, ...] = ([1], [1, 1], [[1]], [None], ["x"], [2**63, 0], {"a": 1}, {"rope_type": "linear"})
VALUES = st.sampled_from((*NUMBERS, *OTHERS, *NESTED))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*at, key)
            yield from places(value[key], (*at, key))


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three of its parts replaced, removed or doubled."""
    value = deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *way, key = draw(st.sampled_from([*places(value)]))
        part = value
        for step in way:
            part = part[step]
        if draw(st.booleans()) or draw(st.booleans()):
            part[key] = deepcopy(draw(VALUES))  # a later round may change it
        else:
            del part[key]
    return value


def loads_or_is_refused(path: Path) -> None:
    """Opens everything that is read before a route computes."""
    refusal = ""
    try:
        checkpoint = open_checkpoint(path)
        assert np.isfinite(rope_table(checkpoint.config.rope, 4)).all()
        for weight in checkpoint.weights.values():
            assert weight.dequantise("f32").shape == weight.shape
        checkpoint.tokenizer.encode("the fox")
    except ShipwayError as problem:
        refusal = str(problem)
    assert refusal.isprintable()
    assert len(refusal) < 1100


@pytest.fixture(scope="module", params=["llama2", "mistral", "qwen2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_checkpoints.make("llama2", tmp_path / "llama2")


def test_any_config_loads_or_is_refused(directory: Path) -> None:
    file = directory / "config.json"
    written = json.loads(file.read_text())
    own = {key: value for key, value in SETTINGS.items() if key not in written}

    @fuzz
    @given(st.one_of(mutated(written), mutated(own | written)))
    def any_config(config: Any) -> None:
        file.write_text(json.dumps(config))
        loads_or_is_refused(directory)

    loads_or_is_refused(directory)
    any_config()


def split(file: Path) -> tuple[Any, bytes]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_any_safetensors_header_loads_or_is_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    header, data = split(file)

    @fuzz
    @given(mutated(header), st.sampled_from((0, 0, 0, 1, -1, 8, 2**31, 2**62)))
    def any_header(changed: Any, more: int) -> None:
        text = json.dumps(changed).encode()
        file.write_bytes((len(text) + more).to_bytes(8, "little") + text + data)
        loads_or_is_refused(llama)

    any_header()


def damages(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Bytes to overwrite among the first ``size``: single ones, and numbers of four and eight bytes."""
    numbers = (0, 1, 2, 4, 8, 9, 12, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1)
    long = st.sampled_from((*numbers, 2**62, 2**63, 2**64 - 1)).map(lambda n: n.to_bytes(8, "little"))
    short = st.sampled_from(numbers).map(lambda n: n.to_bytes(4, "little"))
    patch = st.one_of(st.binary(min_size=1, max_size=1), short, long)
    return st.lists(st.tuples(st.integers(0, size), patch), min_size=1, max_size=4)


def damaged(content: bytes, patches: list[tuple[int, bytes]], end: int | None) -> bytes:
    changed = bytearray(content)
    for at, patch in patches:
        changed[at : at + len(patch)] = patch
    return bytes(changed[:end])


def test_any_safetensors_bytes_load_or_are_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")

    @fuzz
    @given(damages(start), st.one_of(st.none(), st.integers(1, len(content))))
    def any_bytes(patches: list[tuple[int, bytes]], end: int | None) -> None:
        file.write_bytes(damaged(content, patches, end))
        loads_or_is_refused(llama)

    any_bytes()


def test_any_gguf_header_loads_or_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tiny_checkpoints.write_gguf(llama, tmp_path / "model.gguf")
    content = file.read_bytes()
    start = content.index(b"token_embd.weight") + 4000  # the tensors' entries end before

    @fuzz
    @given(damages(start), st.one_of(st.none(), st.none(), st.integers(1, len(content))))
    def any_bytes(patches: list[tuple[int, bytes]], end: int | None) -> None:
        file.write_bytes(damaged(content, patches, end))
        loads_or_is_refused(file)

    loads_or_is_refused(file)
    any_bytes()
