"""Kernels compiled without a GPU: what compiles is kept, what does not is one line and takes no other with it."""

import re
import subprocess
from pathlib import Path

import pytest

from shipway.errors import ShipwayError
from shipway.graphs.extension import first_error
from shipway.targets import compiler, emit
from shipway.targets.compiler import ASM, LLVM, OBJECT, Batch
from shipway.targets.emit import emit_all
from shipway.targets.kernels import DeviceKernel, Variant
from targets_kernels import BEYOND, FLAG, GOOD, PRODUCT, SCALE, TOO_WIDE, WIDE, put


@pytest.fixture
def sources(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put(tmp_path / "kernels", monkeypatch)
    return tmp_path / "kernels"


def compiled(arch: str, *kernels: DeviceKernel, kind: str = ASM) -> tuple[list[str], dict[str, str | None]]:
    """What was shown, and the error of each variant."""
    shown: list[str] = []
    (result,) = emit_all([Batch(arch, (kind,), tuple(v for kernel in kernels for v in kernel.every()))], shown.append)
    return shown, {str(variant): emitted.error for variant, emitted in result.items()}


def test_variants_compile_to_what_their_parameters_say(sources: Path) -> None:
    (result,) = emit_all([Batch("sm_80", (ASM, OBJECT), (*SCALE.every(), *FLAG.every()))])
    assert [str(variant) for variant in result] == ["scale[f32,1]", "scale[f16,3]", "flag[0]", "flag[1]"]
    texts = {str(variant): emitted.files[ASM].read_text() for variant, emitted in result.items()}
    assert all(".target sm_80" in text for text in texts.values())
    assert re.search(r"mul(\.rn)?\.f32", texts["scale[f32,1]"])
    assert re.search(r"mul(\.rn)?\.f16", texts["scale[f16,3]"])
    assert [re.search(r"\b77\b", texts[name]) is not None for name in ("flag[0]", "flag[1]")] == [False, True]
    for emitted in result.values():
        assert emitted.files[OBJECT].read_bytes().startswith(b"\x7fELF")
        assert (emitted.together, emitted.cold) == (4, True)
        assert emitted.compile_s > 0


def test_llvm_ir_names_lines_of_the_sources(sources: Path) -> None:
    texts = [emitted.files[LLVM].read_text() for emitted in emit.emit(SCALE.every(), "gfx942", LLVM).values()]
    line = 1 + GOOD.splitlines().index("    p[unsafe_offset=Int(thread_idx.x)] *= factor[t]() * Scalar[t](n)")
    for text in texts:
        assert f'!DIFile(filename: "{sources}/good.mojo"' in text
        assert re.search(rf"!DILocation\(line: {line}\b", text)
        assert "amdhsa" in text


def test_crash_of_the_compiler_is_one_line_and_spares_the_others(sources: Path) -> None:
    shown, errors = compiled("sm_75", SCALE, PRODUCT)
    crash = errors.pop("product[bf16]")
    assert errors == dict.fromkeys(("scale[f32,1]", "scale[f16,3]", "product[f32]"))
    assert crash is not None
    assert crash.startswith("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.mma")
    assert "\n" not in crash
    assert len(shown) == 5  # all four, each module's, each variant of the culprit
    shown, again = compiled("sm_75", SCALE, PRODUCT)
    assert again == errors | {"product[bf16]": crash}
    assert len(shown) == 3  # a kernel that compiles as a whole was kept, a failure was not


def test_error_names_what_failed_and_spares_the_others(sources: Path) -> None:
    _, errors = compiled("sm_80", BEYOND, WIDE)
    failed = errors.pop("scale[f32,5]")
    line = 1 + GOOD.splitlines().index('    comptime assert n < 4, "n must be below 4"')
    assert failed == f"{sources}/good.mojo:{line}:5: error: constraint failed: n must be below 4"
    assert errors == dict.fromkeys(("scale[f32,2]", "wide[300]"))


def test_error_that_the_compiler_reports_with_exit_code_0_counts(sources: Path) -> None:
    _, errors = compiled("gfx942", TOO_WIDE, kind=OBJECT)
    assert errors["wide[30000]"] is not None
    assert "local memory (120000) exceeds limit (65536)" in errors["wide[30000]"]


def test_module_that_does_not_parse_is_compiled_once(sources: Path) -> None:
    (sources / "heavy.mojo").write_text("def product(:\n")
    shown, errors = compiled("gfx1100", PRODUCT)
    assert len(shown) == 1
    assert errors == dict.fromkeys(
        ("product[bf16]", "product[f32]"), f"{sources}/heavy.mojo:1:13: error: expected argument name"
    )


def test_entry_that_is_not_there_names_only_itself(sources: Path) -> None:
    gone = DeviceKernel("gone", "kernels.good", ("t",), (("f32",),), (), matrix=False)
    _, errors = compiled("sm_80", gone, FLAG)
    assert errors == {"gone[f32]": "error: module 'good' does not contain 'gone'", "flag[0]": None, "flag[1]": None}


class Compiler:
    """Stands in for the Mojo compiler: writes what it was asked for, without compiling."""

    def __init__(self, batch: Batch, folder: Path) -> None:
        self.batch, self._folder = batch, folder

    def ended(self) -> bool:
        return True

    def result(self) -> dict[Variant, compiler.Compiled]:
        result = {}
        for number, variant in enumerate(self.batch.variants):
            file = self._folder / f"{number}"
            file.write_text(f"{variant}")
            result[variant] = compiler.Compiled(dict.fromkeys(self.batch.kinds, file), None, 1.0, 7)
        return result


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_Process", Compiler)


@pytest.mark.usefixtures("no_compiler")
def test_what_compiled_is_kept_until_a_source_it_imports_changes(sources: Path) -> None:
    assert len(compiled("sm_80", SCALE, WIDE)[0]) == 1
    assert compiled("sm_80", SCALE, WIDE)[0] == []
    (kept,) = emit_all([Batch("sm_80", (ASM,), tuple(SCALE.every()[:1]))])
    assert [(e.cold, e.together, e.files[ASM].read_text()) for e in kept.values()] == [(False, 7, "scale[f32,1]")]
    (sources / "part.mojo").write_text("# changed\n")  # which `good` imports and `heavy` does not
    assert compiled("sm_80", SCALE, WIDE)[0] == ["sm_80: compiling scale[f32,1] and 1 more"]
    assert len(compiled("sm_90a", SCALE)[0]) == len(compiled("sm_80", SCALE, kind=OBJECT)[0]) == 1


@pytest.mark.usefixtures("no_compiler")
def test_sources_saved_meanwhile_are_not_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler.compile_batches

    def saved_meanwhile(*arguments: object) -> object:
        (sources / "part.mojo").write_text("# changed\n")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "compile_batches", saved_meanwhile)
    with pytest.raises(ShipwayError, match="changed while they were compiled"):
        compiled("sm_80", SCALE)
    monkeypatch.setattr(compiler, "compile_batches", real)
    assert len(compiled("sm_80", SCALE)[0]) == 1


