"""Kernels of ``mojo/tests/gpu`` as device IR: one compiler process for all targets, kept between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from shipway.artefacts import artefact, source_of
from shipway.simt.device import Device, Source

MOJO = Path(__file__).resolve().parent.parent / "mojo"
FOLDER = MOJO / "tests/gpu"
ARCHS = ("sm_80", "sm_90a", "gfx942", "gfx1100", "gfx1201")


def emit(module: str, wanted: Mapping[str, Sequence[str]], uses: Sequence[str], texts: Mapping[str, str]) -> Path:
    """Returns a folder with ``NUMBER.ARCH.ll`` for the kernels of a module that each target wants, in their order."""
    lines = [
        f'    Path("{number}.{arch}.ll").write_text(compile_info[{kernel}, target=get_gpu_target["{arch}"](),'
        ' emission_kind="llvm-opt"]().asm)'
        for arch, kernels in wanted.items()
        for number, kernel in enumerate(kernels)
    ]
    driver = "\n".join(
        [
            "from std.compile import compile_info",
            "from max.gpu.host import get_gpu_target",
            "from std.pathlib import Path",
            f"from {module} import *",
            "def main() raises:",
            *lines,
            "",
        ]
    )

    def build(folder: Path) -> None:
        for name, text in {**texts, "driver": driver}.items():
            (folder / f"{name}.mojo").write_text(text)
        mojo = Path(sysconfig.get_path("scripts")) / "mojo"
        command = [str(mojo), "build", "-g1", "-I", str(FOLDER), "-I", str(MOJO), "driver.mojo", "-o", "driver"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr[-4000:]
        subprocess.run(["./driver"], cwd=folder, check=True)
        (folder / "driver").unlink()

    files = [MOJO / "kernels/gpu" / f"{name}.mojo" for name in uses]
    if module not in texts:
        files.append(FOLDER / f"{module}.mojo")
    parts = {"driver": driver, "source": source_of(*map(str, files)), "texts": texts, "folder": str(FOLDER)}
    return artefact("simt-tests", parts | {"mojo": version("mojo")}, build).path


@cache
def devices(module: str, wanted: str, *uses: str, texts: str = "{}") -> dict[str, Device]:
    """Returns a device per target whose kernels are those of a module, named by their Mojo expressions.

    Args:
        module: A file of ``mojo/tests/gpu``, or one of ``texts``.
        wanted: JSON of the kernels of each target.
        uses: Files of ``mojo/kernels/gpu`` that it depends on.
        texts: JSON of further modules by name.
    """
    kernels: dict[str, list[str]] = json.loads(wanted)
    folder = emit(module, kernels, uses, json.loads(texts))

    def source(arch: str) -> Source:
        def read(kernel: str, parameters: tuple[str, ...], target: str) -> str:
            return (folder / f"{kernels[arch].index(kernel)}.{arch}.ll").read_text()

        return read

    return {arch: Device(arch, source(arch)) for arch in kernels}
