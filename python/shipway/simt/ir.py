"""A line-based parser of LLVM's textual IR: as much of it as retargeting device code needs.

An instruction is a list of tokens. Brackets may span lines (``switch``), nothing else does. The parser keeps what it
does not know, and refuses what it would have to guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shipway.errors import ShipwayError

Tokens = list[str]

# A string, a quoted name, a word, name or number with its sign and exponent, a bracket or sign; comments are none.
_TOKEN = re.compile(r'(c?"[^"]*"|[%@]"[^"]*"|[%@!#+]?[\w.$-]+(?:\+\d+)?|[()\[\]{}<>,=:*|!])|/\*.*?\*/|;.*')
_OPENING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_CLOSING = {closing: opening for opening, closing in _OPENING.items()}
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8, "ptr": 8}
_CALL_PREFIXES = ("tail", "musttail", "notail")
# What may stand between the type and the value of an argument; those in _MEASURED take a number or a bracket.
_ATTRIBUTES = {"noundef", "immarg", "nonnull", "nofree", "nosync", "readnone", "readonly", "writeonly", "zeroext"}
_ATTRIBUTES |= {"signext", "noalias", "inreg", "returned", "writable", "nocapture", "dead_on_unwind", "dead_on_return"}
_MEASURED = {"align", "captures", "dereferenceable", "dereferenceable_or_null", "initializes", "nofpclass", "range"}


def tokens_of(line: str) -> Tokens:
    """Splits a line of IR; a comment gives none."""
    return [token for token in _TOKEN.findall(line) if token]


def closing(tokens: Sequence[str], start: int) -> int:
    """Returns where the bracket that opens at ``start`` closes."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += (tokens[index] in _OPENING) - (tokens[index] in _CLOSING)
        if depth == 0:
            return index
    raise ShipwayError(f"device IR: no closing bracket in {' '.join(tokens)}")


def opening(tokens: Sequence[str], end: int) -> int:
    """Returns where the bracket that closes at ``end`` opens."""
    depth = 0
    for index in range(end, -1, -1):
        depth += (tokens[index] in _CLOSING) - (tokens[index] in _OPENING)
        if depth == 0:
            return index
    raise ShipwayError(f"device IR: no opening bracket in {' '.join(tokens)}")


def split(tokens: Sequence[str]) -> list[Tokens]:
    """Splits tokens at the commas outside of brackets."""
    parts: list[Tokens] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts if tokens else []


def type_end(tokens: Sequence[str], start: int = 0) -> int:
    """Returns where the type that begins at ``start`` is over, the address space of a pointer included."""
    end = closing(tokens, start) + 1 if tokens[start] in _OPENING else start + 1
    if end < len(tokens) and tokens[end] == "addrspace":
        end = closing(tokens, end + 1) + 1
    return end


def type_size(tokens: Sequence[str]) -> int:
    """Returns the bytes of a type in memory.

    Raises:
        ShipwayError: Not a number, a pointer, or an array or vector of them.
    """
    if tokens[0] in ("<", "["):
        return int(tokens[1]) * type_size(tokens[3 : closing(tokens, 0)])
    if tokens[0] not in _SIZES:
        raise ShipwayError(f"device IR: no size is known of the type {' '.join(tokens)}")
    return _SIZES[tokens[0]]


def address_space(tokens: Sequence[str]) -> int:
    """Returns the address space of a pointer type, 0 where none is written."""
    return int(tokens[3]) if tokens[1:2] == ["addrspace"] else 0


def typed_value(tokens: Sequence[str]) -> tuple[Tokens, Tokens]:
    """Splits an argument into its type and its value; attributes between them are left out."""
    end = start = type_end(tokens)
    while start < len(tokens):
        if tokens[start] in _MEASURED:
            start = closing(tokens, start + 1) + 1 if tokens[start + 1] == "(" else start + 2
        elif tokens[start] in _ATTRIBUTES:
            start += 1
        else:
            break
    return list(tokens[:end]), list(tokens[start:])


@dataclass(frozen=True)
class Call:
    """A call as an instruction has it.

    Attributes:
        callee: ``"@name"``; for inline assembly its template.
        is_asm: Whether it is inline assembly.
        returns: Type of the result.
        arguments: Type and value of each argument.
    """

    callee: str
    is_asm: bool
    returns: Tokens
    arguments: list[tuple[Tokens, Tokens]]


