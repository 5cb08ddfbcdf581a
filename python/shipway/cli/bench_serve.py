"""``shipway bench-serve``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shipway.cli.options import Json
from shipway.cli.progress import progress
from shipway.cli.serve import MaxBatch, MaxBatchInputTokens, MaxLength
from shipway.errors import ShipwayError
from shipway.measure.result import write_json
from shipway.model.resolve import DEFAULT_MODEL


def bench_serve(
    model: Annotated[str, typer.Argument(help="Hugging Face directory, GGUF file, or a model name.")] = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(help="Requests of a round.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Random tokens of a prompt.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="New tokens of a request, EOS ignored.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; 3 or more give intervals.", min=1)] = 3,
    port: Annotated[int, typer.Option(help="TCP port of the servers.", min=1, max=65535)] = 8000,
    max_batch: MaxBatch = 8,
    max_length: MaxLength = 1024,
    max_batch_input_tokens: MaxBatchInputTokens = 2048,
    json: Json = None,
) -> None:
    """Time our architecture against MAX's own, one after the other behind MAX's server, under the same requests.

    Exits with 1 when their greedy tokens differ by more than near-ties.
    """
    from shipway.measure.serving import Load, bench_serving
    from shipway.report.serving import print_serving
    from shipway.serve.server import ServeSettings

    # What a decoded random prompt grows by when it is encoded again stays well below a quarter.
    if max_length is not None and prompt_tokens * 5 // 4 + new_tokens > max_length:
        raise ShipwayError(f"{prompt_tokens} prompt and {new_tokens} new tokens do not fit --max-length {max_length}")
    settings = ServeSettings(
        model, port=port, max_batch=max_batch, max_length=max_length, max_batch_input_tokens=max_batch_input_tokens
    )
    with progress() as show:
        result = bench_serving(settings, Load(requests, concurrency, prompt_tokens, new_tokens, rounds), show)
    if json is not None:
        write_json(json, result)
    print_serving(result, sys.stdout)
    raise typer.Exit(0 if result["verdict"]["ok"] else 1)
