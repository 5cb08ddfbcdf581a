"""Result documents of ``shipway check``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from shipway.measure.environment import describe_environment
from shipway.numerics.campaign import Line, Plan, properties
from shipway.numerics.isolated import Task, run_lines
from shipway.numerics.mutants import mutants, red
from shipway.ops.catalogue import OPS

SCHEMA_VERSION = 1


def run_campaign(todo: Sequence[Task], plan: Plan, done: list[Line], show: Callable[[str], None]) -> None:
    """Runs a campaign; appends each line to ``done`` as it ends, so that what stops the campaign loses none."""
    for line in run_lines(todo, plan, lambda doing: show(f"{len(done) + 1} of {len(todo)}: {doing}")):
        done.append(line)


def campaign_document(todo: Sequence[Task], plan: Plan, done: Sequence[Line]) -> dict[str, Any]:
    """Returns the document of the lines of ``todo`` that are done, in its order."""
    place = {task: number for number, task in enumerate(todo)}
    done = sorted(done, key=lambda line: place[line.op, line.implementation, line.dtype])
    return {
        **head("check"),
        "examples": plan.examples,
        "seed": plan.seed,
        "case": None if plan.case is None else str(plan.case),
        "planned": len(todo),
        "lines": [asdict(line) for line in done],
    }


def check_mutants(ops: Sequence[str], examples: int, seed: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Runs every broken variant of ``ops`` through every property; returns the document.

    ``untested`` holds the properties that no variant turned red.
    """
    import torch

    torch.set_num_threads(1)  # as in a campaign's processes
    todo = [mutant for mutant in mutants() if mutant.op in ops]
    entries = []
    tested: set[tuple[str, str]] = set()
    for number, mutant in enumerate(todo):
        show(f"{number + 1} of {len(todo)}: {mutant.op}: {mutant.defect or 'unbroken'}")
        failures = red(mutant, examples, seed)
        tested |= {(mutant.op, failure.property) for failure in failures if mutant.defect}
        entries.append({"op": mutant.op, "defect": mutant.defect, "red": [asdict(failure) for failure in failures]})
    untested = [[op, prop.name] for op in ops for prop in properties(OPS[op]) if (op, prop.name) not in tested]
    return {**head("check-mutants"), "examples": examples, "seed": seed, "mutants": entries, "untested": untested}


def head(command: str) -> dict[str, Any]:
    """Returns what the document of any check of kernels begins with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(threads=1),
    }


def lines_exit_code(document: dict[str, Any]) -> int:
    """Returns 1 if a line failed, 3 if none ran, else 0."""
    verdicts = {line["verdict"] for line in document["lines"]}
    return 1 if "FAIL" in verdicts else 0 if verdicts & {"PASS", "KNOWN"} else 3


def mutants_exit_code(document: dict[str, Any]) -> int:
    """Returns 1 if a defect survives, an unbroken form is red, or a property is never red; else 0."""
    right = all(bool(entry["red"]) == bool(entry["defect"]) for entry in document["mutants"])
    return 0 if right and not document["untested"] else 1
