"""Floating-point literals: LLVM 24 prints the shortest decimal, ``+qnan`` and ``f0x...``; LLVM 22 wants exact ones."""

from __future__ import annotations

import math
import re
import struct

_LITERAL = re.compile(r"[+-]?(\d+\.\d*(e[+-]?\d+)?|qnan|snan|inf|f0x[0-9A-Fa-f]+)")
_TYPES = {"half", "bfloat", "float", "double"}
_NAN = {"half": "0xH7E00", "bfloat": "0xR7FC0"}


def legible(tokens: list[str]) -> list[str]:
    """Returns the tokens of an instruction with each floating-point literal in a form that LLVM 22 reads.

    The type of a literal is the last floating-point type before it.
    """
    kind = "float"
    out = []
    for token in tokens:
        if token in _TYPES:
            kind = token
        elif token[-1].isalnum() and token[0] in "+-f0123456789" and _LITERAL.fullmatch(token):
            token = _exact(token, kind)
        out.append(token)
    return out


def _exact(token: str, kind: str) -> str:
    if "f0x" in token:
        digits = token.partition("f0x")[2]
        if kind in _NAN:
            return f"0x{'R' if kind == 'bfloat' else 'H'}{digits:0>4}"
        code, bits = ("<f", "<I") if kind == "float" else ("<d", "<Q")
        value: float = struct.unpack(code, struct.pack(bits, int(digits, 16)))[0]
    elif token.endswith("nan"):
        return _NAN.get(kind) or ("0x" + ("F" if token[0] == "-" else "7") + "FF8000000000000")
    else:
        value = float(token)
    if kind == "bfloat":
        (bits32,) = struct.unpack("<I", struct.pack("<f", value))
        return f"0xR{(bits32 + 0x7FFF + (bits32 >> 16 & 1)) >> 16 & 0xFFFF:04X}"
    if kind == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if kind == "float" and math.isfinite(value):
        (value,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
