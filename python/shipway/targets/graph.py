"""A whole MAX graph compiled for a target: what one execution launches, what was fused, and the kernels' figures."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shipway.artefacts import artefact, source_of
from shipway.errors import CannotRunError, ShipwayError
from shipway.graphs.extension import first_error, source_hash
from shipway.model.config import ModelConfig
from shipway.targets import virtual_device
from shipway.targets.arch import Arch
from shipway.targets.figures import Usage, cubin_usages, elf_file
from shipway.targets.virtual_device import ERROR, LAUNCHES, MEF, REQUEST, Request

if TYPE_CHECKING:
    from max.graph import DeviceRef, Graph

_APIS = {"nvidia": "cuda", "amd": "hip"}
_REPORT = "report.json"
_CUDA, _AMDGPU = 190, 224  # ELF machines


@dataclass(frozen=True)
class GraphReport:
    """What became of a graph on a target.

    Attributes:
        arch: The target.
        compile_s: Seconds its compilation took.
        cold: Whether this call compiled it.
        launches: What one execution launches, in order, each with what was fused into it.
        kernels: The kernels that were compiled for it; a launch chooses among several where it depends on sizes.
        error: Why it does not compile, in one line; empty where it does.
    """

    arch: Arch
    compile_s: float
    cold: bool
    launches: tuple[str, ...]
    kernels: tuple[Usage, ...]
    error: str = ""


def mojo_decoder(device: DeviceRef, config: ModelConfig, dtype: str) -> Graph:
    """Our decoder's graph."""
    from shipway.graphs.decoder import build_decoder
    from shipway.graphs.extension import kernels_extension

    return build_decoder(config, dtype, "f32" if dtype == "tf32" else dtype, kernels_extension(), device)


def stock_decoder(device: DeviceRef, config: ModelConfig, dtype: str) -> Graph:
    """The decoder's graph of stock ops."""
    from shipway.graphs.stock_decoder import build_stock_decoder

    return build_stock_decoder(config, dtype, device)


def paged_decoder(device: DeviceRef, config: ModelConfig, dtype: str) -> Graph:
    """Our decoder's graph over MAX's paged KV cache."""
    from max.nn.kv_cache import MHAKVCacheParams

    from shipway.graphs.extension import kernels_extension
    from shipway.graphs.ops import DTYPES
    from shipway.graphs.paged_decoder import build_paged_decoder

    pages = MHAKVCacheParams(
        dtype=DTYPES[dtype],
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_layers=config.num_hidden_layers,
        devices=[device],
    )
    return build_paged_decoder(config, pages, kernels_extension(), device)


def every_op(device: DeviceRef, config: ModelConfig, dtype: str) -> Graph:
    """Each of our ops once, as ``check --impl mojo-gpu`` runs them."""
    from shipway.graphs.single_op import build_ops

    return build_ops(device, dtype, config.head_dim)


GRAPHS = {
    "mojo-graph": (mojo_decoder, ("f32", "bf16", "tf32")),
    "max-graph": (stock_decoder, ("f32", "bf16")),
    "serve": (paged_decoder, ("f32", "bf16")),
    "ops": (every_op, ("f32", "bf16", "f16", "tf32")),
}
"""What builds a graph, and in which dtypes, by the route or the command that runs it; ``ops`` for each op by itself."""


def compile_route(
    route: str, config: ModelConfig, dtype: str, arch: Arch, show: Callable[[str], None] = lambda line: None
) -> GraphReport:
    """Compiles one of :data:`GRAPHS` for a target; returns what :func:`compile_graph` does, or its error."""
    show(f"{arch.name}: compiling the graph of {route}, which takes minutes the first time")
    build = f"{__name__}:{GRAPHS[route][0].__name__}"
    try:
        return compile_graph(build, (config, dtype), {"config": config.computation(), "dtype": dtype}, arch)
    except CannotRunError:
        raise
    except ShipwayError as error:
        return GraphReport(arch, 0.0, True, (), (), str(error))


