"""Compiled artefacts kept between runs: one directory per key, written atomically under a lock.

A key names everything a compiled artefact depends on; two processes that need the same one compile it once. Each has
a record with a hash per file: what is not as it was recorded counts as absent, and is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shipway.errors import ShipwayError, program
from shipway.model.resolve import cache_dir
from shipway.model.safetensors_files import read_json

RECORD = "artefact.json"
MOST_BYTES = 8 << 30
"""Disk space the store may take before what was used longest ago goes."""


@dataclass(frozen=True)
class Artefact:
    """A compiled artefact on disk.

    Attributes:
        path: Its directory.
        cold: Whether this call compiled it.
        compile_s: Seconds its compilation took, in this call or when it was made.
        made: When it was made, ISO 8601 date.
        size: Bytes of its files.
    """

    path: Path
    cold: bool
    compile_s: float
    made: str
    size: int


@dataclass(frozen=True)
class Stored:
    """What the store holds under one key.

    Attributes:
        kind: Its sub-directory of the store.
        path: Its directory.
        size: Bytes of its files.
        used: Time of its last use, seconds since the epoch.
        compile_s: Seconds its compilation took, ``None`` when its record is damaged.
        made: When it was made, ISO 8601 date, ``None`` when its record is damaged.
    """

    kind: str
    path: Path
    size: int
    used: float
    compile_s: float | None
    made: str | None


def stored() -> list[Stored]:
    """Returns everything kept, latest use first."""
    found = []
    for used, size, path in _sizes():
        record: dict[str, Any] = {}
        with contextlib.suppress(ShipwayError):
            record = _record(path)
        found.append(Stored(path.parent.name, path, size, used, record.get("compile_s"), record.get("made")))
    return found


def _sizes() -> list[tuple[float, int, Path]]:
    """Time of last use, bytes and directory of everything kept, latest use first."""
    found = []
    for file in (cache_dir() / "artefacts").glob(f"*/*/{RECORD}"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
            found.append((file.stat().st_mtime, _size(file.parent), file.parent))
    return sorted(found, reverse=True)


def _forget_beyond(most: int, keep: Path) -> None:
    """Removes the artefacts used longest ago until the rest takes at most ``most`` bytes."""
    total = 0
    for _, size, path in _sizes():
        total += size
        if total > most and path != keep:
            shutil.rmtree(path, ignore_errors=True)


_unchecked: dict[Path, int] = {}
"""Bytes that this process has written to a store since it last looked whether the store takes too much."""


def _written(path: Path) -> None:
    """Keeps the store of a new artefact within its size. Looking takes longer the more it holds, and thousands of small
    artefacts are made one after the other: so not at each, but at the first and whenever a hundredth has been written.
    """
    store = cache_dir()
    _unchecked[store] = _unchecked.get(store, MOST_BYTES) + _size(path)
    if _unchecked[store] > MOST_BYTES // 100:
        _unchecked[store] = 0
        _forget_beyond(MOST_BYTES, keep=path)


def cpu_target() -> str:
    """Machine architecture and a hash of the CPU's feature flags: code for one CPU may crash on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()}-{platform.processor()}"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def source_of(*files: str) -> str:
    """Hash of source files: what an artefact built by them depends on."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def artefact(kind: str, parts: Mapping[str, object], build: Callable[[Path], None]) -> Artefact:
    """Returns the artefact of these parts, building it when there is none that is whole.

    Args:
        kind: Sub-directory of the store, such as ``"mojo-graph"``.
        parts: Everything the artefact depends on; the hash of its JSON is the key.
        build: Writes the artefact's files into the empty directory it is given.

    Raises:
        ShipwayError: The cache cannot be written.
    """
    text = _text(parts)
    path = cache_dir() / "artefacts" / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (kept := _whole(path)) is not None:
        return kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (kept := _whole(path)) is not None:
                return kept
            partial = path.with_suffix(f".{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                started = time.perf_counter()
                build(partial)
                record = {"compile_s": time.perf_counter() - started, "made": time.strftime("%Y-%m-%d"), "parts": parts}
                record["files"] = hashes(partial)
                (partial / RECORD).write_text(json.dumps(record, indent=1, default=str))
                shutil.rmtree(path, ignore_errors=True)  # a damaged one
                partial.rename(path)
                _written(path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ShipwayError(f"cannot write compiled artefacts under {path.parent}: {error.strerror}") from error
    return _describe(path, record, cold=True)


def ship(source: Path, kind: str, target: Path) -> None:
    """Copies an artefact of the store to ``target``, where :func:`shipped` finds it."""
    shutil.copytree(source, target)
    (target / RECORD).write_text(json.dumps(_record(target) | {"kind": kind}, indent=1))


def shipped(directory: Path, kind: str, parts: Mapping[str, object]) -> Artefact:
    """Returns the artefact that ``directory`` holds, if it is whole, of this kind and of these parts.

    Raises:
        ShipwayError: There is none, it is damaged, or it was compiled for something else: which, and what is here.
    """
    try:
        record = _record(directory)
    except ShipwayError as error:
        raise ShipwayError(f"{directory} holds no compiled model: make it again with {program()} compile") from error
    found = {"route": record.get("kind")} | record["parts"]
    if differing := _differences(found, json.loads(_text({"route": kind} | dict(parts)))):
        raise ShipwayError(
            f"{directory} was compiled for {'; '.join(differing)}: make it again with {program()} compile"
        )
    files = record["files"]
    added = [f"{directory / name} does not belong there" for name in _files(directory) if name not in files]
    if wrong := changed(directory, files) or next(iter(added), None):
        raise ShipwayError(f"{wrong}: make the compiled model again with {program()} compile")
    _touch(directory)
    return _describe(directory, record, cold=False)


def hashes(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below ``directory`` but a record of it, by its path in there."""
    return {name: _hash(directory / name) for name in _files(directory)}


