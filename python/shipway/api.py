"""The Python interface: ``shipway.load(...)`` returns a :class:`Model`, whose ``generate`` yields tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shipway.client import Worker
from shipway.compiled import read_compiled
from shipway.errors import CannotRunError, ShipwayError
from shipway.model.checkpoint import Checkpoint, open_checkpoint
from shipway.model.resolve import resolve
from shipway.model.tokenizer import Tokenizer
from shipway.routes.catalogue import ROUTES
from shipway.routes.route import RouteInfo, RunSpec
from shipway.sampler import Sampling
from shipway.streaming import Token, TokenStream
from shipway.worker import available_cpus

DEFAULT_CONTEXT = 4096  # tokens of KV cache when max_context is not given and the model allows more
Message = dict[str, str]


_DEVICE = re.compile(r"cpu|(cuda|hip)(:\d+)?")


def find_route(name: str) -> RouteInfo:
    """Returns the route called ``name``.

    Raises:
        ShipwayError: There is none.
    """
    if not isinstance(name, str) or name not in ROUTES:
        raise ShipwayError(f"no route is called {name!r}: choose one of {', '.join(ROUTES)}")
    return ROUTES[name]


def check_names(dtype: str, weights: str, device: str) -> None:
    """Raises a :class:`ShipwayError` for a dtype, weight format or device that no route knows."""
    for what, name, known in (
        ("dtype", dtype, {known for info in ROUTES.values() for known in info.dtypes}),
        ("weight format", weights, {known for info in ROUTES.values() for known in info.weight_formats}),
    ):
        if not isinstance(name, str) or name not in known:
            raise ShipwayError(f"no route has a {what} {name!r}: choose one of {', '.join(sorted(known))}")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ShipwayError(f"no device is called {device!r}: choose cpu, cuda, cuda:N, hip or hip:N")


def check_whole(name: str, value: int, least: int) -> int:
    """Returns ``value`` as an ``int``; raises a :class:`ShipwayError` unless it is a whole number >= ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ShipwayError(f"{name} must be a whole number >= {least}, not {value!r}")
    return int(value)


