"""The Mojo kernels, precompiled once per source state: what ``custom_extensions=`` takes.

A source directory given to MAX is parsed anew for every graph (2.5 to 4.5 CPU seconds); the ``.mojoc`` is not.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.model.resolve import cache_dir

KERNELS = (Path(__file__).parent.parent / "mojo" / "kernels").resolve()  # as a compiler's message should name it

_STEPS = ("call expansion failed", "function instantiation failed", "error recurses", "remaining errors")
"""Notes on the way from a caller to what failed."""
_NO_CAUSE = "failed to run the pass manager for offload functions"
"""An error beside the one that says why."""


def source_hash() -> str:
    """Hash of every kernel and graph source and of the compiler versions: the state a compiled artefact belongs to."""
    digest = hashlib.sha256(f"{version('mojo')} {version('max')}".encode())
    for folder, pattern in ((KERNELS, "*.mojo"), (Path(__file__).parent, "*.py")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernels_extension() -> Path:
    """Returns the precompiled kernels, compiling them if this source state has none yet.

    Raises:
        ShipwayError: The sources do not compile (the first error, with file and line), or cannot be written.
        CannotRunError: The Mojo compiler is not installed.
    """
    sources = source_hash()
    package = cache_dir() / "mojoc" / sources / "kernels.mojoc"
    if package.exists():
        return package
    try:
        package.parent.mkdir(parents=True, exist_ok=True)
        with open(package.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not package.exists():
                # The compiler names the package after the file it writes, so only the directory is temporary.
                with TemporaryDirectory(dir=package.parent) as partial:
                    _precompile(Path(partial) / package.name)
                    if source_hash() != sources:  # saved meanwhile: what was compiled may be neither state
                        raise ShipwayError("the kernels changed while they were compiled: run it again")
                    (Path(partial) / package.name).rename(package)
    except OSError as error:
        raise ShipwayError(f"cannot write the compiled kernels to {package.parent}: {error.strerror}") from error
    return package


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what MAX raises when a kernel cannot be instantiated into a :class:`ShipwayError` of one line."""
    try:
        yield
    except RuntimeError as error:  # MAX's own message says to file an issue; the compiler's is the cause
        raise ShipwayError(f"the Mojo kernels do not compile: {first_error(str(error.__cause__ or error))}") from error


def first_error(output: str) -> str:
    """Returns the line of a Mojo compiler's output that names file, line and message of the first error.

    An error of an instantiation is followed by notes that lead from the caller down to what failed, which comes last.
    """
    lines = [line for line in output.splitlines() if _NO_CAUSE not in line] or ["no output"]
    starts = [number for number, line in enumerate(lines) if "error:" in line.lower()]
    if not starts:
        return lines[-1]
    block = lines[starts[0] : starts[1] if len(starts) > 1 else None]
    if block[0].lstrip().startswith("error:") or any(step in block[0] for step in _STEPS):  # not what failed
        notes = [line for line in block if ".mojo:" in line and not any(step in line for step in _STEPS)]
        return (notes or block)[-1 if notes else 0].replace("note:", "error:")
    return block[0]


def _precompile(target: Path) -> None:
    try:
        from mojo.run import subprocess_run_mojo
    except ImportError as error:
        remedy = this_python("-m pip install mojo==1.2.0")
        raise CannotRunError(f"the Mojo compiler is missing: {remedy}") from error
    result = subprocess_run_mojo(
        ["precompile", str(KERNELS), "-o", str(target)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise ShipwayError(f"the Mojo kernels do not compile: {first_error(result.stdout)}")
