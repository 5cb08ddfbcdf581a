"""The machine and software a result was made with, and whether the machine is idle."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("shipway", "max", "mojo", "torch", "numpy", "safetensors", "tokenizers", "gguf", "transformers")
IDLE_BUSY_SHARE = 0.07  # at most this share of all CPU time may be in use on an idle machine


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def cpu_model() -> str:
    """Returns the CPU's name as the kernel gives it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Returns the vector and matrix features of the CPU that kernels here make use of."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "asimddp", "bf16", "sve")
    return [name for name in wanted if name in flags]


def caches() -> dict[str, str]:
    """Returns the size of each cache of the first CPU, ``{"L1 Data": "32K", ..., "L3 Unified": "32768K"}``."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / name)) for name in ("level", "type", "size"))
        if level and kind and size:
            sizes[f"L{level} {kind}"] = size
    return sizes


def last_level_cache_bytes() -> int:
    """Returns the size of the largest cache, 32 MiB where it cannot be read."""
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in caches().values() if size[-1] in units), default=32 << 20)


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def memory_total() -> int:
    """Returns the machine's memory in bytes, or the container's limit where that is lower."""
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(_memory("MemTotal"), int(limit)) if limit and limit.isdigit() else _memory("MemTotal")


def memory_available() -> int:
    """Returns the bytes that can be taken without swapping, within the container's limit where there is one."""
    available = _memory("MemAvailable")
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and limit.isdigit() and used:
        available = min(available, int(limit) - int(used))
    return available


def gpu() -> str:
    """Returns the names of the GPUs the kernel drivers show, or ``"none"``."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", _read(str(path)) or "", re.MULTILINE)
        names.append(found.group(1) if found else "NVIDIA GPU")
    for path in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        found = re.search(r"^gfx_target_version (\d+)$", _read(str(path)) or "", re.MULTILINE)
        if found and int(found.group(1)):
            names.append(f"AMD GPU gfx {found.group(1)}")
    return ", ".join(names) or "none"


def package_versions() -> dict[str, str]:
    """Returns the installed version of every package results depend on; absent ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision() -> str | None:
    """Returns the commit of the source tree, with ``-dirty`` when it has changes; ``None`` outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def install_bytes(packages: tuple[str, ...]) -> int:
    """Returns the bytes on disk of importable packages and everything their distributions require (extras left out)."""
    seen: set[str] = set()
    provided_by = metadata.packages_distributions()  # tvm comes from apache-tvm
    waiting = [name for package in packages for name in provided_by.get(package, [package])]
    total = 0
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement for another platform
        for file in distribution.files or ():
            try:
                total += os.stat(str(file.locate())).st_size
            except OSError:
                continue  # listed but removed, as compiled caches are
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[A-Za-z0-9._-]+", requirement).group())  # type: ignore[union-attr]
    return total


def describe_environment(threads: int) -> dict[str, Any]:
    """Returns what every result file records about the machine and software."""
    return {
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "caches": caches(),
        "memory_bytes": memory_total(),
        "gpu": gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": package_versions(),
        "git_revision": git_revision(),
    }


def busy_share(seconds: float = 0.25) -> float:
    """Returns the share of all CPU time that was in use over ``seconds`` (0 where the kernel does not say)."""

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in (_read("/proc/stat") or "cpu 0").splitlines()[0].split()[1:9]]
        return sum(values), sum(values[3:5])  # idle and iowait

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    elapsed = total_after - total
    return 1 - (idle_after - idle) / elapsed if elapsed else 0.0


def wait_until_idle(limit_s: float) -> float:
    """Waits until the machine is idle, at most ``limit_s``; returns the last busy share seen."""
    end = time.monotonic() + limit_s
    while (busy := busy_share()) > IDLE_BUSY_SHARE and time.monotonic() < end:
        time.sleep(0.25)
    return busy
