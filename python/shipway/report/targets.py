"""Prints what ``shipway targets`` found; every line is made from the result document."""

from __future__ import annotations

from collections import Counter
from typing import Any, TextIO

from shipway.report.lines import print_table

_NONE = "-"


def print_targets(document: dict[str, Any], out: TextIO) -> None:
    """Prints one aligned line per kernel and target, then what does not compile or does not keep its budget."""
    titles = ["kernel", "target", "compile s", "matrix", "loads16", "registers", "scalars", "shared", "stack", "spills"]
    rows = [[*titles, "occupancy", "code bytes"]]
    for entry in document["entries"]:
        needs = entry["figures"]
        if needs is None:
            cells = ["failed", *[_NONE] * 9]
        else:
            cells = [
                f"{entry['compile_s']:.1f}" + ("" if entry["compile_cold"] else "*"),
                " ".join(f"{count} {kind}" for kind, count in needs["matrix"].items()) or _NONE,
                str(sum(count for size, count in needs["loads"].items() if int(size) >= 16)),
                *(str(needs[key]) for key in ("registers", "scalars", "shared", "stack")),
                str(needs["spills"]) + (f" +{needs['scalar_spills']} scalar" if needs["scalar_spills"] else ""),
                f"{entry['occupancy']:.0%}",
                str(needs["code_bytes"]),
            ]
        rows.append([entry["variant"], entry["target"], *cells])
    print_table(rows, out)
    for excess in document["exceeded"]:
        print(f"FAIL {excess['kernel']} {excess['target']}: {excess['what']}", file=out)
    entries = document["entries"]
    compiled = sum(entry["status"] == "ok" for entry in entries)
    kernels, targets = {entry["variant"] for entry in entries}, {entry["target"] for entry in entries}
    if any(entry["figures"] is not None and not entry["compile_cold"] for entry in entries):
        print("* compiled in an earlier run", file=out)
    print(
        f"{compiled} of {len(entries)} compile: kernels {len(kernels)}, targets {len(targets)}; "
        f"limits not kept: {len(document['exceeded'])}",
        file=out,
    )


def print_graphs(document: dict[str, Any], out: TextIO) -> None:
    """Prints for each target the launches of one decode step, equal ones together, then the kernels."""
    for graph in document["graphs"]:
        launches, kernels = graph["launches"], graph["kernels"]
        if graph["error"]:
            print(f"FAIL {document['route']} {document['dtype']} {graph['target']}: {graph['error']}", file=out)
            continue
        print(
            f"{document['route']} {document['dtype']} {graph['target']}: {len(launches)} launches, "
            f"{len(set(launches))} different, {len(kernels)} kernels, compiled in {graph['compile_s']:.0f} s",
            file=out,
        )
        print_table(
            [["launches", "of"], *([str(n), what] for what, n in Counter(launches).items())], out, figures=False
        )
        titles = ["kernel", "target", "registers", "stack", "shared"]
        rows = [[k["name"], graph["target"], str(k["registers"]), str(k["stack"]), str(k["shared"])] for k in kernels]
        print_table([titles, *rows], out)
