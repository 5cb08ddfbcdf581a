"""Device IR compiled for this CPU: parsed, rewritten, counted again by LLVM, optimised, kept in the cache."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shipway.artefacts import artefact, cpu_target, source_of
from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.simt.c_runtime import Op, runtime, shared_memory
from shipway.simt.intrinsics import SCOPES, Intrinsic
from shipway.simt.ir import parse
from shipway.simt.retarget import COUNTED, Retargeted, retarget

_HERE = Path(__file__).parent
_SOURCES = [
    str(_HERE / name) for name in ("ir.py", "literals.py", "locations.py", "retarget.py", "wgmma.py", "kernel.py")
]
_SOURCES += [str(_HERE / "intrinsics.toml")]
# Their conversions flush subnormals or double-round where the device does neither.
_WITHOUT = ("avx512bf16", "avx512fp16", "avxneconvert", "avx10.1-256", "avx10.1-512")
_RUNTIME = ("simt_call", "simt_access", "simt_atomic", "simt_pause", "simt_settle", "__truncsfbf2")


@cache
def _llvm() -> Any:
    try:
        import llvmlite.binding as llvm
    except ImportError:
        line = this_python("-m pip install llvmlite==0.50.0")
        raise CannotRunError(f"the simulator needs llvmlite: run {line}") from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, in this process.

    Attributes:
        name: Its name in the IR.
        parameters: Type of each parameter: ``ptr``, ``i32``, ``i64``, ``float`` ...
        entry: Address of a function that takes the arguments as eight bytes each.
        ops: The runtime's operations that it calls by number.
        sites: ``path:line`` of each number in a finding, from 1.
        shared_size: Bytes of static shared memory.
        dynamic: Whether it uses dynamic shared memory.
        constants: Address and size of the module's constants.
        granule: Bytes of global memory that all accesses take as one.
        shared_granule: Bytes of shared memory that all accesses take as one.
        synchronises: Whether its blocks may wait for each other.
        checked: Whether its loads and stores are checked.
        loaded: Keeps the code in memory.
    """

    name: str
    parameters: list[str]
    entry: int
    ops: ctypes.Array[Op]
    sites: list[str]
    shared_size: int
    dynamic: bool
    constants: list[tuple[int, int]]
    granule: int
    shared_granule: int
    synchronises: bool
    checked: bool
    loaded: object


def compile_kernel(ir: str, check: bool) -> Kernel:
    """Compiles the IR of a module with one kernel.

    Args:
        ir: Textual LLVM IR for an NVIDIA or AMD target.
        check: Whether loads and stores are checked.

    Raises:
        ShipwayError: The IR uses what is not simulated: what, and at which line.
        CannotRunError: llvmlite or a C compiler is missing.
    """
    llvm = _llvm()
    library = runtime()
    shared = shared_memory()

    def build(directory: Path) -> None:
        made = retarget(parse(ir), shared, check)
        (directory / "kernel.o").write_bytes(_object(llvm, made))
        (directory / "kernel.json").write_text(json.dumps(asdict(made) | {"text": ""}))

    parts = {
        "ir": hashlib.sha256(ir.encode()).hexdigest(),
        "check": check,
        "shared": shared,
        "sources": source_of(*(str(_HERE / name) for name in _SOURCES)),
        "llvmlite": llvm.llvm_version_info,
        "target": cpu_target(),
    }
    path = artefact("simt-kernel", parts, build).path
    made = Retargeted(**json.loads((path / "kernel.json").read_text()))
    intrinsics = [Intrinsic(**intrinsic) for intrinsic in made.intrinsics]  # type: ignore[arg-type]
    builder = llvm.JITLibraryBuilder().add_object_img((path / "kernel.o").read_bytes()).export_symbol("simt.entry")
    for name in _RUNTIME:
        builder = builder.import_symbol(name, _address(library, name))
    for name, _ in made.constants:
        builder = builder.export_symbol(name)
    builder = builder.add_current_process()
    jit = _jit()
    tracker = builder.link(jit, f"{made.kernel}.{len(_LINKED)}")
    _LINKED.append(made.kernel)
    ops = (Op * max(1, len(intrinsics)))(
        *(
            Op(SCOPES.index(each.scope), each.orders, _address(library, each.run), each.name.encode())
            for each in intrinsics
        )
    )
    return Kernel(
        made.kernel,
        made.parameters,
        tracker["simt.entry"],
        ops,
        made.sites,
        made.shared_size,
        made.dynamic,
        [(tracker[name], size) for name, size in made.constants],
        made.granule,
        made.shared_granule,
        made.synchronises,
        check,
        tracker,
    )


_LINKED: list[str] = []


@cache
def _jit() -> Any:
    return _llvm().create_lljit_compiler(_machine(_llvm()))


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _machine(llvm: Any) -> Any:
    features = llvm.get_host_cpu_features()
    for name in _WITHOUT:
        if features.get(name):
            features[name] = False
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2, reloc="pic", jit=True
    )


def _object(llvm: Any, made: Retargeted) -> bytes:
    """Optimised machine code of the rewritten IR."""
    try:
        module = llvm.parse_assembly(made.text)
        module.verify()
    except RuntimeError as problem:
        raise ShipwayError(f"{made.kernel}: LLVM {llvm.llvm_version_info[0]} cannot read it: {problem}") from None
    _recount(made, module)
    machine = _machine(llvm)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _recount(made: Retargeted, module: Any) -> None:
    """Holds the rewriting to what LLVM sees: no access and no call may have gone unnoticed."""
    seen: Counter[str] = Counter()
    for function in module.functions:
        if function.is_declaration or function.name.startswith("simt."):
            continue
        for block in function.blocks:
            for instruction in block.instructions:
                if instruction.opcode != "call" or " @simt_" not in str(instruction):
                    seen[instruction.opcode] += 1
    for opcode in COUNTED:
        if seen[opcode] != (known := made.counts[opcode]):
            raise ShipwayError(f"{made.kernel}: LLVM sees {seen[opcode]} {opcode} instructions, the simulator {known}")
