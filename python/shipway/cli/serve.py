"""``shipway serve``."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from shipway.cli.progress import progress
from shipway.model.resolve import DEFAULT_MODEL

MaxBatch = Annotated[int, typer.Option(help="Sequences in a batch.", min=1, max=4096)]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Prompt and new tokens of a sequence together; 4096 or the model's own limit if not given.", min=2
    ),
]
MaxBatchInputTokens = Annotated[
    int, typer.Option(help="Prompt tokens of a step: a longer prompt is read in chunks.", min=1)
]


class _Terminated(BaseException):
    """SIGTERM, as an exception that unwinds to the server's end."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def serve(
    model: Annotated[str, typer.Argument(help="Hugging Face directory, GGUF file, or a model name.")] = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = 8000,
    max_batch: MaxBatch = 8,
    max_length: MaxLength = None,
    max_batch_input_tokens: MaxBatchInputTokens = 2048,
) -> None:
    """Serve a model with MAX's own server, our graph and kernels in it: an OpenAI endpoint, f32 on CPU.

    MAX's server takes neither bf16 nor f16 on a CPU: such a checkpoint is served in f32. Runs until Ctrl-C or SIGTERM.
    """
    from shipway.serve.server import Server, ServeSettings

    settings = ServeSettings(model, host, port, max_batch, max_length, max_batch_input_tokens)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with progress() as show:
            server = Server(settings, show)
        with server:
            print(
                f"serving {model} at {server.url}, up to {max_batch} sequences of {server.max_length} tokens, f32, "
                f"ready after {server.start_s:.0f} s; log: {server.log}",
                flush=True,
            )
            server.wait()
    except _Terminated:
        print("shipway: stopped", file=sys.stderr)
