"""Compiled artefacts kept between runs: one directory per key, written atomically under a lock.

A key names everything a compiled artefact depends on; two processes that need the same one compile it once.
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

from shipway.errors import ShipwayError
from shipway.model.resolve import cache_dir

_RECORD = "artefact.json"
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


def stored() -> list[tuple[str, Artefact, float]]:
    """Returns kind, artefact and time of last use (seconds since the epoch) of everything kept, latest use first."""
    records = (cache_dir() / "artefacts").glob(f"*/*/{_RECORD}")
    found = [(record.parent.parent.name, record.parent, record.stat().st_mtime) for record in records]
    return [
        (kind, _describe(path, cold=False), used)
        for kind, path, used in sorted(found, key=lambda entry: entry[2], reverse=True)
    ]


def _forget_beyond(most: int, keep: Path) -> None:
    """Removes the artefacts used longest ago until the rest takes at most ``most`` bytes."""
    total = 0
    for _, kept, _ in stored():
        total += kept.size
        if total > most and kept.path != keep:
            shutil.rmtree(kept.path, ignore_errors=True)


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
    """Returns the artefact of these parts, building it when there is none.

    Args:
        kind: Sub-directory of the store, such as ``"mojo-graph"``.
        parts: Everything the artefact depends on; the hash of its JSON is the key.
        build: Writes the artefact's files into the empty directory it is given.

    Raises:
        ShipwayError: The cache cannot be written.
    """
    text = _text(parts)
    path = cache_dir() / "artefacts" / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (path / _RECORD).exists():
        return _read(path, cold=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (path / _RECORD).exists():
                return _read(path, cold=False)
            partial = path.with_suffix(f".{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                started = time.perf_counter()
                build(partial)
                record = {"compile_s": time.perf_counter() - started, "made": time.strftime("%Y-%m-%d"), "parts": parts}
                (partial / _RECORD).write_text(json.dumps(record, indent=1, default=str))
                shutil.rmtree(path, ignore_errors=True)  # half an artefact without a record
                partial.rename(path)
                _forget_beyond(MOST_BYTES, keep=path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ShipwayError(f"cannot write compiled artefacts under {path.parent}: {error.strerror}") from error
    return _read(path, cold=True)


def ship(source: Path, kind: str, target: Path) -> None:
    """Copies an artefact of the store to ``target``, with what :func:`shipped` checks: its kind and a hash per file."""
    shutil.copytree(source, target)
    record = json.loads((target / _RECORD).read_text())
    record |= {"kind": kind, "files": _hashes(target)}
    (target / _RECORD).write_text(json.dumps(record, indent=1))


def shipped(directory: Path, kind: str, parts: Mapping[str, object]) -> Artefact:
    """Returns the artefact that ``directory`` holds, if it is whole, of this kind and of these parts.

    Raises:
        ShipwayError: There is none, it is damaged, or it was compiled for something else: which, and what is here.
    """
    try:
        record = json.loads((directory / _RECORD).read_text())
        found, files = {"route": record["kind"]} | record["parts"], dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShipwayError(f"{directory} holds no compiled model: make it again with shipway compile") from error
    if differing := _differences(found, json.loads(_text({"route": kind} | dict(parts)))):
        raise ShipwayError(f"{directory} was compiled for {'; '.join(differing)}: make it again with shipway compile")
    here = _hashes(directory)
    if wrong := sorted(name for name in files.keys() | here.keys() if files.get(name) != here.get(name)):
        how = (
            "is missing" if wrong[0] not in here else "does not belong there" if wrong[0] not in files else "is damaged"
        )
        raise ShipwayError(f"{directory / wrong[0]} {how}: make the compiled model again with shipway compile")
    return _read(directory, cold=False)


def _hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but the record."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != _RECORD)
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


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


def _read(path: Path, cold: bool) -> Artefact:
    with contextlib.suppress(OSError):  # a read-only directory keeps its date
        os.utime(path / _RECORD)  # the time of its last use
    return _describe(path, cold)


def _describe(path: Path, cold: bool) -> Artefact:
    record = json.loads((path / _RECORD).read_text())
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Artefact(path, cold, record["compile_s"], record["made"], size)
