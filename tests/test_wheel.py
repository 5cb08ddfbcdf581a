"""The sdist and the wheel hold everything a run needs, and the wheel runs where there is no checkout."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tracked(folder: str, suffix: str) -> set[str]:
    """Tracked files below ``folder`` by their names in the package: ``shipway/graphs/ops.py`` for ``graphs/ops.py``."""
    names = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name.removeprefix("python/shipway/") for name in names.splitlines() if name.endswith(suffix)}
    return {f"shipway/{name}" for name in files}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the checkout and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("shipway-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: the wheel installed, its dependencies lent by this environment.

    A folder named in a .pth file lends its packages and not its own .pth files, so this environment's editable
    installation of the checkout stays out.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin/python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
    )
    (site / "lent.pth").write_text(str(importlib.metadata.distribution("torch").locate_file("")))
    return python


def run(python: Path, *arguments: str, **added: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([python, *arguments], cwd=python.parent, env=env | added, capture_output=True, text=True)


def test_wheel_holds_modules_kernels_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = tracked("python/shipway", ".py") | tracked("graphs", ".py") | tracked("mojo", ".mojo")
    wanted |= tracked("python/shipway/data", "") | tracked("python/shipway/simt", "")
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert any(PurePosixPath(name).match("shipway/mojo/**/*.mojo") for name in wanted)
    assert any(name.startswith("shipway/graphs/") for name in wanted)


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    for name in zipfile.ZipFile(wheel).namelist():
        assert name.startswith(("shipway/", "shipway-")), name
        assert not name.endswith((".pyc", ".mojoc")), name


def test_sdist_holds_licence_and_sources(dist: Path) -> None:
    with tarfile.open(next(dist.glob("shipway-*.tar.gz"))) as sdist:
        names = sdist.getnames()
    inside = {name.split("/", 1)[1] for name in names if "/" in name}
    wanted = {f"python/{name}" for name in tracked("graphs", ".py") | tracked("mojo", ".mojo")}
    assert {"LICENSE", "README.md", "pyproject.toml"} | wanted <= inside


def test_every_module_of_the_wheel_is_found_outside_the_checkout(python: Path) -> None:
    code = (
        "import json, pkgutil, shipway\n"
        "names = [m.name for m in pkgutil.walk_packages(shipway.__path__, 'shipway.')]\n"
        "print(json.dumps([shipway.__file__, names]))"
    )
    done = run(python, "-c", code)
    assert done.returncode == 0, done.stderr
    where, names = json.loads(done.stdout)
    assert Path(where).is_relative_to(python.parent.parent)
    assert {"shipway.cli.main", "shipway.graphs.ops", "shipway.routes.mojo_graph"} <= set(names)


def test_command_of_the_wheel_lists_its_routes(python: Path) -> None:
    done = run(python, str(python.parent / "shipway"), "routes")
    assert done.returncode == 0, done.stderr
    assert "mojo-graph" in done.stdout


def test_kernels_of_the_wheel_compile(python: Path, tmp_path: Path) -> None:
    code = "from shipway.graphs.extension import KERNELS, kernels_extension\nprint(KERNELS)\nprint(kernels_extension())"
    done = run(python, "-c", code, SHIPWAY_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    kernels, package = map(Path, done.stdout.splitlines())
    assert kernels.is_relative_to(python.parent.parent)
    assert package.is_relative_to(tmp_path)
    assert package.stat().st_size > 0