@dataclass(frozen=True)
class Access:
    """A load or store as an instruction has it.

    Attributes:
        kind: ``"load"`` or ``"store"``.
        atomic: Whether it is atomic.
        volatile: Whether it is volatile.
        type: What is loaded or stored.
        pointer: Type and value of the address.
        align: Bytes that the address is promised to be a multiple of.
    """

    kind: str
    atomic: bool
    volatile: bool
    type: Tokens
    pointer: tuple[Tokens, Tokens]
    align: int


@dataclass
class Instruction:
    """An instruction, its metadata taken off.

    Attributes:
        tokens: The whole instruction.
        location: Number of its debug location, ``None`` without.
        opcode: Its opcode, ``"call"`` for tail calls too.
        result: Name of its result, ``None`` without.
    """

    tokens: Tokens
    location: int | None = None
    opcode: str = field(init=False)
    result: str | None = field(init=False)

    def __post_init__(self) -> None:
        start = 2 if self.tokens[1:2] == ["="] else 0
        self.result = self.tokens[0] if start else None
        while self.tokens[start] in _CALL_PREFIXES:
            start += 1
        self.opcode = self.tokens[start]
        self._operands = start + 1

    def call(self) -> Call:
        """Returns the call that a ``call`` makes.

        Raises:
            ShipwayError: It calls through a pointer.
        """
        tokens = self.tokens
        at = next((i for i in range(self._operands, len(tokens)) if tokens[i][0] == "@" or tokens[i] == "asm"), None)
        if at is None or (tokens[at] != "asm" and tokens[at + 1 : at + 2] != ["("]):
            raise ShipwayError(f"device IR: calls through pointers are not simulated: {' '.join(tokens)}")
        returns_end = at - 1
        returns_start = opening(tokens, returns_end) if tokens[returns_end] in _CLOSING else returns_end
        if tokens[returns_start] == "(":  # a pointer's address space
            returns_start -= 2
        is_asm = tokens[at] == "asm"
        callee = tokens[at]
        if is_asm:
            at = next(i for i in range(at, len(tokens)) if tokens[i][0] == '"')
            callee = tokens[at].strip('"')
            at += 2  # the comma and the constraints
        inside = tokens[at + 2 : closing(tokens, at + 1)]
        arguments = [typed_value(part) for part in split(inside)]
        return Call(callee, is_asm, tokens[returns_start : returns_end + 1], arguments)

    def access(self) -> Access:
        """Returns the access that a ``load`` or ``store`` makes."""
        words = self.tokens[self._operands :]
        flags = set()
        while words[0] in ("atomic", "volatile"):
            flags.add(words.pop(0))
        first, second, *rest = split(words)
        align = next((int(part[1]) for part in rest if part[0] == "align"), 1)
        kind = first[: type_end(first)]
        return Access(self.opcode, "atomic" in flags, "volatile" in flags, kind, _address(second), align)

    def atomic_pointer(self) -> tuple[Tokens, Tokens]:
        """Returns type and value of the address that ``atomicrmw`` or ``cmpxchg`` changes."""
        first = split(self.tokens[self._operands :])[0]
        return _address(first[first.index("ptr") :])

    def ordering(self) -> tuple[str, str]:
        """Returns the scope of an atomic instruction or fence, ``""`` the whole system, and its strongest ordering."""
        scope = next((self.tokens[i + 2].strip('"') for i, t in enumerate(self.tokens) if t == "syncscope"), "")
        return scope, max((t for t in self.tokens if t in ORDERINGS), key=list(ORDERINGS).index)


ORDERINGS = {"unordered": 0, "monotonic": 0, "acquire": 1, "release": 2, "acq_rel": 3, "seq_cst": 3}
"""Bit 0: acquires, bit 1: releases."""


def _address(tokens: Sequence[str]) -> tuple[Tokens, Tokens]:
    """Type and value of an address, before whatever follows it."""
    end = type_end(tokens)
    after = next(
        (i for i in range(end, len(tokens)) if tokens[i] in ORDERINGS or tokens[i] == "syncscope"), len(tokens)
    )
    return list(tokens[:end]), list(tokens[end:after])


@dataclass(frozen=True)
class Global:
    """A variable of the module.

    Attributes:
        name: Its name, ``@`` included.
        space: Its address space.
        type: Its type.
        constant: Whether it can never change.
        value: Its initial value, empty without.
        align: Bytes its address is a multiple of.
    """

    name: str
    space: int
    type: Tokens
    constant: bool
    value: Tokens
    align: int


