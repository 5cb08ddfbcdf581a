"""Our architecture against MAX's own, behind the same server: one checkpoint, one set of requests, one load.

Correctness first: both servers must choose the same greedy tokens of fixed prompts, near-ties apart. Then MAX's own
benchmark client sends the same seeded requests to each. The servers run one after the other, because two of them do not
share a CPU fairly; so the rounds of one do not alternate with the other's, and a small difference may be drift.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from shipway.measure.environment import busy_share, describe_environment
from shipway.measure.result import SCHEMA_VERSION
from shipway.serve.server import Server, ServerError, ServeSettings, maxs_command

NEAR_TIE = 1e-3
"""Nats between the two likeliest tokens within which float32 sums in another order may choose either."""

_CHECK_PROMPTS, _CHECK_NEW = 6, 24
_CLIENT_TIMEOUT_S = 3600.0
SERVERS = {"shipway": False, "max-stock": True}
"""Name of each contender, and whether it is MAX's own architecture."""


@dataclass(frozen=True)
class Load:
    """What the client sends in a round.

    Attributes:
        requests: Requests of a round.
        concurrency: Requests in flight.
        prompt_tokens: Random tokens of a prompt; a few more or less after decoding and encoding them.
        new_tokens: New tokens of a request, EOS ignored.
        rounds: Rounds, each with prompts of its own, so that no prefix is cached.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    rounds: int


class Request(TypedDict):
    """One request: seconds from sending it to its first text and to its end; ``sent_s`` counts from the first's."""

    prompt_tokens: int
    sent_s: float
    ttft_s: float
    latency_s: float


class Round(TypedDict):
    """One run of the client; ``busy`` is the share of the machine in use just before it."""

    round: int
    busy: float
    requests: list[Request]


class Contender(TypedDict):
    """One server: its start, its greedy ids with their margins (check prompts), its rounds."""

    server: str
    start_s: float
    ids: list[list[int]]
    margins: list[list[float]]
    rounds: list[Round]


def bench_serving(settings: ServeSettings, load: Load, show: Callable[[str], None]) -> dict[str, Any]:
    """Returns the result document: environment, workload, verdict, and every raw sample of both servers.

    Raises:
        ShipwayError: As for :class:`~shipway.serve.server.Server`.
        ServerError: A server or the client broke.
    """
    contenders = [_contend(name, replace(settings, stock=stock), load, show) for name, stock in SERVERS.items()]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench-serve",
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": describe_environment(len(os.sched_getaffinity(0))),
        "workload": {
            "model": settings.model,
            "dtype": "f32",
            "client": "max benchmark",
            "max_batch": settings.max_batch,
            "max_length": settings.max_length,
            "max_batch_input_tokens": settings.max_batch_input_tokens,
            **asdict(load),
        },
        "verdict": judge_agreement(*contenders),
        "servers": contenders,
    }


def judge_agreement(ours: Contender, stock: Contender) -> dict[str, Any]:
    """Judges our greedy tokens against the stock server's: equal, or first apart where the stock one nearly tied."""
    compared, ties, worst = 0, 0, 0.0
    for mine, theirs, margins in zip(ours["ids"], stock["ids"], stock["margins"], strict=True):
        apart = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        compared += len(mine) if apart is None else apart + 1
        if apart is not None:
            ties += 1
            worst = max(worst, margins[apart])
    ok = worst <= NEAR_TIE
    return {"ok": ok, "prompts": len(ours["ids"]), "tokens": compared, "first_apart": ties, "largest_margin": worst}


def _contend(name: str, settings: ServeSettings, load: Load, show: Callable[[str], None]) -> Contender:
    with Server(settings, lambda line: show(f"{name}: {line}")) as server:
        show(f"{name}: checking its answers")
        ids, margins = _answers(server)
        rounds = []
        for number in range(load.rounds):
            show(f"{name}: round {number + 1} of {load.rounds}")
            busy = busy_share()
            rounds.append(Round(round=number, busy=busy, requests=_round(server, load, seed=number + 1)))
        return Contender(server=name, start_s=server.start_s, ids=ids, margins=margins, rounds=rounds)


def _answers(server: Server) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy ids after pieces of the fixed text, and how far the likeliest token led at each of them, in nats."""
    words = files("shipway").joinpath("data/fixed_text.txt").read_text("utf-8").split()
    piece = min(len(words) // _CHECK_PROMPTS, (server.max_length - _CHECK_NEW) // 8)  # no word is eight tokens
    ids, margins = [], []
    for start in range(0, piece * _CHECK_PROMPTS, piece):
        body = {
            "model": server.model,
            "prompt": " ".join(words[start : start + piece]),
            "temperature": 0,
            "max_tokens": _CHECK_NEW,
            "logprobs": 2,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{server.url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
        ids.append(choice["token_ids"])
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        margins.append([top[0] - top[1] if len(top) > 1 else 0.0 for top in tops])
    return ids, margins


def _round(server: Server, load: Load, seed: int) -> list[Request]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {
            "--model": server.model,
            "--tokenizer": str(server.directory),
            "--base-url": server.url.removesuffix("/v1"),
            "--backend": "modular",
            "--endpoint": "/v1/completions",
            "--dataset-name": "random",
            "--num-prompts": load.requests,
            "--max-concurrency": load.concurrency,
            "--random-input-len": load.prompt_tokens,
            "--random-output-len": load.new_tokens,
            "--skip-first-n-requests": 0,
            "--skip-last-n-requests": 0,
            "--temperature": 0,
            "--seed": seed,
            "--result-filename": str(result),
        }
        command = [*maxs_command("benchmark"), *(str(part) for option in options.items() for part in option)]
        command += ["--skip-test-prompt", "--disable-tqdm", "--always-save-result", "--no-collect-gpu-stats"]
        command += ["--no-collect-cpu-stats", "--no-collect-server-stats"]
        done = subprocess.run(
            command,
            cwd=folder,  # it writes files of its own beside the one asked for
            env=os.environ | {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "false"},
            capture_output=True,
            text=True,
            timeout=_CLIENT_TIMEOUT_S,
        )
        if done.returncode or not result.is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ServerError(f"MAX's benchmark client failed (exit code {done.returncode}): {last[:300]}")
        records = json.loads(result.read_text())["request_records"]
    if broken := [record for record in records if not record["success"]]:
        raise ServerError(f"{len(broken)} of {len(records)} requests failed: {broken[0]['error'][:300]}")
    first = min(record["submit_time"] for record in records)
    return [
        Request(
            prompt_tokens=record["prompt_len"],
            sent_s=record["submit_time"] - first,
            ttft_s=record["ttft_ms"] / 1000,
            latency_s=record["latency_ms"] / 1000,
        )
        for record in records
    ]
