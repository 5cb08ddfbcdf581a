"""Writes the README's Results section from the recorded results, bench/results/*.json, and from nothing else.

python bench/readme_results.py            rewrites the section
python bench/readme_results.py --check    exits 1 when the section is not what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from shipway.measure.result import Result, Start, read_result
from shipway.measure.stats import Estimate, estimate
from shipway.report.decision import decide
from shipway.report.serving import figures
from shipway.report.summary import Row, summarise

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"(?<=<!-- results:begin -->\n).*?(?=<!-- results:end -->)", re.DOTALL)
NOTHING = "None recorded yet: `./dev bench` measures on your machine.\n"
VERDICTS = {"ok": "PASS", "fail": "FAIL", "failed": "broke", "not run": "not run"}


def cell(value: Estimate | None, digits: int, scale: float = 1.0) -> str:
    """Returns the median with its 95% interval where there is one, ``-`` for no value."""
    if value is None:
        return "-"
    text = f"{value.median * scale:.{digits}f}"
    if value.low is None or value.high is None:
        return text
    return f"{text} ({value.low * scale:.{digits}f} to {value.high * scale:.{digits}f})"


def starts(recorded: list[Start]) -> str:
    """Returns the seconds of a cold and of a warm start, ``-`` for one that did not happen in this run."""
    cold = next((start["total_s"] for start in recorded if start["compile_cold"]), None)
    warm = next((start["total_s"] for start in recorded if not start["compile_cold"]), None)
    return " / ".join("-" if seconds is None else f"{seconds:.1f}" for seconds in (cold, warm))


def _short(git_revision: object) -> str:
    """Returns 12 digits of a commit, and whether the tree had other changes."""
    commit, dirty, _ = str(git_revision).partition("-dirty")
    return commit[:12] + dirty


def columns(row: Row, baseline: str) -> dict[str, str]:
    """Returns title -> cell for one route in one dtype; a route without a PASS gets no figures."""
    entry = row.entry
    figures = {
        "decode tokens/s": cell(row.decode, 1),
        f"x {baseline}": cell(row.ratio_decode, 2),
        "% of limit": cell(row.decode_share, 0, 100),
        "TPOT ms": cell(row.tpot_s, 1, 1e3),
        "TTFT ms": cell(row.ttft_s, 0, 1e3),
        "prefill tokens/s": cell(row.prefill, 0),
        f"prefill x {baseline}": cell(row.ratio_prefill, 2),
        "$/Mtok out": "-" if row.usd_out is None else f"{row.usd_out:.3g}",
        "$/Mtok in": "-" if row.usd_in is None else f"{row.usd_in:.3g}",
        "start cold / warm s": starts(entry["starts"]),
    }
    if not row.ranked:
        figures = dict.fromkeys(figures, "-")
    return {"route": f"`{entry['route']}`", "dtype": entry["dtype"], "verdict": VERDICTS[entry["status"]], **figures}


def section(path: Path, result: Result) -> str:
    """Returns the Markdown of one result: what was run where, the table, the decision."""
    work, machine, price = result["workload"], result["environment"], result["price"]
    rows = [columns(row, work["baseline"]) for row in summarise(result)]
    versions = ", ".join(
        f"{name} {machine['packages'][name]}" for name in ("max", "mojo", "torch") if name in machine["packages"]
    )
    lines = [
        f"**{work['model']}**, {work['parameters'] / 1e6:.0f}M parameters, {work['prompt_tokens']} prompt +"
        f" {work['new_tokens']} new tokens, batch {work['batch']}, on {machine['cpu']}, {machine['threads']} threads;"
        f" {versions}; {work['rounds']} interleaved rounds, medians with 95% intervals; ${price['usd_per_hour']:g}/hour"
        f" ({price['machine']}); {result['created'][:10]}, revision {_short(machine['git_revision'])}"
        f" ([{path.name}](bench/results/{path.name})).",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
        "",
        decide(result),
        "",
    ]
    return "\n".join(lines)


def revision(document: dict[str, Any]) -> str:
    """Returns the commit the figures were taken at."""
    return _short(document["environment"]["git_revision"])


def interop_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns what a call costs at each door, from bench/interop_overhead.py."""
    doors = ", ".join(
        f"`{name}` {statistics.median(seconds) * 1e6:.0f} us" for name, seconds in document["seconds_per_call"].items()
    )
    return (
        f"**Cost of a call** on {document['environment']['cpu']}, revision {revision(document)}"
        f" ([{path.name}](bench/results/{path.name})): {doors}.\n"
    )


