"""The Python interface refuses what it cannot do in one line, before anything is loaded or sent."""

import dataclasses
import os
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_routes
import shipway
from shipway import api
from shipway.errors import CannotRunError, ShipwayError
from shipway.routes.catalogue import ROUTES


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPWAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        for name in ("Good", "Slow"):
            patch.setitem(ROUTES, name, dataclasses.replace(fake_routes.info(name), name=name))
        yield


@pytest.fixture(scope="module")
def model(checkpoint: str) -> Iterator[api.Model]:
    with shipway.load(checkpoint, route="Good", threads=1) as model:
        yield model


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(api, "Worker", started)


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize(
    "arguments",
    [
        {"threads": "2"},
        {"threads": 0},
        {"threads": 1.5},
        {"max_context": 0},
        {"max_context": -5},
        {"max_context": 12.5},
        {"max_context": "16"},
        {"max_context": 100_000},
        {"dtype": "f8"},
        {"dtype": ""},
        {"dtype": ["f32"]},
        {"weights": "q4"},
        {"weights": 4},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"device": None},
        {"route": "no-such"},
        {"route": ["Good"]},
        {"path_or_name": ""},
        {"path_or_name": None},
    ],
)
def test_load_refuses_arguments_with_their_value(checkpoint: str, arguments: dict[str, Any]) -> None:
    given = {"path_or_name": checkpoint, "route": "Good"} | arguments
    value = next(iter(arguments.values()))
    with pytest.raises(ShipwayError, match=re.escape(repr(value))) as caught:
        shipway.load(**given)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize("arguments", [{"device": "cuda"}, {"device": "hip:1"}, {"weights": "f16"}])
def test_what_another_route_or_machine_could_run_is_no_usage_error(checkpoint: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(CannotRunError):
        shipway.load(checkpoint, route="Good", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new": 0},
        {"max_new": 2.5},
        {"max_new": "3"},
        {"temperature": 1.0, "top_k": 2.5},
        {"temperature": 1.0, "seed": 1.5},
        {"temperature": "hot"},
        {"stop": [1]},
        {"stop": None},
        {"stop": "text"},
        {"stop": [""]},
        {"stop": ["\udcff"]},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": []},
        {"prompt": ["text"]},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": "a\udcff"},
        {"prompt": [{"role": "user", "content": "\udcff"}]},
        {"prompt": "\udcff", "chat": True},
    ],
)
def test_generate_refuses_arguments_before_anything_is_sent(
    model: api.Model, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setattr(model._worker, "_send", lambda *sent: pytest.fail("something was sent"))
    with pytest.raises(ShipwayError) as caught:
        model.generate(**{"prompt": "a"} | arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [([], []), ([10_000], []), ([1], [-1]), ([1.5], []), (["a"], []), ([1] * 300, []), (None, []), ([1], 5), ("1", [])],
)
def test_logits_of_ids_that_are_none_are_refused(model: api.Model, prompt: list[Any], continuation: list[Any]) -> None:
    with pytest.raises(ShipwayError):
        model.logits_after(prompt, continuation)
    assert len(model.logits_after([1], [2])) == fake_routes.VOCAB


def test_numbers_of_any_type_are_taken(model: api.Model) -> None:
    plain = list(model.generate("a", max_new=3, temperature=0.5, top_k=2, top_p=0.5, seed=7))
    for number, whole in ((Fraction, np.int64), (np.float32, np.uint8), (lambda value: value, lambda value: value)):
        sampling = {"temperature": number(0.5), "top_k": whole(2), "top_p": number(0.5), "seed": whole(7)}
        assert list(model.generate("a", max_new=whole(3), **sampling)) == plain
    expected = model.logits_after([1, 2], [3])
    for ids in (np.array([1, 2]), iter([1, 2]), range(1, 3)):
        assert np.array_equal(model.logits_after(ids, np.array([3])), expected)


@pytest.mark.parametrize(
    "temperature", [Fraction(10**400), Fraction(-1, 2), np.float32("nan"), 10**400, Decimal("0.5")]
)
def test_numbers_no_float_holds_are_refused(model: api.Model, temperature: Any) -> None:
    with pytest.raises(ShipwayError, match="temperature must be a finite number"):
        model.generate("a", temperature=temperature)


def test_model_closed_by_another_thread_says_so_to_the_one_that_generates(checkpoint: str) -> None:
    for pause in (0.0, 0.05, 0.3):
        model = shipway.load(checkpoint, route="Slow", threads=1)
        tokens = model.generate("a", max_new=200)
        next(tokens)
        closing = threading.Timer(pause, model.close)
        closing.start()
        with pytest.raises(ShipwayError, match="Slow is closed: load the model again"):
            list(tokens)
        closing.join()


def test_public_names_are_listed() -> None:
    assert set(shipway.__all__) <= set(dir(shipway))


def test_closed_model_says_so(checkpoint: str) -> None:
    with shipway.load(checkpoint, route="Good", threads=1) as model:
        assert list(model.generate("a", max_new=2))
    for _ in range(2):
        with pytest.raises(ShipwayError, match="Good is closed: load the model again"):
            model.generate("a", max_new=2)
        with pytest.raises(ShipwayError, match="Good is closed"):
            model.logits_after([1], [])


def test_iterator_left_early_does_not_block_the_next(checkpoint: str) -> None:
    with shipway.load(checkpoint, route="Slow", threads=1) as model:
        for token in model.generate("a", max_new=100):
            assert token.finish is None
            break
        assert len(list(model.generate("a", max_new=3))) <= 3


def test_whoever_has_the_last_token_has_a_free_model(model: api.Model) -> None:
    every = list(model.generate("def", max_new=6, greedy=True))
    texts = [token.text for token in every]
    for arguments in ({"max_new": 3}, {"max_new": 6, "stop": [next(text for text in texts[1:] if text)]}):
        tokens = model.generate("def", greedy=True, **arguments)
        while next(tokens).finish is None:
            pass
        assert list(model.generate("def", max_new=1, greedy=True))  # while the iterator is still open
        assert list(tokens) == []
