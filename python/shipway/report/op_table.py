"""Prints the result of ``shipway op``: a line per implementation, dtype and shape, and what failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TextIO

from shipway.measure.op_bench import Entry, OpResult
from shipway.measure.probes import GEMM_BF16, GEMM_F32, GEMM_KIND, READ
from shipway.measure.stats import Estimate, estimate, ratio_per_round
from shipway.report.lines import print_table

NONE = "-"
_TITLES = (
    "impl",
    "shape",
    "dtype",
    "verdict",
    "ulps",
    "cold us",
    "warm us",
    "GB/s",
    "GFLOP/s",
    "% limit",
    "bound by",
    "x torch cold",
    "x torch warm",
)


@dataclass(frozen=True)
class OpRow:
    """Figures of one entry, ``None`` where it has none.

    GB/s, GFLOP/s and the share of the limit are those of a call on a cold cache.

    Attributes:
        entry: Its entry.
        cold_s: Seconds of a call on a cold cache.
        warm_s: On a warm one.
        bytes_s: Bytes that must be moved per second.
        flops_s: FLOPs per second.
        share: Share of the machine's limit that was reached.
        bound: ``"memory"`` or ``"compute"``: which limit it is.
        ratio_cold: Speed over PyTorch's on a cold cache, taken per round.
        ratio_warm: On a warm one.
    """

    entry: Entry
    cold_s: Estimate | None
    warm_s: Estimate | None
    bytes_s: float | None
    flops_s: float | None
    share: float | None
    bound: str
    ratio_cold: Estimate | None
    ratio_warm: Estimate | None


def per_round(entry: Entry, cache: str) -> dict[int, float]:
    """Median seconds of a call in each round; nothing for an entry that did not hold to the end."""
    if entry["status"] != "ok":
        return {}
    return {sample["round"]: median(sample["seconds"]) for sample in entry["samples"] if sample["cache"] == cache}


def limit_of(result: OpResult, entry: Entry) -> tuple[float, str] | None:
    """Seconds that one call takes at least on this machine, and which limit says so; ``None`` without probes.

    The roofline: the slower of moving the bytes at the read bandwidth and computing the FLOPs at the GEMM peak, both as
    probed beside the entry's own rounds.
    """
    best: dict[str, float] = {}
    for probe in result["probes"]:
        if (probe["dtype"], probe["shape"]) == (entry["dtype"], entry["shape"]):
            best[probe["kind"]] = max(best.get(probe["kind"], 0.0), probe["value"])
    peak = GEMM_KIND.get(entry["dtype"], "")
    if READ not in best or peak not in best:
        return None
    return max((entry["bytes"] / best[READ], "memory"), (entry["flops"] / best[peak], "compute"))


def summarise(result: OpResult) -> list[OpRow]:
    """Returns one row per entry of ``result``, in its order."""
    bases = {
        (entry["dtype"], entry["shape"]): entry
        for entry in result["entries"]
        if entry["implementation"] == result["baseline"]
    }
    rows = []
    for entry in result["entries"]:
        base = bases.get((entry["dtype"], entry["shape"]))
        times = {cache: per_round(entry, cache) for cache in ("cold", "warm")}
        ratios = {
            cache: ratio_per_round(per_round(base, cache), times[cache]) if base is not None else None
            for cache in times
        }
        cold, warm = (estimate(list(values.values())) if values else None for values in times.values())
        limit = limit_of(result, entry)
        rows.append(
            OpRow(
                entry=entry,
                cold_s=cold,
                warm_s=warm,
                bytes_s=entry["bytes"] / cold.median if cold else None,
                flops_s=entry["flops"] / cold.median if cold else None,
                share=limit[0] / cold.median if cold and limit else None,
                bound=limit[1] if cold and limit else NONE,
                ratio_cold=ratios["cold"],
                ratio_warm=ratios["warm"],
            )
        )
    return rows


def _interval(value: Estimate | None, scale: float = 1.0) -> str:
    """``median [low, high]`` in three digits."""
    if value is None:
        return NONE
    text = _digits(value.median * scale)
    if value.low is None or value.high is None:
        return text
    return f"{text} [{_digits(value.low * scale)}, {_digits(value.high * scale)}]"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _figure(value: float | None, scale: float = 1.0) -> str:
    return NONE if value is None else _digits(value * scale)


def verdict_word(entry: Entry) -> str:
    """``PASS``, ``FAIL``, ``KNOWN`` (all held but declared failures), ``FAILED`` (broke) or ``not run``."""
    if entry["status"] == "ok" and entry["verdict"] is not None:
        return "KNOWN" if entry["verdict"]["known"] else "PASS"
    return {"fail": "FAIL", "failed": "FAILED"}.get(entry["status"], "not run")


def _cells(row: OpRow) -> list[str]:
    entry = row.entry
    verdict = entry["verdict"]
    return [
        entry["implementation"],
        " ".join(f"{name}={size}" for name, size in entry["dims"].items()),
        entry["dtype"],
        verdict_word(entry),
        f"{verdict['max_ulps']:.2f}" if verdict is not None and verdict["ok"] else NONE,
        _interval(row.cold_s, 1e6),
        _interval(row.warm_s, 1e6),
        _figure(row.bytes_s, 1e-9),
        _figure(row.flops_s, 1e-9) if entry["flops"] else NONE,
        _figure(row.share, 100),
        row.bound,
        _interval(row.ratio_cold),
        _interval(row.ratio_warm),
    ]


def _header(result: OpResult) -> list[str]:
    environment = result["environment"]
    limits = []
    for kind, unit in ((READ, "GB/s read"), (GEMM_F32, "GFLOP/s f32 GEMM"), (GEMM_BF16, "GFLOP/s bf16 GEMM")):
        if values := [probe["value"] for probe in result["probes"] if probe["kind"] == kind]:
            limits.append(f"{max(values) / 1e9:.1f} {unit}")
    return [
        f"{result['op']} on {environment['cpu']}, {environment['threads']} threads; {result['rounds']} interleaved "
        f"rounds, medians [95% interval]; cold: arguments rotate through more than "
        f"{2 * result['cache_bytes'] / (1 << 20):.0f} MiB",
        *([f"limits probed in these rounds: {', '.join(limits)}"] if limits else []),
    ]


def _remarks(entries: list[Entry]) -> list[str]:
    """Why an entry has no figures, and what is declared; one line each, however many entries it holds for."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        where = f"{entry['dtype']} {entry['shape']}"
        word = verdict_word(entry)
        if entry["reason"]:
            said.setdefault((entry["implementation"], word, entry["reason"]), []).append(where)
        for known in entry["verdict"]["known"] if word == "KNOWN" and entry["verdict"] else ():
            said.setdefault((entry["implementation"], word, known), []).append(where)
    lines = [f"{name} {word} ({', '.join(places)}): {reason}" for (name, word, reason), places in said.items()]
    if converting := dict.fromkeys(entry["implementation"] for entry in entries if entry["converts"]):
        lines.append(f"{', '.join(converting)}: each call includes converting its arguments from torch tensors")
    return lines


def print_op(result: OpResult, shown: Callable[[Entry], bool], out: TextIO) -> None:
    """Prints the entries of ``result`` that ``shown`` accepts."""
    rows = [row for row in summarise(result) if shown(row.entry)]
    for line in _header(result):
        print(line, file=out)
    print_table([list(_TITLES), *map(_cells, rows)], out)
    for line in (*_remarks([row.entry for row in rows]), *(f"warning: {warning}" for warning in result["warnings"])):
        print(line, file=out)
    if (edit := result["time_edit"]) is not None:
        held = "held" if edit["held"] else "missed"
        print(
            f"{edit['seconds']:.1f} s from saving {edit['file']} to its line (limit {edit['limit_s']:g} s: {held})",
            file=out,
        )
