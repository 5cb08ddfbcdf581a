"""Our decoder behind MAX's server, asked by the real ``openai`` client, against transformers.

One server for the module: prompts longer than 64 tokens are read in chunks, a page of its KV cache holds 128 tokens.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openai
import pytest
import torch

import tiny_checkpoints

MAX_LENGTH, CHUNK, NEW = 240, 64, 24
LENGTHS = (1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 104, 127, 128, 129, 200)
TOKENS = 294  # of the tiny checkpoints' tokenizer: MAX chooses among these, so the embedding has no more rows


@dataclass
class Served:
    url: str
    path: Path
    client: openai.OpenAI
    reference: tiny_checkpoints.PreTrainedModel

    def complete(self, prompt: Any, **options: Any) -> openai.types.Completion:
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client.completions.create(
            model=str(self.path), prompt=prompt, **{"temperature": 0, "max_tokens": NEW, "extra_body": extra} | options
        )

    def ids(self, prompt: Any, **options: Any) -> list[int]:
        return self.complete(prompt, **options).choices[0].token_ids  # type: ignore[attr-defined]

    def greedy(self, prompt: list[int], new: int = NEW) -> tuple[list[int], np.ndarray]:
        """What transformers chooses, and its log-probabilities ``[new, vocab]``."""
        ids, rows = list(prompt), []
        with torch.inference_mode():
            for _ in range(new):
                row = torch.log_softmax(self.reference(torch.tensor([ids])).logits[0, -1].double(), -1)
                rows.append(row.numpy())
                ids.append(int(row.argmax()))
        return ids[len(prompt) :], np.array(rows)


def checkpoint(name: str, directory: Path) -> Path:
    with patch.dict(tiny_checkpoints.SPECS, {name: tiny_checkpoints.SPECS[name] | {"vocab_size": TOKENS}}):
        return tiny_checkpoints.make(name, directory)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, TOKENS, length).tolist()


def start(path: Path, port: int) -> subprocess.Popen[str]:
    """``shipway serve``, ready."""
    command = [sys.executable, "-m", "shipway.cli", "serve", str(path), "--port", str(port), "--max-batch", "4"]
    command += ["--max-length", str(MAX_LENGTH), "--max-batch-input-tokens", str(CHUNK)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.stderr.read()
    return process


def stop(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.terminate()
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = checkpoint("llama3", tmp_path_factory.mktemp("llama3"))
    port = free_port()
    process = start(path, port)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        yield Served(url, path, client, tiny_checkpoints.reference(path))
    finally:
        code, errors = stop(process)
    # A clean end is part of what is tested: the exit code, and nothing left that listens.
    assert code == 0, errors
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_concurrent_prompts_over_page_and_chunk_borders_match_transformers(served: Served) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(served.ids, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == served.greedy(prompt)[0], f"prompt of {len(prompt)} tokens"


def test_a_cached_prefix_changes_nothing(served: Served) -> None:
    shared = prompt_of(150)
    for tail in (7, 8):
        prompt = [*shared, tail]
        assert served.ids(prompt) == served.greedy(prompt)[0]


def test_a_sequence_may_fill_the_whole_length(served: Served) -> None:
    prompt = prompt_of(MAX_LENGTH - 9)
    assert served.ids(prompt, max_tokens=1000) == served.greedy(prompt, 9)[0]


def test_streaming_gives_the_same_text_in_pieces(served: Served) -> None:
    prompt = prompt_of(90)
    whole = served.complete(prompt).choices[0].text
    pieces = [chunk.choices[0].text for chunk in served.complete(prompt, stream=True) if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 2
    assert "".join(pieces) == whole


def test_log_probabilities_are_those_of_transformers(served: Served) -> None:
    prompt = prompt_of(130)
    choice = served.complete(prompt, logprobs=5).choices[0]
    ids, expected = served.greedy(prompt)
    assert choice.token_ids == ids  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected[np.arange(NEW), ids], atol=2e-4)
    for top, row in zip(choice.logprobs.top_logprobs, expected, strict=True):
        assert len(top) > 1  # tokens that read alike are one entry
        assert np.abs(np.array(list(top.values()))[:, None] - row).min(1).max() < 2e-4


def test_chat_uses_the_checkpoints_template(served: Served) -> None:
    from shipway.model.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(served.path).tokenizer
    messages = [{"role": "user", "content": "the quick brown fox"}]
    prompt = tokenizer.encode(tokenizer.chat(messages), add_bos=False)
    answer = served.client.chat.completions.create(
        model=str(served.path),
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=NEW,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids == served.greedy(prompt)[0]  # type: ignore[attr-defined]


REFUSED: dict[str, dict[str, Any]] = {
    "prompt longer than the server's length": {"prompt": [5] * (MAX_LENGTH + 1)},
    "text longer than the server's length": {"prompt": "the fox " * 1000},
    "empty prompt": {"prompt": ""},
    "id past the vocabulary": {"prompt": [5, TOKENS]},
    "id far past the vocabulary": {"prompt": [5, 2**40]},
    "negative id": {"prompt": [5, -1]},
    "one bad prompt among good ones": {"prompt": [[5, 6], [7, 10**6]]},
    "bad ids in a stream": {"prompt": [5, 10**6], "stream": True},
    "min_tokens beyond the length": {"prompt": [5], "min_tokens": 10**6},
    "negative max_tokens": {"prompt": [5], "max_tokens": -1},
    "more logprobs than there are": {"prompt": [5], "logprobs": 10**6},
    "echo with logprobs": {"prompt": [5], "echo": True, "logprobs": 1},
    "negative temperature": {"prompt": [5], "temperature": -1},
    "top_k past the vocabulary": {"prompt": [5], "top_k": 10**9, "temperature": 1},
    "top_p of 2": {"prompt": [5], "top_p": 2},
}

ANSWERED_SOMEHOW: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": []},
    "id of 70 bits": {"prompt": [5, 2**70]},
    "huge max_tokens": {"prompt": [5], "max_tokens": 10**12},
    "max_tokens of 0": {"prompt": [5], "max_tokens": 0},
    "huge n": {"prompt": [5], "n": 10**6},
    "huge best_of": {"prompt": [5], "best_of": 10**6},
    "huge seed": {"prompt": [5], "seed": 2**80, "temperature": 1},
    "huge temperature": {"prompt": [5], "temperature": 1e30},
    "absurd stops": {"prompt": [5], "stop": ["a"] * 500, "stop_token_ids": [-7, 10**9]},
    "bias of no token": {"prompt": [5], "logit_bias": {"99999999": 100}},
    "structured output": {"prompt": [5], "response_format": {"type": "json_object"}},
    "penalties": {"prompt": [5], "frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 5},
    "unpaired surrogate": {"prompt": "a\ud800b"},
}


def post(served: Served, body: dict[str, Any]) -> int:
    body = {"model": str(served.path), "max_tokens": 2} | body
    request = urllib.request.Request(
        served.url + "/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def assert_alive(served: Served) -> None:
    prompt = prompt_of(20)
    assert served.ids(prompt, max_tokens=2) == served.greedy(prompt, 2)[0]


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_request_is_a_400_and_the_server_lives(served: Served, body: dict[str, Any]) -> None:
    assert post(served, body) == 400
    assert_alive(served)


@pytest.mark.parametrize("body", ANSWERED_SOMEHOW.values(), ids=ANSWERED_SOMEHOW.keys())
def test_no_request_ends_the_server(served: Served, body: dict[str, Any]) -> None:
    assert post(served, body) in (200, 400, 500)
    assert_alive(served)


def test_a_client_that_goes_away_leaves_the_server_alive(served: Served) -> None:
    for _ in range(5):
        stream = served.complete(prompt_of(70), max_tokens=160, stream=True)
        next(iter(stream))
        stream.close()
    assert_alive(served)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "smollm2"])  # smollm2 is stored in bf16
def test_every_architecture_is_served(name: str, tmp_path: Path) -> None:
    path, port = checkpoint(name, tmp_path), free_port()
    process = start(path, port)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        served = Served("", path, client, tiny_checkpoints.reference(path))
        for length in (5, 129):
            assert served.ids(prompt_of(length)) == served.greedy(prompt_of(length))[0]
    finally:
        assert stop(process)[0] == 0


def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path: Path) -> None:
    path, said = tiny_checkpoints.make("llama2", tmp_path), tmp_path / "stderr"
    command = [sys.executable, "-m", "shipway.cli", "serve", str(path), "--port", str(free_port())]
    with said.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    while "starting MAX's server" not in said.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
    assert children.stdout.split()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    for pid in children.stdout.split():
        assert not Path(f"/proc/{pid}").exists()