def compile_graph(build: str, arguments: tuple[Any, ...], parts: Mapping[str, object], arch: Arch) -> GraphReport:
    """Compiles a graph for a target, or takes what was kept of it.

    Args:
        build: ``"module:function"`` that returns the graph, given a device and ``arguments``.
        arguments: Must survive pickling.
        parts: What the graph depends on besides the sources of kernels and graphs.
        arch: The target.

    Raises:
        ShipwayError: It does not compile: the first line of the error.
    """
    request = Request(build, arguments, _APIS[arch.vendor], arch.name)

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="shipway-graph-") as temporary:
            work = Path(temporary)
            (work / REQUEST).write_bytes(pickle.dumps(request))
            command = [sys.executable, "-m", virtual_device.__name__, temporary]
            fresh = {**os.environ, "MODULAR_CACHE_DIR": temporary}  # what MAX kept is not compiled, nor described
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=fresh)
            if done.returncode:
                raise ShipwayError(f"the graph does not compile for {arch.name}: {_reason(work, done)}")
            kernels = read_kernels((work / MEF).read_bytes())
            report = {"launches": json.loads((work / LAUNCHES).read_text()), "kernels": [asdict(k) for k in kernels]}
            (folder / _REPORT).write_text(json.dumps(report))

    key = {
        "build": build,
        **parts,
        "arch": arch.name,
        "sources": source_hash(),
        "reader": source_of(__file__, virtual_device.__file__),
        "max": version("max"),
    }
    made = artefact("gpu-graphs", key, make)
    report = json.loads((made.path / _REPORT).read_text())
    kernels = tuple(Usage(**kernel) for kernel in report["kernels"])
    return GraphReport(arch, made.compile_s, made.cold, tuple(report["launches"]), kernels)


def _reason(work: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Why the program that compiles a graph failed, in one line."""
    if not (work / ERROR).exists():
        return f"the compiler crashed (exit code {done.returncode}): {first_error(done.stdout)}"
    message = (work / ERROR).read_text().strip()
    return first_error(message).strip() if "error:" in message else message.partition("\n")[0]


def read_kernels(mef: bytes) -> list[Usage]:
    """Returns the kernels of the cubins and code objects in a compiled graph, by name.

    One that several parts of the graph launch is there once for each of them, and is returned once.

    Raises:
        ShipwayError: One of them cannot be read.
        CannotRunError: A package that reads them is not installed.
    """
    kernels: list[Usage] = []
    for machine, linked in _code_objects(mef):
        kernels += _of_cubin(linked) if machine == _CUDA else _of_code_object(linked)
    return sorted(set(kernels), key=lambda kernel: kernel.name)


def _code_objects(mef: bytes) -> Iterator[tuple[int, bytes]]:
    """Machine and content of each ELF file for a GPU."""
    start = -1
    while (start := mef.find(b"\x7fELF\x02", start + 1)) >= 0:
        machine = int.from_bytes(mef[start + 18 : start + 20], "little")
        if machine in (_CUDA, _AMDGPU):
            file = elf_file(mef[start:])
            ends = [s["sh_offset"] + s["sh_size"] for s in file.iter_sections() if s["sh_type"] != "SHT_NOBITS"]
            ends += [file[f"e_{of}off"] + file[f"e_{of}num"] * file[f"e_{of}entsize"] for of in ("sh", "ph")]
            yield machine, mef[start : start + max(ends)]


def _of_cubin(linked: bytes) -> list[Usage]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(linked)
        file.flush()
        return cubin_usages(Path(file.name))


def _of_code_object(linked: bytes) -> list[Usage]:
    from msgspec import msgpack  # comes with MAX

    notes = [
        note
        for section in elf_file(linked).iter_sections()
        if section["sh_type"] == "SHT_NOTE"
        for note in section.iter_notes()
        if note["n_name"] == "AMDGPU"
    ]
    rows = [row for note in notes for row in msgpack.decode(note["n_descdata"]).get("amdhsa.kernels", [])]
    needed = (".name", ".vgpr_count", ".private_segment_fixed_size", ".group_segment_fixed_size")
    return [Usage(*(row[key] for key in needed)) for row in rows]