def changed(directory: Path, files: Mapping[str, str]) -> str | None:
    """Returns what is wrong with the first of ``files`` that is not as its :func:`hashes` says, ``None`` if none is."""
    for name, digest in files.items():
        path = directory / name
        try:
            if _hash(path) != digest:
                return f"{path} is damaged"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return None


def _files(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(str(path.relative_to(directory)) for path in paths)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(found: Mapping[str, object], expected: Mapping[str, object], within: str = "") -> list[str]:
    """Returns "KEY FOUND, here EXPECTED" for each value that differs, in mappings of mappings by the inner key."""
    lines: list[str] = []
    for key, value in expected.items():
        other = found.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            lines += _differences(other, value, f"{within}{key}.")
        elif other != value:
            lines.append(f"{within}{key} {other}, here {value}")
    return lines


def _text(parts: Mapping[str, object]) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


def _whole(path: Path) -> Artefact | None:
    """Returns the artefact in ``path`` of the store if its record and the files of it are as they were written.

    A compiler may put further files beside them later.
    """
    try:
        record = _record(path)
    except ShipwayError:
        return None
    if changed(path, record["files"]):
        return None
    _touch(path)
    return _describe(path, record, cold=False)


def _touch(path: Path) -> None:
    """Notes that the artefact in ``path`` is used now."""
    with contextlib.suppress(OSError):  # a read-only directory keeps its date
        os.utime(path / RECORD)


def _record(path: Path) -> dict[str, Any]:
    """Returns the record of the artefact in ``path``.

    Raises:
        ShipwayError: There is none, or it is damaged.
    """
    record = read_json(path / RECORD)
    for name, kind in (("compile_s", float), ("made", str), ("parts", dict), ("files", dict)):
        if not isinstance(record.get(name), kind):
            raise ShipwayError(f"{path / RECORD} is damaged: {name} is {record.get(name)!r}")
    return record


def _describe(path: Path, record: Mapping[str, Any], cold: bool) -> Artefact:
    return Artefact(path, cold, record["compile_s"], record["made"], _size(path))


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
