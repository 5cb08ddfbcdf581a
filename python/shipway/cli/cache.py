"""``shipway cache``."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from shipway.cli.options import Json
from shipway.errors import ShipwayError
from shipway.measure.result import SCHEMA_VERSION, write_json
from shipway.model.resolve import cache_dir

PARTS = {
    "artefacts": "compiled models and ops",
    "mojoc": "precompiled Mojo kernels",
    "modular": "MAX's own compile cache",
    "inductor": "torch.compile's cache",
    "xla": "XLA's cache",
    "models": "fetched and converted models",
    "reference": "float64 reference logits",
    "logs": "logs of workers",
}


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cache(
    clear: Annotated[
        str | None, typer.Option(help=f"Remove one part ({', '.join(PARTS)}) or all; running programs must end first.")
    ] = None,
    json: Json = None,
) -> None:
    """Show what is kept between runs and how large it is, or remove it."""
    from shipway.artefacts import stored

    root = cache_dir()
    present = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if clear is not None:
        if clear != "all" and clear not in {*PARTS, *present}:
            raise ShipwayError(f"the cache has no part {clear!r}: choose one of {', '.join(PARTS)} or all")
        for name in present if clear == "all" else [clear]:
            try:
                shutil.rmtree(root / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise ShipwayError(f"cannot remove {root / name}: {error.strerror}") from error
        present = [name for name in present if (root / name).is_dir()]
    sizes = {name: _bytes(root / name) for name in present}
    entries = stored()
    if json is not None:
        described = [dataclasses.asdict(kept) | {"path": str(kept.path)} for kept in entries]
        document = {"path": str(root), "bytes": sizes, "artefacts": described}
        write_json(json, {"schema_version": SCHEMA_VERSION, "command": "cache", **document})
    print(root)
    for name, size in sizes.items():
        print(f"  {name:<12}{size / (1 << 20):>10,.1f} MiB  {PARTS.get(name, '')}")
    for kept in entries:
        day = time.strftime("%Y-%m-%d", time.localtime(kept.used))
        made = "damaged" if kept.compile_s is None else f"{kept.compile_s:.1f} s"
        print(f"    {kept.kind:<14}{kept.path.name}  {kept.size / (1 << 20):7.1f} MiB  {made:>8}  used {day}")
