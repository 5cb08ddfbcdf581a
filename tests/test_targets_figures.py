"""What is read out of compiled kernels, how many blocks fit, and which budgets are kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from shipway.errors import ShipwayError
from shipway.targets import kernels
from shipway.targets.arch import ARCHS, WARPS
from shipway.targets.budgets import exceeded, read_budgets
from shipway.targets.compiler import ASM, OBJECT, Batch
from shipway.targets.emit import emit_all
from shipway.targets.figures import TF32, Figures, _amd_loads, _matrix, _ptx_loads, figures
from shipway.targets.kernels import Variant
from shipway.targets.survey import Entry, survey
from targets_kernels import HOARD, PRODUCT, SCALE, WIDE, put

PTX = """
	ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd1];
	@%p1 ld.global.nc.L1::no_allocate.v2.f64 	{%fd1, %fd2}, [%rd1];
	ld.global.v8.b32 	{%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
	ld.global.b16 	%rs1, [%rd1+2];
	ld.acquire.gpu.global.u32 	%r1, [%rd1];
	ld.shared.v4.b32 	{%r1, %r2, %r3, %r4}, [%r9];
	ld.param.b64 	%rd1, [f_param_0];
	cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;
	cp.async.ca.shared.global [%r1], [%rd1+64], 4;
"""
AMD = """
	global_load_dwordx4 v[0:3], v4, s[0:1]
	global_load_b128 v[0:3], v[4:5], off
	flat_load_dwordx2 v[0:1], v[2:3]
	buffer_load_dword v1, v2, s[0:3], 0 offen lds
	global_load_ushort v1, v2, s[0:1]
	global_load_short_d16_hi v1, v2, s[0:1]
	global_load_d16_u8 v1, v2, s[0:1]
	global_load_tr_b128 v[0:3], v[4:5], off
	ds_read_b128 v[0:3], v4
	s_load_dwordx4 s[0:3], s[4:5], 0x0
"""


def test_loads_of_global_memory_are_counted_by_their_bytes() -> None:
    assert _ptx_loads(PTX) == {2: 1, 4: 2, 16: 3, 32: 1}
    assert _amd_loads(AMD) == {1: 1, 2: 2, 4: 1, 8: 1, 16: 3}


def test_matrix_instructions_are_counted_by_kind() -> None:
    bf16 = "	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 	{%r1}, {%r2}, {%r3}, {%r4};\n"
    tf32 = "	@%p1 mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 	{%r1}, {%r2}, {%r3}, {%r4};\n"
    assert _matrix(bf16 + tf32 + tf32 + "	cvt.rna.tf32.f32 	%r1, %r2;\n") == {"mma.sync": 1, TF32: 2}


# From the documents that arch.py names. NVIDIA's: 840 combinations of registers and shared memory give what
# cudaOccMaxActiveBlocksPerMultiprocessor of cuda_occupancy.h gives; some of them are here.
@pytest.mark.parametrize(
    ("target", "registers", "shared", "blocks", "occupancy"),
    [
        ("sm_80", 32, 0, 16, 1.0),
        ("sm_80", 33, 0, 12, 0.75),  # allocated as 40: 512 / 40 = 12 warps of a partition
        ("sm_80", 128, 0, 4, 0.25),
        ("sm_80", 129, 0, 3, 0.1875),
        ("sm_80", 32, 49152, 3, 0.1875),  # 164 KiB / (48 + 1)
        ("sm_90a", 32, 49152, 4, 0.25),  # 228 / 49
        ("sm_120a", 32, 0, 12, 1.0),  # 48 warps
        ("sm_120a", 32, 49152, 2, 1 / 6),  # 100 / 49
        ("sm_90a", 256, 0, 0, 0.0),
        ("gfx90a", 50, 0, 8, 1.0),  # the example of llvm-calc-occupancy's manual: 8 waves
        ("gfx942", 72, 0, 7, 0.875),
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 512, 0, 1, 0.125),
        ("gfx942", 32, 33280, 1, 0.125),  # 64 KiB / 32.5
        ("gfx950", 32, 33280, 4, 0.5),  # allocated as 33,280 = 26 * 1280; 160 KiB holds four
        ("gfx1100", 96, 0, 16, 1.0),
        ("gfx1100", 97, 0, 12, 0.75),  # allocated as 120: 1536 / 120
        ("gfx1201", 256, 0, 5, 0.3125),  # allocated as 264
        ("gfx1100", 32, 65536, 2, 0.125),  # 128 KiB of a work-group processor
        ("gfx1100", 32, 65537, 0, 0.0),
    ],
)
def test_blocks_that_fit(target: str, registers: int, shared: int, blocks: int, occupancy: float) -> None:
    arch = ARCHS[target]
    assert arch.blocks(registers, shared) == blocks
    assert arch.occupancy(blocks) == pytest.approx(occupancy)


def test_scalar_registers_limit_waves_on_cdna_only() -> None:
    assert [ARCHS["gfx942"].blocks(32, 0, scalars) for scalars in (96, 97)] == [8, 7]  # 800 / 112
    assert ARCHS["gfx1100"].blocks(32, 0, 106) == 16


def test_block_is_that_of_the_kernels() -> None:
    text = (kernels_folder() / "gpu/block.mojo").read_text()
    assert f"comptime WARPS = {WARPS}\n" in text
    assert {name: arch.threads for name, arch in ARCHS.items() if arch.threads != 128} == dict.fromkeys(
        ("gfx90a", "gfx942", "gfx950"), 256
    )


def kernels_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "mojo/kernels"


def test_figures_of_compiled_kernels(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "kernels", monkeypatch)
    variants = [variant for kernel in (SCALE, PRODUCT, WIDE, HOARD) for variant in kernel.every()]
    archs = [ARCHS[name] for name in ("sm_90a", "gfx942", "gfx1100")]
    entries = survey(variants, archs, lambda line: None)
    assert [entry.error for entry in entries] == [None] * len(entries)
    found = {(str(entry.variant), entry.arch.name): entry.figures for entry in entries}

    def of(variant: str, target: str) -> Figures:
        needs = found[variant, target]
        assert needs is not None
        return needs

    for target, kind in (("sm_90a", "mma.sync"), ("gfx942", "v_mfma"), ("gfx1100", "v_wmma")):
        assert of("product[bf16]", target).matrix == {kind: 1}
        assert of("product[f32]", target).matrix == {}
        assert of("product[f32]", target).loads == {16: 1}
        assert of("wide[300]", target).shared == 1200
        assert of("scale[f32,1]", target).shared == 0
        assert of("hoard[4]", target).spills == of("hoard[4]", target).stack == 0
        assert 0 < of("scale[f32,1]", target).registers < 33
        assert 0 < of("hoard[4]", target).code_bytes < of("hoard[512]", target).code_bytes
        assert of("hoard[512]", target).spills > 0
        assert of("hoard[512]", target).stack > 0
    assert of("product[bf16]", "sm_90a").loads == {8: 1, 16: 1}
    assert of("product[bf16]", "gfx1100").loads == {16: 4}
    assert of("hoard[512]", "sm_90a").registers == 255
    assert exceeded(entries, []) == []


def test_target_without_matrix_instructions_is_seen(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gfx1030 compiles the same source without a word."""
    put(tmp_path / "kernels", monkeypatch)
    (product, _) = PRODUCT.every()
    (result,) = emit_all([Batch("gfx1030", (ASM, OBJECT), (product,))])
    assert result[product].error is None
    like = replace(ARCHS["gfx1100"], name="gfx1030")
    needs = figures(like, result[product].files[ASM], result[product].files[OBJECT])
    (excess,) = exceeded([Entry(product, like, None, 1.0, 1, True, needs)], [])
    assert (excess.kernel, excess.target, excess.what) == ("product[bf16]", "gfx1030", "no matrix instructions")


@pytest.mark.parametrize("text", [b"", b"not an ELF file", b"\x7fELF" + bytes(100)])
def test_linked_kernel_that_is_none_is_one_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.s").write_text("")
    (tmp_path / "a.o").write_bytes(text)
    with pytest.raises(ShipwayError):
        figures(ARCHS["sm_80"], tmp_path / "a.s", tmp_path / "a.o")


GOOD = Figures({"mma.sync": 2, "wgmma": 2}, 100, 0, 1024, 0, 0, 0, 5000, {4: 2, 16: 3})


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", (SCALE, PRODUCT))


def entry(needs: Figures | None, target: str = "sm_80") -> Entry:
    error = None if needs else "k.mojo:1:1: error: e"
    return Entry(PRODUCT.every()[0], ARCHS[target], error, 1.0, 1, True, needs)


def found(budgets: str, tmp_path: Path, needs: Figures | None = GOOD, target: str = "sm_80") -> list[str]:
    (tmp_path / "b.toml").write_text(budgets)
    return [excess.what for excess in exceeded([entry(needs, target)], read_budgets(tmp_path / "b.toml"))]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("limit", "broken", "what"),
    [
        ("spills = 0", {"spills": 8}, "spills 8, at most 0"),
        ("scalar_spills = 0", {"scalar_spills": 2}, "scalar_spills 2, at most 0"),
        ("stack = 0", {"stack": 16}, "stack 16, at most 0"),
        ("registers = 100", {"registers": 101}, "registers 101, at most 100"),
        ("shared = 1024", {"shared": 1025}, "shared 1025, at most 1024"),
        ("code_bytes = 5000", {"code_bytes": 5001}, "code_bytes 5001, at most 5000"),
        ("matrix = 4", {"matrix": {"mma.sync": 3}}, "matrix 3, at least 4"),
        ("wgmma = 2", {"matrix": {"mma.sync": 4}}, "wgmma 0, at least 2"),
        ("loads16 = 3", {"loads": {8: 9, 16: 2}}, "loads16 2, at least 3"),
        ("occupancy = 0.25", {"registers": 129}, "occupancy 0.1875, at least 0.25"),
        ("spills = 0", {"matrix": {}}, "no matrix instructions"),
        ("spills = 0", {"registers": 256}, "not one block fits"),
    ],
)
def test_budget_is_kept_or_named(limit: str, broken: dict[str, object], what: str, tmp_path: Path) -> None:
    budget = f'[[budget]]\nkernels = "product"\n{limit}\n'
    assert found(budget, tmp_path) == []
    assert found(budget, tmp_path, replace(GOOD, **broken)) == [what]  # type: ignore[arg-type]
    elsewhere = f'[[budget]]\nkernels = "product"\ntargets = "gfx*"\n{limit}\n'
    if limit.split()[0] == what.split()[0]:  # the others hold without a budget
        assert found(elsewhere, tmp_path, replace(GOOD, **broken)) == []  # type: ignore[arg-type]


