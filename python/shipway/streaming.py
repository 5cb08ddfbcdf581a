"""Turns chosen ids into tokens with text, and ends at stop strings even when one straddles tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: Its id.
        text: The text it adds; empty while a character is incomplete and beyond a stop string.
        finish: On the last token why generation ended: ``"eos"``, ``"length"`` or ``"stop"``; else ``None``.
    """

    id: int
    text: str
    finish: str | None = None


class Decoder(Protocol):
    """Decodes ids one by one (``shipway.model.tokenizer``'s stream)."""

    def push(self, token: int, /) -> str:
        """Returns the text that ``token`` completes."""

    def flush(self) -> str:
        """Returns the text of bytes that never became a whole character."""


class TokenStream:
    """Releases tokens as soon as no stop string can begin in their text."""

    def __init__(self, decoder: Decoder, stop: Iterable[str]) -> None:
        """Starts a sequence that ends before the first of the non-empty ``stop`` strings."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held: list[Token] = []

    def push(self, token: int, finish: str | None) -> list[Token]:
        """Adds an id; returns the tokens that are now certain. The last of a sequence carries ``finish``."""
        piece = "" if finish == "eos" else self._decoder.push(token)
        if finish is not None:
            piece += self._decoder.flush()
        self._held.append(Token(token, piece, finish))
        text = "".join(held.text for held in self._held)
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            return self._cut(min(found))
        if finish is not None:
            return self._release(len(text))
        return self._release(len(text) - self._possible_stop(text))

    def _possible_stop(self, text: str) -> int:
        """Returns the length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, limit: int) -> list[Token]:
        """Releases the tokens whose whole text lies before ``limit``."""
        end, count = 0, 0
        for held in self._held:
            end += len(held.text)
            if end > limit:
                break
            count += 1
        released, self._held = self._held[:count], self._held[count:]
        return released

    def _cut(self, at: int) -> list[Token]:
        """Releases everything held, its text cut at ``at``, as the end of the sequence."""
        released = []
        for held in self._held:
            released.append(replace(held, text=held.text[: max(at, 0)], finish=None))
            at -= len(held.text)
        released[-1] = replace(released[-1], finish="stop")
        self._held = []
        return released