def test_sources_of_a_module_are_those_it_imports(sources: Path) -> None:
    (sources / "inner").mkdir()
    for name, text in (
        ("inner/a", "from ..part import factor\nfrom .b import x\nfrom std.math import exp"),
        ("inner/b", ""),
        ("inner/c", ""),
    ):
        (sources / f"{name}.mojo").write_text(text)
    found = [str(Path(file).relative_to(sources)) for file in emit._sources("kernels.inner.a")]
    assert found == ["inner/a.mojo", "inner/b.mojo", "part.mojo"]


def test_compiler_that_takes_too_long_is_ended(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_LIMIT_S", 0.2)
    monkeypatch.setattr(compiler, "_LIMIT_EACH_S", 0.0)
    _, errors = compiled("sm_80", FLAG)
    assert errors == dict.fromkeys(("flag[0]", "flag[1]"), "the compiler did not end in time")


def test_interrupted_survey_leaves_no_compiler_behind(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def remember(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler.subprocess, "Popen", remember)
    monkeypatch.setattr(compiler.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled("sm_80", FLAG)
    assert [process.returncode for process in started] == [-9]


def test_first_error_of_a_compilation_for_a_gpu_is_its_cause() -> None:
    output = """d.mojo:1:1: error: failed to run the pass manager for offload functions
k/good.mojo:3:5: error: function instantiation failed
k/good.mojo:3:5: note: call expansion failed with parameter value(s): ("n": 5)
k/good.mojo:4:5: note: constraint failed: n must be below 4
mojo: error: failed to run the pass manager
"""
    assert first_error(output) == "k/good.mojo:4:5: error: constraint failed: n must be below 4"
    assert first_error("LLVM ERROR: Cannot select\nPlease submit a bug report") == "LLVM ERROR: Cannot select"
