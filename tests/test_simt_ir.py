"""The parser of device IR, its floating-point literals and debug locations, and what the rewriting refuses."""

import struct

import pytest

from shipway.errors import ShipwayError
from shipway.simt import kernel
from shipway.simt.device import Device
from shipway.simt.ir import Instruction, parse, tokens_of, type_size
from shipway.simt.literals import legible
from shipway.simt.locations import line_of
from shipway.simt.retarget import retarget

SHARED = 0x20000000


def instruction(line: str) -> Instruction:
    (function,) = parse(f"define void @f() {{\n  {line}\n}}").functions
    return next(function.instructions())


def module(body: str, more: str = "", parameters: str = "ptr %o") -> str:
    return f"define ptx_kernel void @k({parameters}) {{\n{body}\n  ret void\n}}\n{more}"


def rewritten(text: str, check: bool = True) -> str:
    return retarget(parse(text), SHARED, check).text


def test_comments_and_strings_are_told_apart() -> None:
    assert tokens_of('call void asm "a; b", ""() ; c') == ["call", "void", "asm", '"a; b"', ",", '""', "(", ")"]
    assert tokens_of("f(float %1, /* (sub) */ i32 144)") == ["f", "(", "float", "%1", ",", "i32", "144", ")"]
    assert tokens_of('c"\\01\\02", 1.5e+10, -3, @"a b".c') == [
        'c"\\01\\02"',
        ",",
        "1.5e+10",
        ",",
        "-3",
        ",",
        '@"a b"',
        ".c",
    ]


def test_load_and_store_have_type_address_and_alignment() -> None:
    access = instruction(
        "%1 = load <4 x i32>, ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @s, i32 4), align 16"
    ).access()
    assert (access.kind, access.atomic, access.align, type_size(access.type)) == ("load", False, 16, 16)
    assert access.pointer[0] == ["ptr", "addrspace", "(", "3", ")"]
    assert access.pointer[1][0] == "getelementptr"
    access = instruction("store volatile half f0x3C00, ptr %p, align 2, !tbaa !3").access()
    assert (access.kind, access.volatile, type_size(access.type), access.pointer[1]) == ("store", True, 2, ["%p"])
    access = instruction('store atomic i32 5, ptr addrspace(1) %p syncscope("agent") release, align 4').access()
    assert (access.atomic, access.align, access.pointer[1]) == (True, 4, ["%p"])


def test_atomics_and_fences_have_scope_and_ordering() -> None:
    add = instruction('%1 = atomicrmw add ptr addrspace(1) %p, i32 1 syncscope("device") acq_rel, align 4')
    assert add.ordering() == ("device", "acq_rel")
    assert add.atomic_pointer() == (["ptr", "addrspace", "(", "1", ")"], ["%p"])
    swap = instruction("%1 = cmpxchg weak ptr %p, i32 3, i32 9 acquire monotonic, align 4")
    assert (swap.ordering(), swap.atomic_pointer()[1]) == (("", "acquire"), ["%p"])
    assert instruction('fence syncscope("workgroup") release').ordering() == ("workgroup", "release")


def test_calls_have_callee_types_and_values_without_attributes() -> None:
    call = instruction(
        "%r = tail call nnan range(i32 0, 9) <2 x i32> @f(ptr addrspace(3) readonly captures(none) %p, i32 noundef 3)"
    ).call()
    assert (call.callee, call.is_asm, call.returns) == ("@f", False, ["<", "2", "x", "i32", ">"])
    assert call.arguments == [(["ptr", "addrspace", "(", "3", ")"], ["%p"]), (["i32"], ["3"])]
    call = instruction('tail call void asm sideeffect "cp [$0], $1;", "r,n"(i32 %a, i32 16) #2, !dbg !7').call()
    assert (call.callee, call.is_asm, call.arguments[1]) == ("cp [$0], $1;", True, (["i32"], ["16"]))


def test_calls_through_pointers_are_refused() -> None:
    with pytest.raises(ShipwayError, match="calls through pointers"):
        instruction("call void %p(i32 1)").call()


