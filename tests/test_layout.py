"""The tree keeps its shape: imports point one way, ``mojo/`` holds no Python, starting up stays cheap."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/shipway"

# From the bottom up. A unit may import itself and whatever stands on a lower line, never its neighbours on its own.
LAYERS = (
    {"errors"},
    {"model"},
    {"artefacts"},
    {"signature"},
    {"graphs"},
    {"jax_parts", "schedule", "targets"},
    {"simt"},
    {"ops"},
    {"numerics"},
    {"routes"},
    {"interop"},
    {"channel", "sampler", "streaming"},
    {"service", "client"},
    {"worker"},
    {"serve"},
    {"compiled"},
    {"api"},
    {"measure"},
    {"report"},
    {"cli"},
)
# Routes stand beside ops and numerics: those judge what a route computes, and a route that knew them could please them.
BESIDE = {"routes": {"ops", "numerics"}}
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# graphs is a link: rglob does not enter it by itself.
MODULES = {module_name(path): path for top in (PACKAGE, PACKAGE / "graphs") for path in sorted(top.rglob("*.py"))}


def unit_of(module: str) -> str:
    """The part of the package that a module belongs to: ``shipway.model.rope`` -> ``model``."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, everywhere: bool) -> Iterator[str]:
    """Modules of the package that ``tree`` imports: at import time, or ``everywhere`` (functions, type checks)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: write shipway.…"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in MODULES else node.module for name in full if node.module in MODULES}
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            yield from imports(node, everywhere)


@pytest.mark.parametrize("module", [name for name in MODULES if unit_of(name)])
def test_imports_point_down(module: str) -> None:
    unit = unit_of(module)
    assert unit in LEVEL, f"{unit} has no place in LAYERS"
    for imported in imports(ast.parse(MODULES[module].read_text()), everywhere=True):
        target = unit_of(imported)
        assert target == unit or LEVEL.get(target, len(LAYERS)) < LEVEL[unit], f"{module} imports {imported}"
        assert target not in BESIDE.get(unit, ()), f"{module} imports {imported}"


def test_no_import_cycles() -> None:
    edges = {name: set(imports(ast.parse(path.read_text()), everywhere=False)) for name, path in MODULES.items()}
    list(TopologicalSorter(edges).static_order())


def test_upward_import_is_seen(tmp_path: Path) -> None:
    upward = ast.parse("def f():\n    from shipway.routes.catalogue import ROUTES\n    import shipway.errors\n")
    assert sorted(imports(upward, everywhere=True)) == ["shipway.errors", "shipway.routes.catalogue"]
    assert list(imports(upward, everywhere=False)) == []


def test_mojo_holds_no_python() -> None:
    assert (ROOT / "mojo").is_dir()
    assert [str(path) for path in (ROOT / "mojo").rglob("*.py*")] == []


def test_links_lead_to_the_sources() -> None:
    for name in ("graphs", "mojo"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("../..", name)


def third_party_after(statement: str) -> set[str]:
    """Top-level packages outside the standard library that are loaded once ``statement`` has run in a new process."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout)) - sys.stdlib_module_names - {"shipway", "__editable__"}


HEAVY = {"torch", "jax", "max", "mojo", "transformers", "tvm", "matplotlib", "huggingface_hub"}


@pytest.mark.parametrize("module", ["shipway", "shipway.cli.app", "shipway.worker", "shipway.routes.catalogue"])
def test_start_up_loads_no_compiler(module: str) -> None:
    assert third_party_after(f"import {module}") & HEAVY == set()


def test_ctrl_c_is_answered_before_anything_else_is_loaded() -> None:
    assert third_party_after("import shipway.cli.main") - third_party_after("pass") == set()


def test_worker_starts_on_the_standard_library_and_numpy() -> None:
    assert third_party_after("import shipway.worker") - third_party_after("pass") <= {"numpy"}
