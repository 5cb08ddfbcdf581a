"""Device IR rewritten for the host: memory accesses announced to the runtime, intrinsics made calls of it.

Address spaces go; shared memory gets fixed addresses; whatever the device does outside plain LLVM becomes a call of a
small wrapper that hands its arguments to the runtime. Every load, store, atomic and call is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shipway.errors import ShipwayError
from shipway.simt.c_runtime import SHARED_ROOM
from shipway.simt.findings import UNKNOWN
from shipway.simt.intrinsics import Intrinsic, table
from shipway.simt.ir import (
    ORDERINGS,
    Call,
    Function,
    Global,
    Instruction,
    Module,
    Tokens,
    address_space,
    closing,
    type_size,
)
from shipway.simt.literals import legible
from shipway.simt.locations import line_of
from shipway.simt.wgmma import PRODUCT, product

SHARED, CONSTANT, PRIVATE = 3, 4, 5  # address spaces, the same numbers on NVIDIA and AMD
GENERIC = ("ptr",)
SHARED_POINTER = ("ptr", "addrspace", "(", "3", ")")
COUNTED = ("load", "store", "atomicrmw", "cmpxchg", "fence", "call")
"""Opcodes of which the module that LLVM has read must hold as many as the rewriting knows of."""

_SCOPES = {"singlethread": 0, "wavefront": 0, "warp": 0, "workgroup": 1, "block": 1, "agent": 2, "device": 2, "": 2}
_SCOPES |= {f"{name}-one-as": level for name, level in list(_SCOPES.items()) if name} | {"one-as": 2}
_KINDS = {"load": 0, "store": 1, "atomicrmw": 2, "cmpxchg": 2}

# Of LLVM's own intrinsics, hints that mean nothing here, and the arithmetic that LLVM compiles for any target.
_HINTS = ("llvm.lifetime.", "llvm.assume", "llvm.experimental.noalias.scope.decl", "llvm.invariant.", "llvm.dbg.")
_PLAIN = {"fma", "fmuladd", "fabs", "copysign", "sqrt", "maxnum", "minnum", "maximum", "minimum", "maximumnum"}
_PLAIN |= {"minimumnum", "floor", "ceil", "trunc", "rint", "nearbyint", "round", "roundeven", "exp", "exp2", "exp10"}
_PLAIN |= {
    "log",
    "log2",
    "log10",
    "sin",
    "cos",
    "sincos",
    "pow",
    "powi",
    "ldexp",
    "frexp",
    "canonicalize",
    "is",
    "abs",
    "smax",
}
_PLAIN |= {"smin", "umax", "umin", "ctpop", "ctlz", "cttz", "bswap", "bitreverse", "fshl", "fshr", "sadd", "uadd"}
_PLAIN |= {"ssub", "usub", "smul", "umul", "fptosi", "fptoui", "vector", "ucmp", "scmp", "expect", "tan", "tanh"}
_MOVES = {"memcpy", "memmove", "memset"}

_PROBED = '"probe-stack"="inline-asm"'  # a large frame touches the page that guards a fiber's stack
_RUNTIME = """\
declare void @simt_call(i32, ptr, ptr, i32) convergent nounwind
declare void @simt_pause() convergent nounwind
declare float @simt_settle(float, i32) convergent nounwind
declare void @simt_access(ptr, i64, i32, i32, i32) convergent nounwind
declare void @simt_atomic(ptr, i64, i32, i32, i32, i32) convergent nounwind
"""


@dataclass
class Retargeted:
    """Device IR as the host can run it.

    Attributes:
        text: The IR.
        kernel: Name of the kernel.
        parameters: Type of each of its parameters: ``ptr``, ``i32``, ``float`` ...
        intrinsics: What ``simt_call`` is given the number of.
        sites: ``path:line`` of each number that a finding may carry, from 1.
        shared_size: Bytes of shared memory, dynamic memory not included.
        dynamic: Whether it uses dynamic shared memory, which lies behind the rest.
        constants: Names of the module's constants that stay in memory.
        granule: Bytes of global memory that all accesses take as one.
        shared_granule: Bytes of shared memory that all accesses take as one.
        synchronises: Whether blocks may wait for each other: there are atomics or fences of device scope.
        counts: How many instructions of each opcode of :data:`COUNTED` the functions of the device hold.
    """

    text: str = ""
    kernel: str = ""
    parameters: list[str] = field(default_factory=list)
    intrinsics: list[Intrinsic] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    shared_size: int = 0
    dynamic: bool = False
    constants: list[tuple[str, int]] = field(default_factory=list)
    granule: int = 4
    shared_granule: int = 16
    synchronises: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))


def retarget(module: Module, shared: int, check: bool) -> Retargeted:
    """Rewrites a module.

    Args:
        module: What ``ir.parse`` returned.
        shared: Address of the block's shared memory.
        check: Whether loads and stores are announced to the runtime.

    Raises:
        ShipwayError: It uses an intrinsic, a type or a kind of variable that is not simulated, by name.
    """
    return _Retargeting(module, shared, check).result


class _Retargeting:
    def __init__(self, module: Module, shared: int, check: bool) -> None:
        self.module = module
        self.check = check
        self.result = Retargeted(kernel=module.kernel.name.strip('@"'))
        self.wrappers: dict[tuple[str, ...], tuple[str, str]] = {}
        self.replaced: dict[str, str] = {}
        self.defined = {function.name for function in module.functions}
        self.generic_shared = any(
            _reaches_generic(instruction.tokens)
            for function in module.functions
            for instruction in function.instructions()
        )
        parts = [_RUNTIME, *self._globals(shared)]
        bodies = ["\n".join(self._function(function)) for function in module.functions]
        parts += self._declarations()
        parts += [body for _, body in self.wrappers.values()]
        parts += bodies
        parts.append(self._entry(module.kernel))
        self.result.text = "\n".join(parts)

    def _globals(self, shared: int) -> Iterator[str]:
        dynamic = []
        for variable in self.module.globals:
            if variable.space == SHARED:
                if self._size(variable) == 0:
                    dynamic.append(variable)
                else:
                    self._place(variable, shared)
            elif variable.constant:
                self.result.constants.append((variable.name.strip('@"'), type_size(variable.type)))
                yield f"{variable.name} = constant {' '.join(legible([*variable.type, *variable.value]))}, align 16"
            else:
                raise ShipwayError(f"device IR: the global variable {variable.name} is not simulated")
        for variable in dynamic:
            self.result.dynamic = True
            self._place(variable, shared)

    @staticmethod
    def _size(variable: Global) -> int:
        return type_size(variable.type)

    def _place(self, variable: Global, shared: int) -> None:
        align = max(variable.align, 16)
        offset = -(-self.result.shared_size // align) * align
        self.result.shared_size = offset + self._size(variable)
        if self.result.shared_size > SHARED_ROOM:
            raise ShipwayError(f"{self.result.kernel} wants {self.result.shared_size} bytes of shared memory")
        self.replaced[variable.name] = f"inttoptr (i64 {shared + offset} to ptr)"

    def _plain(self, tokens: Sequence[str]) -> str:
        """The tokens without address spaces and scopes, literals and shared variables as the host knows them."""
        out: list[str] = []
        skip_to = 0
        for index, token in enumerate(tokens):
            if index < skip_to:
                continue
            if token in ("addrspace", "syncscope"):
                skip_to = closing(tokens, index + 1) + 1
                if token == "addrspace" and out and out[-1] == ",":
                    out.pop()
            elif token == "addrspacecast":
                out.append("bitcast")
            else:
                out.append(self.replaced.get(token, token))
        return " ".join(legible(out))

    def _site(self, instruction: Instruction) -> int:
        """A new number for a place; the compiler leaves some without a line, which then get the line before them."""
        line = line_of(self.module, instruction.location)
        before = self.result.sites[-1] if self.result.sites else UNKNOWN
        if line is None:
            line = before if before.startswith(("near", UNKNOWN)) else f"near {before}"
        self.result.sites.append(line)
        return len(self.result.sites)

    def _granule(self, space: Sequence[str], size: int) -> None:
        """Notes an access of ``size`` bytes, a power of two, at a multiple of them."""
        if address_space(space) != SHARED:
            self.result.granule = min(self.result.granule, size)
        if address_space(space) == SHARED or (address_space(space) == 0 and self.generic_shared):
            self.result.shared_granule = min(self.result.shared_granule, size)

    def _function(self, function: Function) -> Iterator[str]:
        parameters = ", ".join(f"{self._plain(kind)} {' '.join(name)}" for kind, name in function.parameters)
        if function.kernel:
            self.result.parameters = [self._plain(kind) for kind, _ in function.parameters]
        yield f"define {self._plain(function.returns)} {function.name}({parameters}) convergent nounwind {_PROBED} {{"
        for line in function.body:
            if isinstance(line, str):
                yield f"{line}:"
            else:
                yield from self._instruction(line)
        yield "}"

    def _instruction(self, instruction: Instruction) -> Iterator[str]:
        opcode = instruction.opcode
        if opcode == "call":
            yield from self._call(instruction)
            return
        if opcode in COUNTED:
            self.result.counts[opcode] += 1
        if opcode in ("load", "store"):
            yield from self._access(instruction)
        elif opcode in ("atomicrmw", "cmpxchg"):
            size = 8 if "i64" in instruction.tokens or "double" in instruction.tokens else 4
            yield from self._atomic(instruction, instruction.atomic_pointer(), size)
        elif opcode == "fence":
            scope, order = instruction.ordering()
            yield self._announce_atomic("null", 0, 3, order, scope, instruction)
            yield self._plain(instruction.tokens)
        else:
            yield self._plain(instruction.tokens)

    def _access(self, instruction: Instruction) -> Iterator[str]:
        access = instruction.access()
        size = type_size(access.type)
        if access.atomic:
            yield from self._atomic(instruction, access.pointer, size)
            return
        if access.volatile:
            yield "call void @simt_pause()"
        if address_space(access.pointer[0]) not in (CONSTANT, PRIVATE):
            self._granule(access.pointer[0], min(size & -size, access.align))
            if self.check:
                write = int(access.kind == "store")
                site = self._site(instruction)
                pointer = self._plain([*access.pointer[0], *access.pointer[1]])
                yield f"call void @simt_access({pointer}, i64 {size}, i32 {write}, i32 {access.align}, i32 {site})"
        # The promised alignment is checked, and not relied on.
        tokens = instruction.tokens
        at = max((i for i, token in enumerate(tokens) if token == "align"), default=len(tokens))
        yield self._plain([*tokens[: at - 1], ",", "align", "1"] if at < len(tokens) else [*tokens, ",", "align", "1"])

    def _atomic(self, instruction: Instruction, pointer: tuple[Tokens, Tokens], size: int) -> Iterator[str]:
        scope, order = instruction.ordering()
        self._granule(pointer[0], size)
        kind = _KINDS[instruction.opcode]
        yield self._announce_atomic(self._plain(pointer[1]), size, kind, order, scope, instruction)
        yield self._plain(instruction.tokens)

    def _announce_atomic(
        self, pointer: str, size: int, kind: int, order: str, scope: str, instruction: Instruction
    ) -> str:
        if scope not in _SCOPES:
            raise ShipwayError(f"device IR: the scope {scope!r} of an atomic operation is not simulated")
        self.result.synchronises |= _SCOPES[scope] == 2
        numbers = (f"i64 {size}", f"i32 {kind}", f"i32 {ORDERINGS[order]}", f"i32 {_SCOPES[scope]}")
        return f"call void @simt_atomic(ptr {pointer}, {', '.join(numbers)}, i32 {self._site(instruction)})"

    def _call(self, instruction: Instruction) -> Iterator[str]:
        call = instruction.call()
        name = f"asm {' '.join(call.callee.split())}" if call.is_asm else call.callee.strip('@"')
        if call.is_asm and PRODUCT in call.callee:
            name, call = product(call)
        if not call.is_asm and name.startswith(_HINTS):
            return
        if (
            call.is_asm and not call.callee.strip()
        ):  # it only keeps compilers from moving what is around it, or its operand
            if not instruction.result:
                return
            if len(call.arguments) != 1:
                line = line_of(self.module, instruction.location) or UNKNOWN
                raise ShipwayError(
                    f"{self.result.kernel} has empty assembly of several operands at {line}: not simulated"
                )
            ((kind, value),) = call.arguments
            kind_text, operand = self._plain(kind), self._plain(value)
            if kind_text == "float":
                site = self._site(instruction)
                yield f"{instruction.result} = call float @simt_settle(float {operand}, i32 {site})"
            else:
                yield f"{instruction.result} = bitcast {kind_text} {operand} to {kind_text}"
            return
        self.result.counts["call"] += 1
        if name in table():
            yield self._trap(instruction, call, table()[name])
        elif call.callee in self.defined:
            yield self._plain(instruction.tokens)
        elif name.startswith("llvm.") and name.split(".")[1] in _MOVES:
            yield from self._move(instruction, call, name.split(".")[1])
        elif name.startswith("llvm.") and name.split(".")[1] in _PLAIN:
            yield self._plain(instruction.tokens)
        else:
            line = line_of(self.module, instruction.location) or UNKNOWN
            raise ShipwayError(f"{self.result.kernel} uses {name} at {line}, which intrinsics.toml does not have")

    def _trap(self, instruction: Instruction, call: Call, intrinsic: Intrinsic) -> str:
        """The call of the wrapper that hands the arguments to the runtime."""
        returns = self._plain(call.returns)
        kinds = [self._plain(kind) for kind, _ in call.arguments]
        key = (intrinsic.name, returns, *kinds)
        if key not in self.wrappers:
            wrapper = f"@simt.{len(self.wrappers)}"
            self.wrappers[key] = (wrapper, _wrapper(wrapper, len(self.result.intrinsics), returns, kinds))
            self.result.intrinsics.append(intrinsic)
        if intrinsic.run.startswith("copy_async"):
            size = call.arguments[2][1][0]
            self._granule(SHARED_POINTER, int(size) if size in ("8", "16") else 4)
            self._granule(GENERIC, 4)
        elif intrinsic.run.startswith("buffer_"):
            self._granule(GENERIC, min(4, int(intrinsic.run.rpartition("_")[2])))
        arguments = [f"i32 {self._site(instruction)}"]
        arguments += [self._plain([*kind, *value]) for kind, value in call.arguments]
        target = f"{instruction.result} = " if instruction.result else ""
        return f"{target}call {returns} {self.wrappers[key][0]}({', '.join(arguments)})"

    def _move(self, instruction: Instruction, call: Call, what: str) -> Iterator[str]:
        self._granule(GENERIC, 1)
        if self.check:
            size = " ".join(call.arguments[2][1])
            kind = " ".join(call.arguments[2][0])
            if kind != "i64":
                raise ShipwayError(f"device IR: {what} with a size of type {kind} is not simulated")
            for write, (space, value) in ((1, call.arguments[0]), (0, call.arguments[1])):
                if (write or what != "memset") and address_space(space) not in (CONSTANT, PRIVATE):
                    site = self._site(instruction)
                    at = self._plain([*space, *value])
                    yield f"call void @simt_access({at}, i64 {size}, i32 {write}, i32 1, i32 {site})"
        arguments = [self._plain([*kind, *value]) for kind, value in call.arguments]
        suffix = "p0.i64" if what == "memset" else "p0.p0.i64"
        yield f"call void @llvm.{what}.{suffix}({', '.join(arguments)})"

    def _declarations(self) -> Iterator[str]:
        moves = set()
        for name, (returns, kinds) in self.module.declared.items():
            plain = name.strip('@"')
            root = plain.split(".")[1] if plain.startswith("llvm.") else ""
            if plain in table() or plain.startswith(_HINTS):
                continue
            if root in _MOVES:
                moves.add(root)
            elif root in _PLAIN:
                yield f"declare {self._plain(returns)} {name}({', '.join(map(self._plain, kinds))})"
        for root in sorted(moves):
            source = "i8" if root == "memset" else "ptr"
            yield f"declare void @llvm.{root}.{'p0.i64' if root == 'memset' else 'p0.p0.i64'}(ptr, {source}, i64, i1)"

    def _entry(self, kernel: Function) -> str:
        """A function that takes the arguments as eight bytes each."""
        lines = ["define void @simt.entry(ptr %arguments) {"]
        for index, kind in enumerate(self.result.parameters):
            lines.append(f"%p{index} = getelementptr i8, ptr %arguments, i64 {8 * index}")
            lines.append(f"%v{index} = load {kind}, ptr %p{index}")
        values = ", ".join(f"{kind} %v{index}" for index, kind in enumerate(self.result.parameters))
        return "\n".join([*lines, f"call void {kernel.name}({values})", "ret void", "}"])


def _reaches_generic(tokens: Sequence[str]) -> bool:
    """Whether an instruction makes a generic pointer of a shared one."""
    return any(
        token == "addrspacecast" and address_space(tokens[at + 1 + (tokens[at + 1] == "(") :]) == SHARED
        for at, token in enumerate(tokens)
    )


def _wrapper(name: str, op: int, returns: str, kinds: Sequence[str]) -> str:
    """Puts the arguments into memory as a C structure has them, calls the runtime, takes the result from memory."""
    struct = f"{{ {', '.join(kinds) or 'i8'} }}"
    result = returns != "void"
    parameters = ", ".join(["i32 %site", *(f"{kind} %a{index}" for index, kind in enumerate(kinds))])
    lines = [f"define internal {returns} {name}({parameters}) alwaysinline convergent nounwind {{"]
    lines.append(f"%arguments = alloca {struct}, align 64")
    lines += [f"%result = alloca {returns}, align 64"] * result
    for index, kind in enumerate(kinds):
        lines.append(f"%p{index} = getelementptr {struct}, ptr %arguments, i32 0, i32 {index}")
        lines.append(f"store {kind} %a{index}, ptr %p{index}")
    lines.append(f"call void @simt_call(i32 {op}, ptr %arguments, ptr {'%result' if result else 'null'}, i32 %site)")
    lines += [f"%value = load {returns}, ptr %result", f"ret {returns} %value"] if result else ["ret void"]
    return "\n".join([*lines, "}"])