def test_an_instruction_may_span_lines() -> None:
    text = module("  switch i32 0, label %a [\n    i32 1, label %a\n    i32 2, label %b\n  ]\na:\n  br label %b\nb:")
    (function,) = parse(text).functions
    assert [i.opcode for i in function.instructions()] == ["switch", "br", "ret"]
    assert [line for line in function.body if isinstance(line, str)] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("fadd float %x, 0.1", struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        ("fadd float %x, -1.0e-45", -1.401298464324817e-45),
        ("fadd float %x, f0x3F800001", 1.00000011920928955078125),
        ("fadd double %x, 0.1", 0.1),
        ("fadd float %x, -inf", float("-inf")),
    ],
)
def test_literals_become_the_exact_number_of_their_type(given: str, wanted: float) -> None:
    last = legible(tokens_of(given))[-1]
    assert struct.unpack("<d", struct.pack("<Q", int(last, 16)))[0] == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("fadd bfloat %x, 1.0", "0xR3F80"),
        ("fadd bfloat %x, 0.1", "0xR3DCD"),
        ("fadd half %x, 0.1", "0xH2E66"),
        ("fadd half %x, f0x1", "0xH0001"),
        ("select i1 %c, bfloat +qnan, bfloat %x", "0xR7FC0"),
        ("fadd float %x, +qnan", "0x7FF8000000000000"),
        ("fadd float %x, -qnan", "0xFFF8000000000000"),
    ],
)
def test_literals_that_llvm_prints_by_their_bits(given: str, wanted: str) -> None:
    assert wanted in legible(tokens_of(given))


def test_numbers_names_and_labels_are_no_literals() -> None:
    line = tokens_of("%1.5 = getelementptr [2 x i8], ptr @a.0, i64 -12")
    assert legible(line) == line


LOCATED = """
!0 = !DIFile(filename: "/k/mojo/kernels/a.mojo", directory: "")
!1 = !DIFile(filename: "Mojo/stdlib/std/simd.mojo", directory: "")
!2 = distinct !DISubprogram(name: "k", scope: !0, file: !0, line: 3)
!3 = distinct !DISubprogram(name: "load", scope: !1, file: !1, line: 9)
!4 = distinct !DILexicalBlock(scope: !2, file: !0, line: 5, column: 1)
!5 = !DILocation(line: 6, column: 2, scope: !4)
!6 = !DILocation(line: 77, column: 2, scope: !3, inlinedAt: !5)
!7 = !DILocation(line: 78, column: 2, scope: !3)
!8 = !DIFile(filename: "/k/mojo/kernels/b.mojo", directory: "")
!9 = distinct !DISubprogram(name: "tile", scope: !8, file: !8, line: 1)
!10 = !DILocation(line: 12, column: 2, scope: !9, inlinedAt: !5)
!11 = !DILocation(line: 13, column: 2, scope: !9, inlinedAt: !10)
!12 = !DILocation(line: 79, column: 2, scope: !3, inlinedAt: !11)
"""


def test_location_leads_out_of_the_standard_library() -> None:
    parsed = parse(LOCATED)
    assert line_of(parsed, 6) == "mojo/kernels/a.mojo:6"
    assert line_of(parsed, 7) is None
    assert line_of(parsed, None) is None


def test_location_names_every_call_that_it_was_inlined_into() -> None:
    assert line_of(parse(LOCATED), 12) == "mojo/kernels/b.mojo:13 from :12 from a.mojo:6"


def test_accesses_are_announced_with_size_kind_and_promised_alignment() -> None:
    body = "  %v = load <8 x bfloat>, ptr %o, align 16, !dbg !6\n  store i16 3, ptr addrspace(1) null, align 2"
    lines = rewritten(module(body, LOCATED)).splitlines()
    calls = [line for line in lines if line.startswith("call void @simt_access")]
    assert calls == [
        "call void @simt_access(ptr %o, i64 16, i32 0, i32 16, i32 1)",
        "call void @simt_access(ptr null, i64 2, i32 1, i32 2, i32 2)",
    ]
    assert sum("align 1" in line and "align 16" not in line for line in lines) == 2
    made = retarget(parse(module(body, LOCATED)), SHARED, check=True)
    assert made.sites == ["mojo/kernels/a.mojo:6", "near mojo/kernels/a.mojo:6"]
    assert "call void @simt_access" not in rewritten(module(body), check=False)


