"""``shipway generate``."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from shipway.cli.options import Device, Json, Model, Threads, Weights
from shipway.errors import CannotRunError, ShipwayError
from shipway.measure.environment import describe_environment
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.model.resolve import DEFAULT_MODEL
from shipway.routes.catalogue import ROUTES

ALL = "all"


def read_prompt(text: str | None, file: Path | None) -> str:
    """Returns the prompt given as text or in a file (``-``: standard input), as it is.

    Raises:
        ShipwayError: Not exactly one is given, or the file cannot be read as UTF-8.
    """
    if (text is None) == (file is None):
        raise ShipwayError("give either --prompt TEXT or --prompt-file FILE")
    if text is not None:
        return text
    assert file is not None
    if str(file) == "-" and sys.stdin is None:
        raise ShipwayError("standard input is closed: there is no prompt to read")
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ShipwayError(f"cannot read {file}: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShipwayError(f"{file} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from None


def first_difference(sequences: list[list[int]]) -> int | None:
    """Returns the first index at which the sequences are not all equal, ``None`` if they are the same."""
    longest = max(map(len, sequences))
    for index in range(longest):
        if len({sequence[index] if index < len(sequence) else None for sequence in sequences}) > 1:
            return index
    return None


def top_two(logits: np.ndarray) -> dict[str, Any]:
    """Returns ids and logits of the two largest of ``logits [V]``, and their margin."""
    first, second = np.argsort(-logits, kind="stable")[:2]
    return {
        "ids": [int(first), int(second)],
        "logits": [float(logits[first]), float(logits[second])],
        "margin": float(logits[first]) - float(logits[second]),
    }


def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Take the prompt from this UTF-8 file, as it is; - is standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_new: Annotated[int, typer.Option(help="Most new tokens.")] = 128,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the most probable token; so it is without --temperature.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0 takes all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens whose mass reaches p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    model: Model = DEFAULT_MODEL,
    route: Annotated[
        str | None, typer.Option(help="A route, or `all` to compare every route.", show_default="mojo-graph")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Activation dtype.", show_default="f32")] = None,
    weights: Weights = None,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Stream text from a prompt, through one route or through all of them.

    With `--route all` the ids of the routes are compared: they are the same, or the first divergent token is shown
    with the margin between the two largest logits of each route there. Exits with 1 when a route breaks.
    """
    from shipway.api import (
        check_context,
        check_names,
        check_sampling,
        check_text,
        check_threads,
        encode_prompt,
        find_route,
        load,
    )
    from shipway.client import CacheFullError
    from shipway.compiled import read_compiled
    from shipway.model.checkpoint import open_checkpoint
    from shipway.model.resolve import resolve

    threads = check_threads(threads)
    check_sampling(max_new, greedy, temperature, top_k, top_p, seed, stop or [])
    content = check_text("the prompt", read_prompt(prompt, prompt_file))
    compiled = read_compiled(resolve(model))
    if compiled is not None:  # it brings its own; load refuses others by name
        route = compiled.route if route is None else route
        dtype = compiled.dtype if dtype is None else dtype
        weights = compiled.weights if weights is None else weights
    route, dtype = "mojo-graph" if route is None else route, "f32" if dtype is None else dtype
    weights = dtype if weights is None else weights
    names = list(ROUTES) if route == ALL else [find_route(route).name]
    check_names(dtype, weights, device)
    options: dict[str, Any] = {
        "chat": chat,
        "max_new": max_new,
        "greedy": greedy,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
    }
    checkpoint = open_checkpoint(resolve(model))
    tokens = encode_prompt(checkpoint.tokenizer, content, chat)
    check_context(len(tokens), max_new, checkpoint.config.max_position_embeddings)
    context = len(tokens) + max_new
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = {}
        for name in names:
            record: dict[str, Any] = {"route": name, "status": "ok", "reason": None}
            record |= {"ids": [], "text": "", "finish": None}
            records.append(record)
            if route == ALL:
                print(f"== {name} {dtype}")
            try:
                running[name] = stack.enter_context(
                    load(checkpoint.path, name, dtype, weights, device, threads, context)
                )
                for token in running[name].generate(content, **options):
                    record["ids"].append(token.id)
                    record["text"] += token.text
                    record["finish"] = token.finish
                    print(token.text, end="", flush=True)
                print()
            except ShipwayError as error:
                if route != ALL or isinstance(error, CacheFullError):
                    raise
                absent = isinstance(error, CannotRunError) or (compiled is not None and name != compiled.route)
                record["status"] = "not run" if absent else "failed"
                record["reason"] = str(error)
                running.pop(name, None)
                print(f"{record['status']}: {error}")
        finished = [record for record in records if record["status"] == "ok"]
        divergence = None
        if len(finished) > 1:
            at = first_difference([record["ids"] for record in finished])
            if at is not None:
                common = finished[0]["ids"][:at]
                divergence = {
                    "index": at,
                    "routes": {
                        record["route"]: {
                            "id": record["ids"][at] if at < len(record["ids"]) else None,
                            "top_2": top_two(running[record["route"]].logits_after(tokens, common)),
                        }
                        for record in finished
                    },
                }
    if route == ALL:
        _print_comparison(finished, divergence)
    if json is not None:
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": "generate",
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "environment": describe_environment(threads),
            "model": model,
            "dtype": dtype,
            "weights": weights,
            "prompt": content,
            "prompt_ids": tokens,
            "options": options,
            "routes": records,
            "same_ids": divergence is None if len(finished) > 1 else None,
            "divergence": divergence,
        }
        write_json(json, document)
    if any(record["status"] == "failed" for record in records):
        raise typer.Exit(1)
    if not finished:
        raise typer.Exit(3)


def _print_comparison(finished: list[dict[str, Any]], divergence: dict[str, Any] | None) -> None:
    if len(finished) < 2:
        print(f"nothing to compare: {len(finished)} route(s) ran")
    elif divergence is None:
        print(f"same {len(finished[0]['ids'])} ids from {', '.join(record['route'] for record in finished)}")
    else:
        print(f"first divergent token: new token {divergence['index'] + 1}")
        for name, side in divergence["routes"].items():
            top = side["top_2"]
            print(f"  {name} chose {side['id']}; its top two {top['ids']} lie {top['margin']:.3g} apart in logits")
