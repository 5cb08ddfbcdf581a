"""``shipway targets``: its table, its JSON, its exit codes."""

import json
from pathlib import Path

import pytest

from command_line import Run, assert_one_line
from shipway.measure import targets as measured
from shipway.targets import figures, kernels
from shipway.targets.arch import ARCHS, Arch
from shipway.targets.figures import Figures
from shipway.targets.kernels import Variant
from shipway.targets.survey import Entry
from targets_kernels import PRODUCT, SCALE

NEEDS = Figures({"mma.sync": 4}, 100, 0, 1024, 0, 0, 0, 5000, {4: 2, 16: 3})
BUDGET = '[[budget]]\nkernels = "*"\nregisters = {}\n'


class Survey:
    """Stands in for the compiler."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.cold = True

    def __call__(self, variants: list[Variant], archs: list[Arch], show: object) -> list[Entry]:
        entries = []
        for arch in archs:
            for variant in variants:
                self.asked.append((str(variant), arch.name))
                error = "k.mojo:1:2: error: e" if str(variant) in self.failing else None
                entries.append(Entry(variant, arch, error, 1.5, 2, self.cold, None if error else NEEDS))
        return entries


@pytest.fixture
def survey(monkeypatch: pytest.MonkeyPatch) -> Survey:
    stand_in = Survey()
    monkeypatch.setattr(measured, "survey", stand_in)
    monkeypatch.setattr(kernels, "KERNELS", (SCALE, PRODUCT))
    return stand_in


def test_table_and_document_say_the_same(run: Run, survey: Survey, tmp_path: Path) -> None:
    code, out, err = run("targets", "--target", "sm_80, gfx94?", "--json", tmp_path / "t.json")
    assert code == 0, err
    document = json.loads((tmp_path / "t.json").read_text())
    assert (document["schema_version"], document["command"], document["exceeded"]) == (1, "targets", [])
    assert [(entry["variant"], entry["target"]) for entry in document["entries"]] == survey.asked
    assert list(document["targets"]) == ["sm_80", "gfx942"]
    first = document["entries"][0]
    assert (first["status"], first["blocks"], first["occupancy"]) == ("ok", 4, 0.25)
    assert (first["compile_s"], first["compiled_together"], first["compile_cold"]) == (1.5, 2, True)
    assert first["figures"]["loads"] == {"4": 2, "16": 3}
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["kernel", "target", "compile"]
    assert " ".join(lines[1].split()) == "scale[f32,1] sm_80 1.5 4 mma.sync 3 100 0 1024 0 0 25% 5000"
    assert lines[-1] == "8 of 8 compile: kernels 4, targets 2; limits not kept: 0"


def test_seconds_of_an_earlier_run_are_marked(run: Run, survey: Survey) -> None:
    assert "*" not in run("targets", "--target", "sm_80")[1]
    survey.cold = False
    lines = run("targets", "--target", "sm_80")[1].splitlines()
    assert lines[1].split()[2] == "1.5*"
    assert lines[-2] == "* compiled in an earlier run"


def test_all_kernels_and_targets_are_asked_for_by_default(run: Run, survey: Survey) -> None:
    assert run("targets")[0] == 0
    assert len(set(survey.asked)) == len(survey.asked) == 4 * len(ARCHS) == 36


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("scale", ["scale[f32,1]", "scale[f16,3]"]),
        ("scale[f16,3], product[*]", ["scale[f16,3]", "product[bf16]", "product[f32]"]),
        ("*[f32*", ["scale[f32,1]", "product[f32]"]),
        ("scale,scale*", ["scale[f32,1]", "scale[f16,3]"]),
    ],
)
def test_kernels_are_chosen_by_name_or_variant(pattern: str, chosen: list[str], run: Run, survey: Survey) -> None:
    assert run("targets", "--kernel", pattern, "--target", "sm_80")[0] == 0
    assert [variant for variant, _ in survey.asked] == chosen


def test_budget_that_is_not_kept_exits_with_1(run: Run, survey: Survey, tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text(BUDGET.format(100))
    assert run("targets", "--budgets", tmp_path / "b.toml", "--target", "sm_80")[0] == 0
    (tmp_path / "b.toml").write_text(BUDGET.format(99))
    code, out, _ = run("targets", "--budgets", tmp_path / "b.toml", "--target", "sm_80", "--json", tmp_path / "t.json")
    assert code == 1
    assert "FAIL product[bf16] sm_80: registers 100, at most 99\n" in out
    assert len(json.loads((tmp_path / "t.json").read_text())["exceeded"]) == 4


def test_kernel_that_does_not_compile_exits_with_1(run: Run, survey: Survey, tmp_path: Path) -> None:
    survey.failing = {"scale[f16,3]"}
    code, out, _ = run("targets", "--target", "sm_80", "--json", tmp_path / "t.json")
    assert code == 1
    assert "FAIL scale[f16,3] sm_80: does not compile: k.mojo:1:2: error: e\n" in out
    entry = json.loads((tmp_path / "t.json").read_text())["entries"][1]
    assert (entry["status"], entry["error"], entry["figures"]) == ("failed", "k.mojo:1:2: error: e", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm_81"], "--target sm_81 is none of sm_80, sm_90a"),
        (["--target", " , "], "--target"),
        (["--kernel", "scael"], "--kernel 'scael' is none of scale, product"),
        (["--kernel", " , "], "--kernel"),
        (["--budgets", "/nowhere/b.toml"], "cannot read /nowhere/b.toml"),
        (["--json", "/nowhere/t.json"], "there is no folder /nowhere"),
        (["--graph", ""], "--graph"),
        (["--route", "serve"], "--route, --model and --dtype go with --graph"),
        (["--dtype", "f32"], "--route, --model and --dtype go with --graph"),
        (["--model", "nosuch"], "--route, --model and --dtype go with --graph"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, run: Run, survey: Survey) -> None:
    code, _, err = run("targets", *arguments)
    assert_one_line(code, 2, err, message)
    assert survey.asked == []


def test_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise figures.PackageNotFoundError(name)

    monkeypatch.setattr(figures, "files", absent)
    figures._cuobjdump.cache_clear()
    with pytest.raises(figures.CannotRunError, match=r"nvidia-cuda-cuobjdump is missing: .*pip install"):
        figures._cuobjdump()
