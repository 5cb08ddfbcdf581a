"""Memory maps of checkpoint files, and what a file is that is not what its name says."""

from __future__ import annotations

import mmap
from pathlib import Path

from shipway.errors import ShipwayError

_STARTS = (
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a Git LFS pointer, whose data `git lfs pull` fetches"),
    (b"PK\x03\x04", "a zip archive, as PyTorch's .bin files are"),
    (b"\x80", "a Python pickle"),
    (b"<", "an HTML or XML page"),
    (b"{", "JSON text"),
)


def looks_like(start: bytes) -> str:
    """Says what a file seems to be that begins with ``start``."""
    known = next((name for magic, name in _STARTS if start.lstrip().startswith(magic)), None)
    if start[8:9] == b"{":  # behind the length of the header
        known = "a safetensors file"
    return f"it looks like {known}" if known else f"it starts with {start[:4]!r}"


def map_file(path: Path) -> mmap.mmap:
    """Maps a file copy-on-write: its pages are shared with the page cache and with other processes until written.

    Read-only maps would do, but torch and DLPack refuse or warn about arrays that are not writable.

    Raises:
        ShipwayError: The file cannot be read or is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as problem:
        reason = "it is empty" if isinstance(problem, ValueError) else problem.strerror
        raise ShipwayError(f"cannot read {path}: {reason}") from None
