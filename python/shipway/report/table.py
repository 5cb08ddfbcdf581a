"""Prints a result: header, tables, verdicts, warnings, decision."""

from __future__ import annotations

from typing import TextIO

from shipway.measure.probes import GEMM_BF16, GEMM_F32, READ
from shipway.measure.result import Entry, Result, Start
from shipway.measure.stats import Estimate, estimate
from shipway.report.decision import decide
from shipway.report.lines import print_table
from shipway.report.summary import Row, ceilings, summarise, tpot

NONE = "-"


def _interval(value: Estimate | None, digits: int = 1, scale: float = 1.0) -> str:
    """``median [low, high]``, without the interval where there is none."""
    if value is None:
        return NONE
    text = f"{value.median * scale:.{digits}f}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{value.low * scale:.{digits}f}, {value.high * scale:.{digits}f}]"


def _median(value: Estimate | None, digits: int = 1, scale: float = 1.0) -> str:
    return NONE if value is None else f"{value.median * scale:.{digits}f}"


def _usd(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def _bytes(value: float | None) -> str:
    """Mebibytes or gibibytes."""
    if value is None:
        return NONE
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.1f} MiB"


def _cold(first: Start) -> str:
    """Seconds of the compilation, with its date when it was not compiled in this run."""
    if first["compile_cold"]:
        return f"{first['compile_s']:.1f}"
    if first["cold_compile_s"] is None:
        return NONE
    return f"{first['cold_compile_s']:.1f} ({first['cold_date']})"


def _verdict(entry: Entry) -> str:
    if entry["status"] == "not run":
        return "not run"
    if entry["verdict"] is None:
        return "FAILED"
    verdict = "PASS" if entry["verdict"]["ok"] else "FAIL"
    return verdict if entry["status"] != "failed" else f"{verdict}, then FAILED"


def _speed_lines(rows: list[Row]) -> list[list[str]]:
    lines = [["route", "dtype", "verdict", "decode tok/s", "x baseline", "% limit", "TTFT ms", "TPOT ms"]]
    for row in rows:
        lines.append(
            [
                row.entry["route"],
                row.entry["dtype"],
                _verdict(row.entry),
                _interval(row.decode),
                _interval(row.ratio_decode, 2),
                _median(row.decode_share, 0, 100),
                _interval(row.ttft_s, 1, 1e3),
                _interval(row.tpot_s, 2, 1e3),
            ]
        )
    return lines


def _prefill_lines(rows: list[Row]) -> list[list[str]]:
    lines = [["route", "dtype", "prefill tok/s", "x baseline", "% limit", "$/Mtok out", "$/Mtok in"]]
    for row in rows:
        if row.ranked:
            lines.append(
                [
                    row.entry["route"],
                    row.entry["dtype"],
                    _interval(row.prefill),
                    _interval(row.ratio_prefill, 2),
                    _median(row.prefill_share, 0, 100),
                    _usd(row.usd_out),
                    _usd(row.usd_in),
                ]
            )
    return lines


def _one_time_lines(rows: list[Row]) -> list[list[str]]:
    lines = [
        [
            "route",
            "dtype",
            "cold start s",
            "warm start s",
            "cold compile s",
            "warm compile s",
            "import s",
            "load s",
            "artefact",
            "install",
            "cold peak",
            "peak memory",
            "lock-in",
        ]
    ]
    for row in rows:
        entry = row.entry
        if not entry["starts"]:
            continue
        first, last = entry["starts"][0], entry["starts"][-1]
        figures = [
            f"{first['total_s']:.1f}" if first["compile_cold"] else NONE,
            NONE if last["compile_cold"] else f"{last['total_s']:.1f}",
            _cold(first),
            NONE if last["compile_cold"] else f"{last['compile_s']:.1f}",
            f"{last['import_s']:.1f}",
            f"{last['load_s']:.1f}",
        ]
        memory = [entry.get("cold_peak_memory_bytes"), entry["peak_memory_bytes"]]
        sizes = [last["artefact_bytes"], entry["install_bytes"], *memory]
        lines.append([entry["route"], entry["dtype"], *figures, *map(_bytes, sizes), entry["lock_in"]])
    return lines


