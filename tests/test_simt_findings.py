"""Broken kernels are found and named by their line, unbroken ones are clean: mojo/tests/gpu/patterns.mojo."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from shipway.simt.device import Device
from shipway.simt.findings import Finding
from simt_emission import ARCHS, FOLDER, devices

SEEDS = range(8)
LINES = (FOLDER / "patterns.mojo").read_text().splitlines()


@dataclass
class Trial:
    """A launch of a pattern: blocks, arguments, and what the first argument must hold afterwards."""

    grid: int
    arguments: list[torch.Tensor | int]
    wanted: torch.Tensor


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def reverse(threads: int) -> Trial:
    x = torch.randn(threads)
    return Trial(1, [nan(threads), x], x.flip(0))


def rows(threads: int) -> Trial:
    x = torch.randn(2 * threads + 5)
    return Trial(2, [nan(len(x)), x, len(x)], 2 * x)


def stages(threads: int) -> Trial:
    x = torch.randint(-9, 9, (5, threads)).float()
    return Trial(1, [nan(threads), x, 5], x.flip(1).sum(0))


def in_warp(threads: int) -> Trial:
    x = torch.randn(threads)
    return Trial(1, [nan(threads), x], x.view(4, -1).flip(1).reshape(-1))


def pipeline(threads: int) -> Trial:
    blocks, steps = 4, 3
    value = torch.arange(steps * threads).float().view(steps, threads)
    wanted = []
    for block in range(blocks):
        value = (value.flip(1) if block else value) * 2 + block
        wanted.append(value)
    counters = torch.zeros(blocks, dtype=torch.int32)
    return Trial(blocks, [nan(blocks, steps, threads), counters, steps], torch.stack(wanted))


def last_block(threads: int) -> Trial:
    x = torch.randint(-9, 9, (4, threads)).float()
    return Trial(4, [nan(threads), nan(4, threads), torch.zeros(1, dtype=torch.int32), x], x.sum(0))


def histogram(threads: int) -> Trial:
    x = torch.randint(0, 99, (threads,), dtype=torch.int32)
    return Trial(1, [torch.full((8,), -1, dtype=torch.int32), x], torch.bincount(x % 8, minlength=8).int())


def between_warps(threads: int) -> Trial:
    x = torch.randn(threads)
    return Trial(1, [nan(threads // 4), x], x[: threads // 4].flip(0))


PATTERNS: dict[str, Callable[[int], Trial]] = {
    "reverse": reverse,
    "rows": rows,
    "stages": stages,
    "one_stage": stages,
    "in_warp": in_warp,
    "pipeline": pipeline,
    "last_block": last_block,
    "histogram": histogram,
    "between_warps": between_warps,
}

# Pattern, defect, the kinds of findings it may show as (which comes first depends on the order of the threads), a piece
# of the line that is named, the targets that have it.
EVERYWHERE, NVIDIA, AMD = ARCHS, ("sm_80", "sm_90a"), ("gfx942", "gfx1100", "gfx1201")
LATE = {"race", "uninitialised"}
TURNED, WAITED = "s[unsafe_offset=T - 1 - t]", "(step & 1) * T + T - 1 - t"
MUTANTS: tuple[tuple[str, str, set[str], str, tuple[str, ...]], ...] = (
    ("reverse", "no barrier", LATE, "s[unsafe_offset=", EVERYWHERE),
    ("reverse", "unwritten", {"uninitialised"}, TURNED, EVERYWHERE),
    ("reverse", "half barrier", LATE | {"divergence"}, "", EVERYWHERE),
    ("reverse", "divergent barrier", {"divergence"}, "barrier()", EVERYWHERE),
    ("reverse", "early return", {"divergence"}, "barrier()", EVERYWHERE),
    ("reverse", "beyond shared", {"out of bounds"}, "s[unsafe_offset=T - t]", EVERYWHERE),
    ("reverse", "misaligned", {"misaligned"}, "alignment=8", EVERYWHERE),
    ("rows", "off by one", {"out of bounds"}, "2 * x[unsafe_offset=min", EVERYWHERE),
    ("rows", "beyond the end", {"out of bounds"}, "i + 1", EVERYWHERE),
    ("rows", "before the start", {"out of bounds"}, "i - 1", EVERYWHERE),
    ("rows", "far away", {"out of bounds"}, "1 << 40", EVERYWHERE),
    ("rows", "same cell", {"race"}, "", EVERYWHERE),
    ("rows", "abort", {"crash"}, "abort()", EVERYWHERE),
    ("stages", "no wait", {"race"}, WAITED, NVIDIA),
    ("stages", "wrong group", {"race"}, WAITED, NVIDIA),
    ("stages", "no commit", {"race"}, WAITED, NVIDIA),
    ("stages", "no barrier", LATE, "", EVERYWHERE),
    ("stages", "same stage", {"race"}, "", EVERYWHERE),
    ("one_stage", "no trailing barrier", {"race"}, "", EVERYWHERE),
    ("in_warp", "no syncwarp", LATE, "WARP_SIZE - 1 - Int(lane_id())", EVERYWHERE),
    ("in_warp", "shuffle of a part", {"divergence"}, "shuffle_xor(v, 1)", EVERYWHERE),
    ("in_warp", "two shuffles", {"divergence"}, "shuffle_xor(v, ", EVERYWHERE),
    ("pipeline", "relaxed load", {"race"}, "", EVERYWHERE),
    ("pipeline", "plain load", {"race"}, "", EVERYWHERE),
    ("pipeline", "one early", {"race"}, "", EVERYWHERE),
    ("pipeline", "one late", {"deadlock"}, "", EVERYWHERE),
    ("pipeline", "no barrier after", {"race"}, "", EVERYWHERE),
    ("pipeline", "no barrier before", {"race"}, "", EVERYWHERE),
    ("pipeline", "relaxed store", {"race"}, "", EVERYWHERE),
    ("pipeline", "block scope", {"race", "deadlock"}, "", EVERYWHERE),
    ("pipeline", "no fence", {"race"}, "", AMD),
    ("pipeline", "fence first", {"race"}, "", EVERYWHERE),
    ("last_block", "no fence", {"race"}, "", AMD),
    ("last_block", "no barrier", {"race"}, "", EVERYWHERE),
    ("last_block", "relaxed", {"race"}, "", EVERYWHERE),
    ("last_block", "release only", {"race"}, "", EVERYWHERE),
    ("last_block", "acquire only", {"race"}, "", EVERYWHERE),
    ("last_block", "no barrier for the flag", LATE, "flag[unsafe_offset=0]", EVERYWHERE),
    ("histogram", "no barrier", LATE, "", EVERYWHERE),
    ("histogram", "plain", {"race"}, "s[unsafe_offset=bin]", EVERYWHERE),
    ("between_warps", "relaxed", {"race"}, "", EVERYWHERE),
    ("between_warps", "one early", LATE, "", EVERYWHERE),
)
CLEAN = [(name, "") for name in PATTERNS] + [("pipeline", "fences")]
CLEAN_ON_NVIDIA = [("pipeline", "no fence"), ("last_block", "no fence")]  # a barrier passes on what came before it
WANTED = {
    arch: [
        f'{pattern}["{defect}"]'
        for pattern, defect in dict.fromkeys(
            [*CLEAN, *CLEAN_ON_NVIDIA, *((mutant[0], mutant[1]) for mutant in MUTANTS if arch in mutant[4])]
        )
    ]
    for arch in ARCHS
}


def of(arch: str, *values: object) -> object:
    """A case; those of a target that synchronises as another one does are slow ones."""
    return pytest.param(arch, *values, marks=[pytest.mark.slow] if arch in ("sm_90a", "gfx1201") else [])


def device(arch: str) -> Device:
    return devices("patterns", json.dumps(WANTED))[arch]


def findings(arch: str, pattern: str, defect: str, resident: int | None = None) -> list[Finding | None]:
    """What each seed finds; whatever finds nothing must have the right values."""
    found: list[Finding | None] = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        trial = PATTERNS[pattern](device(arch).threads)
        try:
            device(arch).launch(f'{pattern}["{defect}"]', (), trial.grid, trial.arguments, seed=seed, resident=resident)
        except Finding as finding:
            found.append(finding)
        else:
            found.append(None)
            assert defect or torch.equal(trial.arguments[0], trial.wanted)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("arch", "pattern", "defect"),
    [of(arch, *case) for arch in ARCHS for case in CLEAN + (CLEAN_ON_NVIDIA if arch in NVIDIA else [])],
)
def test_kernels_as_they_should_be_are_clean_in_every_order(arch: str, pattern: str, defect: str) -> None:
    assert findings(arch, pattern, defect) == [None] * len(SEEDS)


@pytest.mark.parametrize(
    ("arch", "pattern", "defect", "kinds", "line"),
    [of(arch, *mutant[:4]) for mutant in MUTANTS for arch in mutant[4]],
)
def test_broken_kernel_is_found_and_named_by_its_line(
    arch: str, pattern: str, defect: str, kinds: set[str], line: str
) -> None:
    found = [finding for finding in findings(arch, pattern, defect) if finding]
    assert found, "no order of the threads showed it"
    for finding in found:
        assert finding.kind in kinds, str(finding)
        assert "\n" not in str(finding)
        assert f"{pattern}" in str(finding)
        if line:
            file, _, number = finding.line.split(" from ")[0].rpartition(":")
            assert file.endswith("mojo/tests/gpu/patterns.mojo"), str(finding)
            assert line in " ".join(LINES[int(number) - 2 : int(number) + 1]), str(finding)


@pytest.mark.parametrize("arch", ARCHS)
def test_too_few_resident_blocks_are_a_deadlock(arch: str) -> None:
    found = findings(arch, "pipeline", "", resident=1)
    # In ascending order each block finds the counters of the one before it at their end: seed 0 does not wait.
    assert found[0] is None
    assert any(finding and finding.kind == "deadlock" and "1 of 4 blocks resident" in str(finding) for finding in found)


def test_both_lines_of_a_race_are_named() -> None:
    found = next(finding for finding in findings("sm_80", "one_stage", "no trailing barrier") if finding)
    numbers = [int(part.split(":")[1].split()[0].rstrip(",)")) for part in str(found).split("patterns.mojo")[1:]]
    pieces = [LINES[number - 1] for number in numbers]
    assert len(pieces) == 2
    assert any("x[unsafe_offset=step * T + t]" in piece for piece in pieces)
    assert any("sum +=" in piece for piece in pieces)
