"""Text to token ids and back, by the checkpoint's own files; chat templates; streaming decode.

Only the ``tokenizers`` library is used: importing transformers for its wrapper costs seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from shipway.errors import ShipwayError
from shipway.model.config import ModelConfig, token_ids
from shipway.model.safetensors_files import read_json

if TYPE_CHECKING:
    from _typeshed import TraceFunction
    from jinja2 import Environment

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a whole character
_TEMPLATE_S = 5.0  # published templates take milliseconds


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes:
        file: Where it comes from.
        backend: The ``tokenizers`` object.
        kind: ``"tokenizer.json"`` or the GGUF tokenizer model and pre-tokenizer (``"gpt2/smollm"``).
        adds_bos: Whether plain text is preceded by the BOS token.
        bos_id: BOS token, or ``None``.
        eos_ids: Every token that ends a sequence, by tokenizer, generation and model configuration together.
        special_tokens: Text of named special tokens for the template (``bos_token`` and the like).
        chat_template: Jinja source, or ``None``.
        chat_template_file: The file :attr:`chat_template` comes from.
    """

    file: Path
    backend: Backend
    kind: str
    adds_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_file: Path | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the ids of ``text``; ``add_bos`` puts BOS first where the checkpoint asks for it.

        Text made by :meth:`chat` holds its own BOS: encode it with ``add_bos=False``.

        Raises:
            ShipwayError: The tokenizer has no token for a part of the text, or is broken.
        """
        with _about(self.file):
            ids = self.backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_bos and self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids`` without special tokens; ids past the vocabulary read as nothing.

        Raises:
            ShipwayError: The tokenizer is broken.
        """
        with _about(self.file):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Returns an incremental decoder for tokens that follow ``prompt``."""
        return TextStream(self, prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders ``[{"role": ..., "content": ...}, ...]`` through the template, up to the assistant's turn.

        Raises:
            ShipwayError: There is no template, or it is broken, refuses the messages or does not come to an end.
        """
        from jinja2 import TemplateError

        if self.chat_template is None:
            raise ShipwayError("this checkpoint has no chat template: pass plain text without --chat")
        try:
            with _time_limit():
                template = _template_environment().from_string(self.chat_template)
                text = template.render(messages=list(messages), add_generation_prompt=True, **self.special_tokens)
            text.encode()  # raises for half a surrogate pair, which is no text
        except Exception as problem:  # a template is a program: it may raise whatever Python raises
            kind = "" if isinstance(problem, TemplateError) else f"{type(problem).__name__}: "
            raise ShipwayError(f"{self.chat_template_file}: the chat template fails: {kind}{problem}") from None
        return text


@contextmanager
def _about(file: Path) -> Iterator[None]:
    """Says of which file's tokenizer the library complains: in bare Exceptions, and in panics, which are none."""
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise ShipwayError(f"{file}: the tokenizer fails: {problem}") from None


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises a TimeoutError in the Python code of the block once this thread has computed in it for too long."""
    end = time.thread_time() + _TEMPLATE_S

    def check(frame: FrameType, event: str, argument: object) -> TraceFunction:
        if time.thread_time() > end:
            raise TimeoutError(f"it does not come to an end within {_TEMPLATE_S:g} s")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


class TextStream:
    """Turns tokens into text as they come, holding back bytes that are not yet a whole character.

    Tokens are decoded together with the few before them, because a decoder may treat the first token of a sequence
    differently (SentencePiece drops its leading space), and only what is new is returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._sent = 0
        for length in range(1, min(len(prompt), 8) + 1):
            if self._restart(list(prompt[-length:])):
                break

    def push(self, token: int) -> str:
        """Adds one token; returns the text that became certain, possibly none."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        if whole == text:
            self._restart([token])
        return new

    def flush(self) -> str:
        """Returns what is still held back: bytes that never became a character, as replacement characters."""
        text = self._decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _restart(self, window: list[int]) -> bool:
        """Continues from ``window`` if it reads as whole characters, so that the work per token stays constant."""
        text = self._decode(window)
        if not text or _REPLACEMENT in text:
            return False
        self._window, self._sent = window, len(text)
        return True


def hf_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """Loads tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a directory.

    Raises:
        ShipwayError: tokenizer.json is missing or damaged, or another file is.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ShipwayError(
            f"{directory} has no tokenizer.json: write one with transformers' AutoTokenizer.save_pretrained"
        )
    with _about(path):
        backend = Backend.from_file(str(path))
    # The file may hold what a batch was once padded or cut to: a prompt is taken whole, as transformers takes it.
    backend.no_padding()
    backend.no_truncation()
    settings = _optional_json(directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    named = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else config.bos_id
    eos = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    try:
        eos += [*token_ids(generation.get("eos_token_id"), "eos_token_id"), *config.eos_ids]
    except ShipwayError as problem:
        raise ShipwayError(f"{directory / 'generation_config.json'}: {problem}") from None
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None:  # then the post-processor in tokenizer.json decides
        with _about(path):
            adds_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    template, template_file = _hf_template(directory, settings)
    return Tokenizer(
        file=path,
        backend=backend,
        kind="tokenizer.json",
        adds_bos=bool(adds_bos),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        special_tokens=named,
        chat_template=template,
        chat_template_file=template_file,
    )


def _hf_template(directory: Path, settings: Mapping[str, Any]) -> tuple[str | None, Path]:
    """Returns the template, if there is one, and the file that holds it or was looked at last."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8"), file
        except (OSError, UnicodeDecodeError) as problem:
            raise ShipwayError(f"cannot read {file}: {problem}") from None
    template, file = settings.get("chat_template"), directory / "tokenizer_config.json"
    if not template:
        file = directory / "chat_template.json"
        template = _optional_json(file).get("chat_template")
    if isinstance(template, list):  # several, each with its name
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise ShipwayError(f"{file}: chat_template must be a text or a list of named texts, not {template!r}")
    return template, file


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_environment() -> Environment:
    """The Jinja sandbox that published chat templates are written for."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 (Jinja declares it an instance variable)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
