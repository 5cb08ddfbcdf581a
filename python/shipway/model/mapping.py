"""Memory maps of checkpoint files."""

from __future__ import annotations

import mmap
from pathlib import Path

from shipway.errors import ShipwayError


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
