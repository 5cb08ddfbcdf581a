"""What a checkpoint says about its head, its biases and its epsilon decides the result as it does in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_checkpoints
from parity import TOLERANCE, assert_close, prepare, transformers_logits
from shipway import api
from shipway.errors import ShipwayError
from shipway.model.checkpoint import open_checkpoint
from shipway.model.config import ModelConfig

TOKENS = np.arange(3, 36, dtype=np.int32)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edited(
    directory: Path,
    name: str,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda state: None,
    **settings: Any,
) -> Path:
    """A tiny checkpoint with other tensors and settings."""
    path = tiny_checkpoints.make(name, directory)
    state = load_file(path / "model.safetensors")
    tensors(state)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


def scores(path: Path, route: str = "torch-eager") -> np.ndarray:
    return prepare(path, route).score(TOKENS)


def expected(path: Path) -> np.ndarray:
    return transformers_logits(path)(TOKENS[None])[0]


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() > 50 * TOLERANCE * np.abs(other).max())


def test_a_tied_head_saved_beside_the_embedding_is_the_embedding(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama3", lambda state: state.update({HEAD: state[EMBEDDING].clone()}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tie_word_embeddings
    assert HEAD not in checkpoint.weights
    assert_close(scores(path), expected(path))


def test_a_head_that_differs_from_the_embedding_is_not_tied_whatever_the_flag_says(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama3", lambda state: state.update({HEAD: state[EMBEDDING].flip(0).contiguous()}))
    assert not open_checkpoint(path).config.tie_word_embeddings
    got = scores(path)
    assert_close(got, expected(path))
    tied = edited(tmp_path / "tied", "llama3")
    assert differ(got, scores(tied))


def test_a_tied_head_that_is_absent_is_the_embedding(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama3")
    assert HEAD not in load_file(path / "model.safetensors")
    assert_close(scores(path), expected(path))


@pytest.mark.parametrize(("settings", "gone"), [({"tie_word_embeddings": False}, HEAD), ({}, EMBEDDING)])
def test_a_head_or_embedding_that_nothing_gives_is_refused(settings: dict[str, Any], gone: str, tmp_path: Path) -> None:
    """Transformers makes up a head at random, or takes a tied head for the embedding that is missing."""
    path = edited(
        tmp_path, "llama3", lambda state: gone == EMBEDDING and state.update({HEAD: state.pop(EMBEDDING)}), **settings
    )
    with pytest.raises(ShipwayError, match=f"lacks tensor {gone}"):
        open_checkpoint(path)


def test_biases_of_qwen2_are_used(tmp_path: Path) -> None:
    path = edited(tmp_path / "biased", "qwen2")
    zeroed = edited(
        tmp_path / "zeroed", "qwen2", lambda state: [state[name].zero_() for name in state if name.endswith(".bias")]
    )
    with_biases, without = scores(path), scores(zeroed)
    assert_close(with_biases, expected(path))
    assert_close(without, expected(zeroed))
    assert differ(with_biases, without)


@pytest.mark.parametrize("route", ["torch-eager", "mojo-graph"])
def test_the_epsilon_is_the_one_of_the_configuration(route: str, tmp_path: Path) -> None:
    """1e-5 and 1e-6 are apart where the residual stream is small; an epsilon of our own would not tell them apart."""

    def quiet(state: dict[str, torch.Tensor]) -> None:
        state[EMBEDDING] *= 1e-3

    found = []
    for eps in (1e-5, 1e-6):
        path = edited(tmp_path / str(eps), "llama2", quiet, rms_norm_eps=eps)
        found.append(scores(path, route))
        assert_close(found[-1], expected(path))
    assert differ(*found)


def test_a_padded_id_is_never_chosen(tmp_path: Path) -> None:
    """The rows of the head past the tokenizer's vocabulary win every argmax, and no token of theirs comes out."""

    def favour_padding(state: dict[str, torch.Tensor]) -> None:
        state[HEAD][300:] = 100 * state[HEAD][:20]
        state[HEAD][310:] *= -1

    path = edited(tmp_path, "llama2", favour_padding)
    known = open_checkpoint(path).tokenizer.vocab_size
    assert known <= 300
    assert (scores(path).argmax(-1) >= 300).all()
    with api.load(path, route="torch-eager", dtype="f32") as model:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 5.0, "top_k": 3, "top_p": 0.9}):
            ids = [token.id for token in model.generate("the fox", max_new=12, **sampling)]
            assert ids
            assert max(ids) < known


def test_several_end_tokens_are_all_taken(tmp_path: Path) -> None:
    path = edited(tmp_path, "llama2", eos_token_id=[7, 2, 9])
    assert open_checkpoint(path).tokenizer.eos_ids == (2, 7, 9)
    assert ModelConfig.from_hf(json.loads((path / "config.json").read_text())).eos_ids == (7, 2, 9)