def load_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns the start of a compiled model, from ``shipway load-time``."""
    samples = document["samples"]
    # Files recorded before load-time wrote them are of this model.
    model, dtype = document.get("model", "SmolLM2-135M-Instruct"), document.get("dtype", "bf16")
    load, first = (statistics.median(sample[key] for sample in samples) for key in ("load_s", "first_token_s"))
    return (
        f"**Start of a compiled model** ({model}, {dtype}) on {document['environment']['cpu']}, revision"
        f" {revision(document)} ([{path.name}](bench/results/{path.name})): `shipway.load` {load:.2f} s, first token"
        f" {first:.2f} s, median of {len(samples)} fresh processes.\n"
    )


def serve_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns the throughput of MAX's server with our architecture and with its own, from ``shipway bench-serve``."""
    work, verdict = document["workload"], document["verdict"]
    if not verdict["ok"]:
        raise ValueError(f"{path.name}: the two servers' tokens differ")
    apart = f"{verdict['first_apart']} prompts apart at near-ties" if verdict["first_apart"] else "all equal"
    ours, stock = (
        f"{server['server']} {cell(estimate(figures(server, work['new_tokens'])['tokens_s']), 1)}"
        for server in document["servers"]
    )
    return (
        f"**Under MAX's server** ({work['model']}, f32, {work['concurrency']} requests in flight of about"
        f" {work['prompt_tokens']} + {work['new_tokens']} tokens, {work['rounds']} rounds) on"
        f" {document['environment']['cpu']}, revision {revision(document)}"
        f" ([{path.name}](bench/results/{path.name})): output tokens/s {ours}, {stock}; {verdict['tokens']} greedy"
        f" tokens compared, {apart}. The servers ran one after the other.\n"
    )


def check_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns the worst ulps of every op, implementation and dtype, from ``shipway check``."""
    lines = {(line["op"], line["implementation"], line["dtype"]): line for line in document["lines"]}
    dtypes = list(dict.fromkeys(line["dtype"] for line in document["lines"]))
    names = list(dict.fromkeys(line["implementation"] for line in document["lines"]))
    counts = Counter(line["verdict"] for line in document["lines"])

    def entry(op: str, name: str) -> str:
        found = (lines.get((op, name, dtype)) for dtype in dtypes)
        return " / ".join(ulps(line) for line in found if line is not None) or "-"

    def ulps(line: dict[str, Any]) -> str:
        if line["verdict"] in ("FAIL", "not run"):
            return line["verdict"]
        return f"{line['max_ulps']:.1f}" + (" KNOWN" if line["verdict"] == "KNOWN" else "")

    table = [
        "| op | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 1),
        *(
            f"| `{op}` | " + " | ".join(entry(op, name) for name in names) + " |"
            for op in dict.fromkeys(line["op"] for line in document["lines"])
        ),
    ]
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    cases = sum(line["examples"] for line in document["lines"])
    cpu = document["environment"]["cpu"]
    simulated = all("@" in name for name in names)
    what, where = (
        ("Worst error of every op's GPU kernels", f"simulated on {cpu}")
        if simulated
        else ("Worst error of every op", f"on {cpu}")
    )
    products = (
        " tf32 rounds the operands of products to 10 bits, and every mlp holds its middle in the activation dtype: that"
        " is thousands of float32's ulps."
    )
    explained = (
        " KNOWN: all held but what the row declares. linear, linear_residual, mlp and lm_head return float32: PyTorch"
        " and MAX round a bf16 product first, and every mlp holds its middle in bf16, which is tens of thousands of"
        " float32's ulps."
    )
    return "\n".join(
        [
            f"**{what}** in ulps of the output's dtype, {' / '.join(dtypes)} where it runs in them,"
            f" over {cases} cases, drawn ones and the pinned traps, {where},"
            f" revision {revision(document)}"
            f" ([{path.name}](bench/results/{path.name})): {total}.{products if simulated else explained}",
            "",
            *table,
            "",
        ]
    )


def mutant_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns how many broken variants were caught, from ``shipway check --mutants``."""
    broken = [entry for entry in document["mutants"] if entry["defect"]]
    red = sum(bool(entry["red"]) for entry in broken)
    return (
        f"**Broken variants** ([{path.name}](bench/results/{path.name})), revision {revision(document)}: {red} of"
        f" {len(broken)} turn a property red; {len(document['untested'])} properties are turned red by none.\n"
    )