def test_tf32_in_instructions_of_another_format_is_seen() -> None:
    variant = Variant(replace(PRODUCT, variants=(("tf32",),)), ("tf32",))
    assert variant.arguments() == "[tf32=True, t=DType.float32]"

    def excess(matrix: dict[str, int]) -> list[str]:
        entry = Entry(variant, ARCHS["sm_80"], None, 1.0, 1, True, replace(GOOD, matrix=matrix))
        return [found.what for found in exceeded([entry], [])]

    assert excess({TF32: 4}) == []
    assert excess({}) == ["no matrix instructions"]
    assert excess({"mma.sync": 4}) == [f"matrix instructions are mma.sync, not {TF32}"]


@pytest.mark.usefixtures("table")
def test_kernel_that_does_not_compile_keeps_no_budget(tmp_path: Path) -> None:
    budget = '[[budget]]\nkernels = "scale"\nspills = 0\n'
    assert found(budget, tmp_path, None) == ["does not compile: k.mojo:1:1: error: e"]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ('[[budget]]\nkernels = "linaer*"\nspills = 0\n', "budget 1 is of linaer*, which names no kernel"),
        ('[[budget]]\nkernels = "product[f16]"\nspills = 0\n', "which names no kernel"),
        ('[[budget]]\nkernels = "*"\ntargets = "sm_81"\nspills = 0\n', "budget 1 is of sm_81, which names no target"),
        ('[[budget]]\nkernels = "*"\nspils = 0\n', "spils is none of kernels, targets, spills"),
        ('[[budget]]\nkernels = "*"\nspills = "0"\n', "spills is a number from 0, not '0'"),
        ('[[budget]]\nkernels = "*"\nspills = -1\n', "spills is a number from 0, not -1"),
        ('[[budget]]\nkernels = "*"\nspills = nan\n', "spills is a number from 0, not nan"),
        ('[[budget]]\nkernels = "*"\nmatrix = true\n', "matrix is a number from 0, not True"),
        ('[[budget]]\nkernels = "*"\n', "budget 1 sets no limit"),
        ("[[budget]]\nspills = 0\n", "budget 1 needs kernels"),
        ('[budget]\nkernels = "*"\n', "must hold [[budget]] tables"),
        ("other = 1\n", "must hold [[budget]] tables"),
        ("", "must hold [[budget]] tables"),
        ("[[budget]\n", "is no TOML file"),
    ],
)
def test_wrong_budget_is_one_line(budgets: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ShipwayError) as caught:
        found(budgets, tmp_path)
    assert message in str(caught.value)


def test_budgets_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ShipwayError, match=r"cannot read .*b\.toml: No such file"):
        read_budgets(tmp_path / "b.toml")