def _sweep_lines(result: Result, rows: list[Row]) -> list[list[str]]:
    lines = [["route", "dtype", *(f"decode tok/s at {length}" for length in result["workload"]["contexts"])]]
    for row in rows:
        if row.ranked:
            cells = []
            for length in result["workload"]["contexts"]:
                speeds = [1 / tpot(sample) for sample in row.entry["sweep"] if sample["prompt_tokens"] == length]
                cells.append(_interval(estimate(speeds) if speeds else None))
            lines.append([row.entry["route"], row.entry["dtype"], *cells])
    return lines


def _verdict_lines(rows: list[Row]) -> list[str]:
    """What the verdict of each route found; the first divergent token is always shown with its margin."""
    lines = []
    for row in rows:
        found = row.entry["verdict"]
        if found is None:
            continue
        line = (
            f"{row.entry['route']} {row.entry['dtype']} {_verdict(row.entry)}: mean KL {found['kl_mean']:.2g} and mean "
            f"|delta NLL| {found['delta_nll_mean']:.2g} nats over {found['positions']} tokens"
        )
        if found["base_kl_mean"] is not None:
            line += f" (plain PyTorch {found['base_kl_mean']:.2g} and {found['base_delta_nll_mean']:.2g})"
        line += f", {found['agreement']:.1%} of greedy tokens agree"
        if (first := found["first_divergence"]) is not None:
            line += (
                f", first divergence at {first['position']}: {first['route']} for {first['reference']}, top-2 margin "
                f"{first['top2_margin']:.2g}"
            )
        lines.append(line if found["ok"] else f"{line}; {found['reason']}")
    return lines


def _limit_lines(result: Result) -> list[str]:
    """Each measured limit with the pattern that reached it most, over all rounds."""
    lines = []
    for kind, unit in ((READ, "GB/s read"), (GEMM_F32, "GFLOP/s f32 GEMM"), (GEMM_BF16, "GFLOP/s bf16 GEMM")):
        samples = [sample for sample in result["probes"] if sample["kind"] == kind]
        if samples:
            best = max(samples, key=lambda sample: sample["value"])
            values = [value / 1e9 for value in ceilings(result, kind).values()]
            lines.append(f"{min(values):.1f} to {max(values):.1f} {unit} ({best['pattern']})")
    return lines


def _header(result: Result) -> list[str]:
    work, environment, price = result["workload"], result["environment"], result["price"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return [
        f"{work['model']}: {work['architecture']}, {work['parameters'] / 1e6:.1f}M parameters; "
        f"{work['prompt_tokens']} prompt + {work['new_tokens']} new tokens, batch {work['batch']}, "
        f"{work['rounds']} rounds; medians [95% interval]",
        f"{environment['cpu']}, {environment['threads']} of {environment['cores']} cores, "
        f"{_bytes(environment['memory_bytes'])}, GPU: {environment['gpu']}; {packages}",
        f"price: ${price['usd_per_hour']:g}/hour, {price['machine']} ({price['source']})",
        *(["limits measured in these rounds: " + "; ".join(limits)] if (limits := _limit_lines(result)) else []),
    ]


def print_result(result: Result, out: TextIO) -> None:
    """Prints tables, verdicts, warnings and the decision of ``result`` to ``out``."""
    rows = summarise(result)
    blocks = [_speed_lines(rows), _prefill_lines(rows), _one_time_lines(rows)]
    if result["workload"]["contexts"]:
        blocks.append(_sweep_lines(result, rows))
    for line in _header(result):
        print(line, file=out)
    for lines in blocks:
        if len(lines) > 1:
            print(file=out)
            print_table(lines, out)
    print(file=out)
    for line in (*_verdict_lines(rows), *(f"warning: {warning}" for warning in result["warnings"])):
        print(line, file=out)
    if (stopped := result.get("stopped")) is not None:
        print(f"stopped: {result['workload']['rounds']} of {stopped['planned_rounds']} rounds ended", file=out)
    print(file=out)
    print(decide(result), file=out)