def check_text(what: str, text: str) -> str:
    """Returns ``text``; raises a :class:`ShipwayError` unless it is a ``str`` that UTF-8 can encode."""
    if not isinstance(text, str):
        raise ShipwayError(f"{what} must be text, not {text!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ShipwayError(f"{what} is not Unicode text: character {error.start} is {text[error.start]!a}") from None
    return text


def check_sampling(
    max_new: int, greedy: bool, temperature: float, top_k: int, top_p: float, seed: int, stop: Sequence[str]
) -> Sampling:
    """Checks what :meth:`Model.generate` takes besides the prompt; needs no model.

    Raises:
        ShipwayError: An argument is out of range, with its value.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if greedy and temperature:
        raise ShipwayError(f"greedy and temperature {temperature} exclude each other: give one")
    check_whole("max-new", max_new, 1)
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise ShipwayError(f"stop takes a list of non-empty strings, not {stop!r}")
    for text in stop:
        check_text("a stop string", text)
    return sampling


def check_context(prompt_tokens: int, new_tokens: int, max_context: int) -> None:
    """Raises a :class:`ShipwayError` with the numbers when prompt and new tokens do not fit the KV cache."""
    if prompt_tokens + new_tokens > max_context:
        raise ShipwayError(
            f"prompt of {prompt_tokens} tokens + {new_tokens} new = {prompt_tokens + new_tokens} tokens do not fit"
            f" a context of {max_context}: shorten the prompt or ask for fewer new tokens"
        )


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message], chat: bool) -> list[int]:
    """Returns the prompt's ids.

    Args:
        tokenizer: The checkpoint's own.
        prompt: Text, or chat messages (``{"role": ..., "content": ...}``), which go through the chat template.
        chat: Whether a text prompt goes through the template too, as the user's message.

    Raises:
        ShipwayError: The prompt is neither text nor messages, has no tokens, or the checkpoint has no chat template.
    """
    if isinstance(prompt, str) and not chat:
        tokens = tokenizer.encode(check_text("the prompt", prompt), add_bos=True)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
        for message in messages:
            check_text("the prompt", message["content"])
        tokens = tokenizer.encode(tokenizer.chat(messages), add_bos=False)  # the template writes its own BOS
    if not tokens:
        raise ShipwayError("the prompt has no tokens: give it some text")
    return tokens


def _messages(prompt: Sequence[Message]) -> list[Message]:
    if not isinstance(prompt, list | tuple):
        raise ShipwayError(f"the prompt must be text or a list of messages, not {prompt!r}")
    if not prompt:
        raise ShipwayError("the prompt has no messages: give at least one")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ShipwayError(f'a message is {{"role": TEXT, "content": TEXT}}, not {message!r}')
    return list(prompt)


class Model:
    """A checkpoint served by one route in its own process. A context manager; made by :func:`load`."""

    def __init__(self, checkpoint: Checkpoint, info: RouteInfo, spec: RunSpec) -> None:
        """Starts the route's worker and loads ``checkpoint`` there; raises as :func:`load`."""
        self.config = checkpoint.config
        self.tokenizer = checkpoint.tokenizer
        self.route = info.name
        self.max_context = spec.max_context
        self._worker = Worker(info, spec.threads)
        try:
            self.prepared = self._worker.prepare(spec)
        except BaseException:
            self._worker.close()
            raise

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        chat: bool = False,
        max_new: int = 128,
        greedy: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[Token]:
        """Continues ``prompt``; yields tokens as they are chosen, the last one with ``finish`` set.

        Args:
            prompt: Text, or chat messages (``{"role": ..., "content": ...}``).
            chat: Whether a text prompt goes through the chat template.
            max_new: Most new tokens.
            greedy: Always the most probable token, as temperature 0 does; refuses a temperature.
            temperature: Divides the logits before sampling; 0 is greedy.
            top_k: Sample among the k most probable tokens, 0 for all.
            top_p: Sample among the most probable tokens whose mass reaches p.
            seed: Seed of the sampler.
            stop: Generation ends before the first of these strings; text that may begin one is held back.

        Raises:
            ShipwayError: An argument is out of range, the tokens do not fit the context, or the model is closed;
                before anything runs.
            WorkerError: The route broke, while iterating; after it died every call raises why.
        """
        self._worker.check_usable()
        sampling = check_sampling(max_new, greedy, temperature, top_k, top_p, seed, stop)
        tokens = encode_prompt(self.tokenizer, prompt, chat)
        check_context(len(tokens), max_new, self.max_context)
        return self._stream(tokens, int(max_new), sampling, stop)

    def logits_after(self, prompt: Sequence[int], continuation: Sequence[int]) -> np.ndarray:
        """Returns the logits, float32 ``[vocab_size]``, that follow ``prompt`` and ``continuation``.

        They are computed as :meth:`generate` computes them: one prefill of the prompt, one decode per further id.

        Raises:
            ShipwayError: There is no prompt, an id is none of the vocabulary, or they do not fit the context.
            WorkerError: The route broke.
        """
        given, further = self._ids(prompt), self._ids(continuation)
        if not given:
            raise ShipwayError("the prompt has no tokens: give at least one")
        check_context(len(given), len(further), self.max_context)
        self._worker.call("reset")
        self._worker.call("prefill", tokens=[given])
        for token in further:
            self._worker.call("decode", tokens=[token])
        logits: np.ndarray = self._worker.call("logits")[0]
        return logits

    def _ids(self, tokens: Iterable[int]) -> list[int]:
        if not isinstance(tokens, Iterable):
            raise ShipwayError(f"token ids come as a list, not {tokens!r}")
        ids = [check_whole("a token id", token, 0) for token in tokens]
        for token in ids:
            if token >= self.config.vocab_size:
                raise ShipwayError(f"a token id must be below {self.config.vocab_size}, not {token}")
        return ids

    def close(self) -> None:
        """Ends the route's process; another thread that generates meanwhile is told so."""
        self._worker.close()

    def _stream(self, tokens: list[int], max_new: int, sampling: Sampling, stop: Sequence[str]) -> Iterator[Token]:
        vocab = min(self.tokenizer.vocab_size, self.config.vocab_size)
        stream = TokenStream(self.tokenizer.stream(tokens), stop)
        chosen = self._worker.generate(tokens, max_new, vocab, list(self.tokenizer.eos_ids), sampling)
        with closing(chosen):
            for token, finish in chosen:
                released = stream.push(token, finish)
                stopped = bool(released) and released[-1].finish == "stop"
                if stopped:  # before the last token is taken: then the model is free
                    chosen.close()
                yield from released
                if stopped:
                    return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    path_or_name: str | Path,
    route: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    max_context: int | None = None,
) -> Model:
    """Loads a checkpoint for one route.

    Args:
        path_or_name: Hugging Face directory, GGUF file, a model name, or a directory made by ``shipway compile``, which
            starts without compiling and brings its own route, dtype and weights.
        route: A route of ``shipway routes``, by default ``"mojo-graph"``.
        dtype: Activations and KV cache, ``"f32"`` (the default) or ``"bf16"``.
        weights: Storage format of the matrices, by default ``dtype``.
        device: ``"cpu"``.
        threads: CPU threads, by default every CPU this process may use.
        max_context: Tokens of KV cache, prompt and new ones together; by default the model's own, at most 4096.

    Raises:
        ShipwayError: The model, route or arguments are not usable.
        CannotRunError: The route cannot run here; the message says what would make it run.
        WorkerError: The route broke while loading.
    """
    if not isinstance(path_or_name, str | Path) or not str(path_or_name):
        raise ShipwayError(f"a model is the path of a checkpoint or a name, not {path_or_name!r}")
    threads = check_threads(threads)
    if max_context is not None:
        max_context = check_whole("max_context", max_context, 1)
    if route is not None:
        find_route(route)
    check_names("f32" if dtype is None else dtype, "f32" if weights is None else weights, device)
    path = resolve(path_or_name)
    compiled = read_compiled(path)
    if compiled is not None:
        for key, asked in (("route", route), ("dtype", dtype), ("weights", weights)):
            if asked not in (None, getattr(compiled, key)):
                raise ShipwayError(f"{path} was compiled for {key} {getattr(compiled, key)}, not {asked}")
        route, dtype, weights = compiled.route, compiled.dtype, compiled.weights
    route, dtype = "mojo-graph" if route is None else route, "f32" if dtype is None else dtype
    weights = dtype if weights is None else weights
    info = find_route(route)
    if (reason := info.why_not(dtype, weights, device)) is not None:
        raise CannotRunError(f"{route} {reason}")
    checkpoint = open_checkpoint(path)
    limit = checkpoint.config.max_position_embeddings
    max_context = min(limit, DEFAULT_CONTEXT) if max_context is None else max_context
    if max_context > limit:
        raise ShipwayError(f"a context of {max_context} tokens exceeds the model's {limit}")
    spec = RunSpec(
        model=str(checkpoint.path),
        dtype=dtype,
        weights=weights,
        device=device,
        threads=threads,
        max_context=max_context,
        compiled=compiled.artefact if compiled else None,
    )
    with ThreadPoolExecutor(1) as pool:
        # The files are checked while the worker loads them: its own complaints, such as an edited setting, come first.
        checked = None if compiled is None else pool.submit(compiled.check)
        model = Model(checkpoint, info, spec)
        try:
            if checked is not None:
                checked.result()
        except BaseException:
            model.close()
            raise
    return model


def check_threads(threads: int | None) -> int:
    """Returns ``threads``, by default every CPU this process may use.

    Raises:
        ShipwayError: More than that are asked for, or fewer than one.
    """
    available = available_cpus()
    if threads is None:
        return available
    if check_whole("threads", threads, 1) > available:
        raise ShipwayError(f"{threads} threads asked for, this process may use 1 to {available}")
    return threads
