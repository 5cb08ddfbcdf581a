"""The Mojo kernels, precompiled once per source state: what ``custom_extensions=`` takes.

A source directory given to MAX is parsed anew for every graph (2.5 to 4.5 CPU seconds); the ``.mojoc`` is not.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.model.resolve import cache_dir

KERNELS = Path(__file__).parent.parent / "mojo" / "kernels"


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
    package = cache_dir() / "mojoc" / source_hash() / "kernels.mojoc"
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
                    (Path(partial) / package.name).rename(package)
    except OSError as error:
        raise ShipwayError(f"cannot write the compiled kernels to {package.parent}: {error.strerror}") from error
    return package


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
        lines = result.stdout.splitlines()
        first = next((line for line in lines if "error:" in line), lines[-1] if lines else "no output")
        raise ShipwayError(f"the Mojo kernels do not compile: {first}")
