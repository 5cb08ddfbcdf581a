"""The product's own kernels on the nine targets: a named subset in CI, everything with the slow tests."""

import re
from pathlib import Path

import pytest

from shipway.ops.catalogue import OPS
from shipway.targets.arch import ARCHS
from shipway.targets.budgets import exceeded, read_budgets
from shipway.targets.kernels import KERNELS, matching
from shipway.targets.survey import survey

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ROOT / "bench/budgets.toml"

# One target of each kind of matrix instruction gets every kernel, the others those that differ most between targets.
EVERYWHERE = ("sm_90a", "gfx942")
ELSEWHERE = ("rms_norm",)


def not_kept(pattern: str, targets: tuple[str, ...]) -> list[str]:
    entries = survey(matching(pattern), [ARCHS[name] for name in targets], print)
    assert len({(entry.variant, entry.arch) for entry in entries}) == len(entries) > 0
    return [f"{e.kernel} {e.target}: {e.what}" for e in exceeded(entries, read_budgets(BUDGETS))]


def test_every_kernel_keeps_its_budget_on_two_targets() -> None:
    assert not_kept("*", EVERYWHERE) == []


@pytest.mark.parametrize("kernel", ELSEWHERE)
def test_chosen_kernels_keep_their_budgets_on_the_other_targets(kernel: str) -> None:
    assert not_kept(kernel, tuple(name for name in ARCHS if name not in EVERYWHERE)) == []


@pytest.mark.slow
def test_every_kernel_keeps_its_budget_on_every_target() -> None:
    assert not_kept("*", tuple(ARCHS)) == []


def test_table_names_what_there_is() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        text = (ROOT / "mojo" / kernel.module.replace(".", "/")).with_suffix(".mojo").read_text()
        assert f"\ndef {kernel.name}" in text
        assert kernel.ops
        assert set(kernel.ops) <= set(OPS), kernel.name
        assert set(kernel.targets) <= set(ARCHS)
        assert len(set(kernel.variants)) == len(kernel.variants) > 0
        assert all(len(values) == len(kernel.parameters) for values in kernel.variants)


def test_every_launchable_kernel_is_in_the_table() -> None:
    """An entry is a function with the metadata of a launch; a row that is forgotten is never compiled for a GPU."""
    launch = re.compile(r"^@__llvm_metadata\((?:[^()]|\([^()]*\))*\)\ndef (\w+)", re.MULTILINE)
    entries = {
        (f"kernels.gpu.{path.stem}", name)
        for path in (ROOT / "mojo/kernels/gpu").glob("*.mojo")
        for name in launch.findall(path.read_text())
    }
    assert entries == {(kernel.module, kernel.name) for kernel in KERNELS}
