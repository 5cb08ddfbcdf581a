"""Prints what ``shipway check`` found; every line is made from the result document."""

from __future__ import annotations

from typing import Any, TextIO

from shipway.errors import program
from shipway.report.lines import print_table


def print_lines(document: dict[str, Any], out: TextIO) -> None:
    """Prints one aligned line per op, implementation and dtype, then what failed and how to run it again."""
    rows = [["op", "implementation", "dtype", "examples", "shapes", "worst ulps", "cosine diff", "bitwise", "verdict"]]
    for line in document["lines"]:
        # Nothing is known of a line whose process died, or which failed before any output was judged.
        ran = line["examples"] > 0 and (line["verdict"] != "FAIL" or line["max_ulps"] > 0)
        rows.append(
            [
                line["op"],
                line["implementation"],
                line["dtype"],
                str(line["examples"] or "-"),
                str(line["shapes"] or "-"),
                f"{line['max_ulps']:.2f}" if ran else "-",
                f"{line['cosine_diff']:.1e}" if ran else "-",
                "yes" if line["bitwise"] else "no",
                line["verdict"],
            ]
        )
    print_table(rows, out)
    for line in document["lines"]:
        where = f"{line['op']} {line['implementation']} {line['dtype']}"
        for failure in line["known"]:
            print(f"KNOWN {where}: {failure['property']}: {failure['reason']}", file=out)
        for failure, *others in _alike(line["failures"]):
            print(f"FAIL {where}: {failure['property']}: {failure['reason']}", file=out)
            if failure["case"]:
                print(f"     {reproducer(line, failure)}", file=out)
            if others:
                print(f"     the same in {', '.join(other['property'] for other in others)}", file=out)
    for (implementation, reason), ours in _not_run(document["lines"]).items():
        what = (
            f"{ours[0]['op']} {implementation} {ours[0]['dtype']}"
            if len(ours) == 1
            else f"{len(ours)} lines of {implementation}"
        )
        print(f"not run {what}: {reason}", file=out)
    counts = {verdict: sum(line["verdict"] == verdict for line in document["lines"]) for verdict in VERDICTS}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count), file=out)
    if missing := document["planned"] - len(document["lines"]):
        print(f"stopped: {missing} of {document['planned']} lines did not end", file=out)


def _not_run(lines: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Lines that did not run by implementation and reason."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line["reason"]:
            alike.setdefault((line["implementation"], line["reason"]), []).append(line)
    return alike


def _alike(failures: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Failures for one reason together; that of a simulated launch ends with the block and thread it was seen in."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for failure in failures:
        alike.setdefault(failure["reason"].partition(", block ")[0], []).append(failure)
    return list(alike.values())


VERDICTS = ("PASS", "KNOWN", "FAIL", "not run")


def reproducer(line: dict[str, Any], failure: dict[str, Any]) -> str:
    """The command that runs one case again."""
    return (
        f"{program()} check --op {line['op']} --impl {line['implementation']} --dtype {line['dtype']}"
        f" --case '{failure['case']}'"
    )


def print_mutants(document: dict[str, Any], out: TextIO) -> None:
    """Prints one line per broken variant: the properties it turns red and the case of the first."""
    rows = [["op", "defect", "red", "first", "case"]]
    for entry in document["mutants"]:
        first = entry["red"][0] if entry["red"] else {"property": "-", "case": "-"}
        defect = entry["defect"] or "none (unbroken)"
        rows.append([entry["op"], defect, str(len(entry["red"])), first["property"], first["case"]])
    print_table(rows, out, figures=False)
    for entry in document["mutants"]:
        if entry["defect"] and not entry["red"]:
            print(f"SURVIVES {entry['op']}: {entry['defect']}", file=out)
        elif entry["red"] and not entry["defect"]:
            print(f"FAIL {entry['op']}: the unbroken form is red: {entry['red'][0]['reason']}", file=out)
    for op, prop in document["untested"]:
        print(f"UNTESTED {op}: no variant turns {prop} red", file=out)
    if missing := document["planned"] - len(document["mutants"]):
        print(f"stopped: {missing} of {document['planned']} variants did not end", file=out)
    broken = [entry for entry in document["mutants"] if entry["defect"]]
    killed = sum(bool(entry["red"]) for entry in broken)
    print(f"{killed} of {len(broken)} broken variants turn red", file=out)
