"""The tokenizer inside a GGUF file, rebuilt for the ``tokenizers`` library.

``gpt2`` is byte-level BPE with explicit merges; how text is cut before merging is a name (``tokenizer.ggml.pre``).
``llama`` is SentencePiece BPE: pieces carry scores, and two neighbours merge in the order of their result's score.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from shipway.errors import ShipwayError
from shipway.model.gguf_file import GgufFile
from shipway.model.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_WORDS % r"\p{N}{1,3}",)

# Text is cut by each expression in turn, within the pieces the one before left.
_CUTS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_WORDS % r"\p{N}",),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}

# Values of tokenizer.ggml.token_type: unknown and control tokens are never part of the text, user-defined ones are.
_SPECIAL, _USER_DEFINED = (2, 3), 4


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that ``file`` describes, with its BOS, EOS and chat template.

    Raises:
        ShipwayError: The tokenizer model or pre-tokenizer is not supported, or its lists do not fit together.
    """
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    model, tokens = own.get("model"), own.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ShipwayError(f"{file.path} holds no tokenizer")
    pre, template = own.get("pre", "default"), file.metadata.get("tokenizer.chat_template")
    try:
        _check_types(own, template)
        if model == "gpt2":
            backend = _byte_level(own, tokens, pre)
            kind, adds_bos = f"gpt2/{pre}", _CUTS[pre] is _LLAMA3
        elif model == "llama":
            backend = _sentencepiece(own, tokens)
            kind, adds_bos = "llama", True
        else:
            raise ShipwayError(f"tokenizer model {model!r} is not supported: only gpt2 and llama")
        types = own.get("token_type") or []
        for token, type_ in zip(tokens, types, strict=False):
            if type_ in _SPECIAL:
                backend.add_special_tokens([AddedToken(token, normalized=False)])
            elif type_ == _USER_DEFINED:
                backend.add_tokens([AddedToken(token, normalized=False)])
    except ShipwayError as problem:
        raise ShipwayError(f"{file.path}: {problem}") from None

    def token_id(name: str) -> int | None:
        value = own.get(f"{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(key) for name, key in names.items()}
    return Tokenizer(
        file=file.path,
        backend=backend,
        kind=kind,
        adds_bos=bool(own.get("add_bos_token", adds_bos)),
        bos_id=ids["bos_token"],
        eos_ids=tuple(dict.fromkeys(i for i in (ids["eos_token"], token_id("eot"), token_id("eom")) if i is not None)),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
        chat_template=template,
        chat_template_file=file.path,
    )


def _check_types(own: dict[str, Any], template: Any) -> None:
    """Checks that the lists hold what the format defines, which a file may state otherwise."""
    for key, kind in (("tokens", str), ("merges", str), ("scores", float), ("token_type", int)):
        values = own.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ShipwayError(f"tokenizer.ggml.{key} must be a list of {kind.__name__}")
    if not isinstance(own.get("pre", ""), str) or not isinstance(template or "", str):
        raise ShipwayError("tokenizer.ggml.pre and tokenizer.chat_template must be texts")
    unknown = own.get("unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(own["tokens"]):
        raise ShipwayError(f"unknown_token_id {unknown!r} is none of the {len(own['tokens'])} tokens")


def _byte_level(own: dict[str, Any], tokens: list[str], pre: str) -> Backend:
    if pre not in _CUTS:
        raise ShipwayError(f"pre-tokenizer {pre!r} is not supported: only {', '.join(_CUTS)}")
    merges = [tuple(merge.split(" ")) for merge in own.get("merges") or []]
    # Llama 3 takes a word that is a token as it is, even where the merges would not lead to it.
    backend = Backend(_bpe(tokens, merges, ignore_merges=_CUTS[pre] is _LLAMA3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(own: dict[str, Any], tokens: list[str]) -> Backend:
    scores = own.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ShipwayError(f"the tokenizer has {len(tokens)} tokens but not as many scores")
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = [
        (-score, i, ids[token[:cut]], ids[token[cut:]])
        for i, (token, score) in enumerate(zip(tokens, scores, strict=True))
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    merges = [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]
    unknown = own.get("unknown_token_id", 0)
    options = {"unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    backend = Backend(_bpe(tokens, merges, **options))
    prefix = own.get("add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> BPE:
    try:
        return BPE({token: i for i, token in enumerate(tokens)}, merges, **options)
    except Exception as problem:  # the library raises bare Exception for a merge of unknown tokens
        reason = str(problem).splitlines()[0]
        raise ShipwayError(f"the tokenizer's vocabulary and merges do not fit together: {reason}") from None
