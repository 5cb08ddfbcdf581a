import itertools

import pytest

from shipway.streaming import Token, TokenStream

PIECES = ["The", " end", " of", " the", " story", "."]


class Decoder:
    """Puts out one given piece per id, and ``rest`` at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._rest


def stream(pieces: list[str], stop: list[str], finish: str = "length", rest: str = "") -> list[Token]:
    tokens = TokenStream(Decoder(pieces, rest), stop)
    out: list[Token] = []
    for token in range(len(pieces)):
        out += tokens.push(token, finish if token == len(pieces) - 1 else None)
        if out and out[-1].finish == "stop":
            break
    return out


def text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_without_stop_strings_every_token_is_released_at_once() -> None:
    tokens = TokenStream(Decoder(PIECES), [])
    for token, piece in enumerate(PIECES):
        assert tokens.push(token, None) == [Token(token, piece)]


def test_last_token_carries_the_reason() -> None:
    assert [token.finish for token in stream(PIECES, [])] == [None] * 5 + ["length"]
    ended = stream([*PIECES, "</s>"], [], finish="eos")
    assert text(ended) == "".join(PIECES)  # EOS is a token without text
    assert ended[-1] == Token(6, "", "eos")


def test_bytes_that_never_became_a_character_come_with_the_last_token() -> None:
    assert text(stream(PIECES, [], rest="\ufffd")) == "".join(PIECES) + "\ufffd"


@pytest.mark.parametrize("stop", ["story", "d of t", " o", "The", ".", "e"])
def test_text_ends_before_a_stop_string_even_across_tokens(stop: str) -> None:
    tokens = stream(PIECES, [stop])
    assert text(tokens) == "".join(PIECES).partition(stop)[0]
    assert tokens[-1].finish == "stop"
    assert [token.id for token in tokens] == list(range(len(tokens)))


def test_earliest_of_several_stop_strings_wins() -> None:
    assert text(stream(PIECES, ["story", " of", "the"])) == "The end"


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    tokens = TokenStream(Decoder(["a", "b", "x", "a", "b", "c"]), ["abc"])
    assert tokens.push(0, None) == []
    assert tokens.push(1, None) == []
    assert text(tokens.push(2, None)) == "abx"
    assert tokens.push(3, None) == []
    assert tokens.push(4, None) == []
    assert tokens.push(5, None) == [Token(3, ""), Token(4, ""), Token(5, "", "stop")]


def test_held_text_is_released_when_generation_ends() -> None:
    assert text(stream(["x", "a", "b"], ["abc"])) == "xab"
    assert text(stream(["x", "a", "b", "</s>"], ["abc"], finish="eos")) == "xab"


def test_any_split_into_tokens_gives_the_same_text() -> None:
    whole, stops = "aabaabaaab", ["aaab", "bb"]
    for cuts in itertools.product([0, 1], repeat=len(whole) - 1):
        pieces, piece = [], whole[0]
        for letter, cut in zip(whole[1:], cuts, strict=True):
            if cut:
                pieces.append(piece)
                piece = ""
            piece += letter
        pieces.append(piece)
        assert text(stream(pieces, stops)) == "aabaab"