@dataclass(frozen=True)
class Function:
    """A function that the module defines.

    Attributes:
        name: Its name, ``@`` included.
        kernel: Whether the host launches it.
        returns: Type of its result.
        parameters: Type and name of each parameter.
        body: Its instructions and labels, in order; a label is a string.
    """

    name: str
    kernel: bool
    returns: Tokens
    parameters: list[tuple[Tokens, Tokens]]
    body: list[Instruction | str]

    def instructions(self) -> Iterator[Instruction]:
        """Yields the instructions without the labels."""
        return (line for line in self.body if isinstance(line, Instruction))


@dataclass
class Module:
    """A parsed module.

    Attributes:
        globals: Its variables.
        declared: Name of each declared function, ``@`` included, with the types of result and parameters.
        functions: The functions it defines.
        metadata: The tokens of each numbered metadata line.
    """

    globals: list[Global] = field(default_factory=list)
    declared: dict[str, tuple[Tokens, list[Tokens]]] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    metadata: dict[int, Tokens] = field(default_factory=dict)

    @property
    def kernel(self) -> Function:
        """The one kernel of the module.

        Raises:
            ShipwayError: There is none, or more than one.
        """
        kernels = [function for function in self.functions if function.kernel]
        if len(kernels) != 1:
            raise ShipwayError(f"device IR: expected one kernel, found {len(kernels)}")
        return kernels[0]


def parse(text: str) -> Module:
    """Parses a module.

    Raises:
        ShipwayError: Something at the top level, or a type, is not of the kinds that device IR has.
    """
    module = Module()
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("!"):
            _metadata(module, line)
            continue
        if not (tokens := tokens_of(line)) or tokens[0] in ("target", "source_filename", "attributes"):
            continue
        if tokens[0] == "declare":
            name, returns, parameters = _signature(tokens)
            module.declared[name] = (returns, [kind for kind, _ in parameters])
        elif tokens[0] == "define":
            name, returns, parameters = _signature(tokens)
            kernel = "ptx_kernel" in tokens or "amdgpu_kernel" in tokens
            module.functions.append(Function(name, kernel, returns, parameters, list(_body(lines))))
        elif tokens[0][0] == "@":
            module.globals.append(_global(tokens))
        else:
            raise ShipwayError(f"device IR: cannot read {line.strip()[:120]}")
    return module


def _metadata(module: Module, line: str) -> None:
    number, _, value = line.partition(" = ")
    # Names of types and functions in there are long and of no use.
    if number[1:].isdecimal() and "DI" in value[:16]:
        module.metadata[int(number[1:])] = tokens_of(value)


def _signature(tokens: Tokens) -> tuple[str, Tokens, list[tuple[Tokens, Tokens]]]:
    at = next(i for i, token in enumerate(tokens) if token[0] == "@")
    start = opening(tokens, at - 1) if tokens[at - 1] in _CLOSING else at - 1
    if tokens[start] == "(":
        start -= 2
    inside = split(tokens[at + 2 : closing(tokens, at + 1)])
    return tokens[at], tokens[start:at], [typed_value(part) for part in inside]


def _global(tokens: Tokens) -> Global:
    at = next((i for i, token in enumerate(tokens) if token in ("global", "constant")), None)
    if at is None:
        raise ShipwayError(f"device IR: cannot read {' '.join(tokens)[:120]}")
    space = next((int(a) for a, b in zip(tokens[2:], tokens, strict=False) if b == "addrspace"), 0)
    first, *rest = split(tokens[at + 1 :])
    end = type_end(first)
    align = next((int(part[1]) for part in rest if part[0] == "align"), 1)
    return Global(tokens[0], space, first[:end], tokens[at] == "constant", first[end:], align)


def _body(lines: Iterator[str]) -> Iterator[Instruction | str]:
    for line in lines:
        if line.startswith("}"):
            return
        tokens = tokens_of(line)
        if not tokens or line.lstrip().startswith("#dbg"):
            continue
        if len(tokens) == 2 and tokens[1] == ":":
            yield tokens[0]
            continue
        while sum((token in _OPENING) - (token in _CLOSING) for token in tokens):
            tokens += tokens_of(next(lines))
        yield _instruction(tokens)


def _instruction(tokens: Tokens) -> Instruction:
    """Takes the metadata off: what follows the first comma that stands before an exclamation mark."""
    end = next((i for i, (a, b) in enumerate(pairwise(tokens)) if a == "," and b[0] == "!"), len(tokens))
    attached = tokens[end:]
    location = next((int(b[1:]) for a, b in pairwise(attached) if a == "!dbg"), None)
    return Instruction([token for token in tokens[:end] if token[0] != "#"], location)