def op_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns the seconds from saving a kernel to its line, from ``shipway op --time-edit``."""
    edit, machine = document["time_edit"], document["environment"]
    return (
        f"**From saving a kernel to its line** (`shipway op {document['op']} --impl mojo --time-edit`) on"
        f" {machine['cpu']}, {machine['threads']} threads, revision {revision(document)}"
        f" ([{path.name}](bench/results/{path.name})): {edit['seconds']:.1f} s, limit {edit['limit_s']:.0f} s.\n"
    )


def targets_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns the most registers of every GPU kernel on every target, from ``shipway targets``."""
    entries = document["entries"]
    names, targets = (list(dict.fromkeys(entry[key] for entry in entries)) for key in ("kernel", "target"))
    compiled = [entry for entry in entries if entry["figures"] is not None]
    spills, scalars = (sum(e["figures"][key] > 0 for e in compiled) for key in ("spills", "scalar_spills"))

    def most(kernel: str, target: str) -> str:
        found = [e["figures"]["registers"] for e in compiled if (e["kernel"], e["target"]) == (kernel, target)]
        return str(max(found)) if found else "-"

    return "\n".join(
        [
            f"**Compiled, not run**: {len(compiled)} of {len(entries)} kernel variants compile,"
            f" on {len(targets)} GPU targets together,"
            f" revision {revision(document)} ([{path.name}](bench/results/{path.name})): {spills} spill to memory,"
            f" {scalars} move scalar registers to vector ones, {len(document['exceeded'])} limits of"
            " bench/budgets.toml missed. Most registers of a kernel's variants:",
            "",
            "| kernel | " + " | ".join(targets) + " |",
            "|" + "---|" * (len(targets) + 1),
            *(f"| `{name}` | " + " | ".join(most(name, target) for target in targets) + " |" for name in names),
            "",
        ]
    )


def graph_lines(path: Path, document: dict[str, Any]) -> str:
    """Returns what a step of the decoder's graph launches on each GPU target, from ``shipway targets --graph``."""
    parts = [
        f"{graph['target']}: {', '.join(f'`{launch}`' for launch in graph['launches'])}, made of"
        f" {len(graph['kernels'])} kernels"
        for graph in document["graphs"]
    ]
    return (
        f"**Launched by one step** of {document['route']}'s graph of {document['model']} in {document['dtype']},"
        f" compiled for GPUs that are not there, revision {revision(document)}"
        f" ([{path.name}](bench/results/{path.name})):"
        f" {'; '.join(parts)}.\n"
    )


OTHERS = {
    "bench-serve": serve_lines,
    "check": check_lines,
    "check-mutants": mutant_lines,
    "interop-overhead": interop_lines,
    "load-time": load_lines,
    "op": op_lines,
    "targets": targets_lines,
    "targets-graph": graph_lines,
}


def recorded(path: Path) -> str:
    """Returns the Markdown of one recorded file, by the command that wrote it."""
    document = json.loads(path.read_text())
    if document["command"] in OTHERS:
        return OTHERS[document["command"]](path, document)
    return section(path, read_result(path))


def filled(readme: str, results: list[Path]) -> str:
    """Returns ``readme`` with its Results section made from the recorded files ``results``.

    Raises:
        ValueError: The README does not hold exactly one pair of markers.
    """
    text = "\n".join(map(recorded, results)) or NOTHING
    if len(SECTION.findall(readme)) != 1:
        raise ValueError("README.md needs one pair of results:begin and results:end markers")
    return SECTION.sub(lambda _: text, readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when the section is out of date")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = filled(old, sorted((ROOT / "bench/results").glob("*.json")))
    if check:
        if new != old:
            print("README.md: the Results section is not what bench/results says: run python bench/readme_results.py")
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