def test_empty_assembly_settles_its_operand_or_is_nothing() -> None:
    barrier = '  call void asm sideeffect "", "~{memory}"()'
    settled = '  %s = call float asm sideeffect "", "=f,0"(float 1.0)'
    lines = rewritten(module(f"{barrier}\n{settled}")).splitlines()
    assert not any("sideeffect" in line for line in lines)
    assert sum("call float @simt_settle(float" in line for line in lines) == 1
    two = '  %s = call float asm sideeffect "", "=f,0,f"(float 1.0, float 2.0)'
    with pytest.raises(ShipwayError, match="empty assembly of several operands"):
        rewritten(module(two))


def test_shared_variables_get_addresses_one_after_the_other() -> None:
    variables = (
        "@a = internal addrspace(3) global [5 x float] undef, align 16\n"
        "@d = external addrspace(3) global [0 x i8], align 16\n"
        "@b = internal addrspace(3) global i32 undef, align 4\n"
    )
    body = "  store i32 1, ptr addrspace(3) @b, align 4\n  store i32 1, ptr addrspace(3) @d, align 4"
    made = retarget(parse(module(body, variables)), SHARED, check=False)
    assert f"inttoptr (i64 {SHARED + 32} to ptr)" in made.text
    assert f"inttoptr (i64 {SHARED + 48} to ptr)" in made.text
    assert made.dynamic


def test_too_much_shared_memory_is_refused() -> None:
    with pytest.raises(ShipwayError, match="k wants 400000 bytes of shared memory"):
        rewritten(module("", "@a = internal addrspace(3) global [100000 x float] undef, align 16"))


@pytest.mark.parametrize(
    ("body", "more", "said"),
    [
        ("  call void @llvm.nvvm.wishful.thinking()", "", "uses llvm.nvvm.wishful.thinking at .*intrinsics.toml"),
        ('  call void asm sideeffect "frob $0;", "r"(i32 1)', "", "uses asm frob [$]0; at "),
        ("  call i32 @vprintf(ptr null, ptr null)", "", "uses vprintf at "),
        ("  %v = load x86_fp80, ptr %o, align 16", "", "no size is known of the type x86_fp80"),
        ('  fence syncscope("galaxy") release', "", "the scope 'galaxy'"),
        ("", "@g = internal addrspace(1) global i32 0, align 4", "the global variable @g is not simulated"),
        ("", "define ptx_kernel void @l() {\n  ret void\n}", "expected one kernel, found 2"),
        ("", 'module asm "x"', "cannot read module asm"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(body: str, more: str, said: str) -> None:
    with pytest.raises(ShipwayError, match=said) as refused:
        rewritten(module(body, more))
    assert "\n" not in str(refused.value)


def test_what_llvm_cannot_read_is_one_line() -> None:
    with pytest.raises(ShipwayError, match="k: LLVM 22 cannot read it: ") as refused:
        kernel.compile_kernel(module("  %v = frobnicate i32 1"), check=False)
    assert "\n" not in str(refused.value)


def test_an_instruction_that_went_unnoticed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = module("  %v = load i32, ptr %o, align 4\n  store i32 %v, ptr %o, align 4")
    made = retarget(parse(text), SHARED, check=True)
    made.counts["load"] -= 1
    with pytest.raises(ShipwayError, match="LLVM sees 1 load instructions, the simulator 0"):
        kernel._object(kernel._llvm(), made)


def test_only_simulated_targets_make_a_device() -> None:
    with pytest.raises(ShipwayError, match="sm_75 is not simulated: sm_80, "):
        Device("sm_75")
