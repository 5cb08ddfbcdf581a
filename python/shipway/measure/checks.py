"""Result documents of ``shipway check``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from shipway.measure.environment import describe_environment
from shipway.numerics.campaign import Line, Plan, properties
from shipway.numerics.isolated import Task, run_lines
from shipway.numerics.mutants import Mutant, red
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


def run_mutants(
    todo: Sequence[Mutant], examples: int, seed: int, done: list[dict[str, Any]], show: Callable[[str], None]
) -> None:
    """Runs broken variants through every property; appends what turned red to ``done`` as each ends."""
    import torch

    torch.set_num_threads(1)  # as in a campaign's processes
    for number, mutant in enumerate(todo):
        show(f"{number + 1} of {len(todo)}: {mutant.op}: {mutant.defect or 'unbroken'}")
        failures = red(mutant, examples, seed)
        done.append({"op": mutant.op, "defect": mutant.defect, "red": [asdict(failure) for failure in failures]})


def mutants_document(
    ops: Sequence[str], examples: int, seed: int, planned: int, done: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the document of the variants of ``ops`` that are done, of ``planned``.

    ``untested`` holds the properties that no variant turned red, once all are done.
    """
    tested = {(entry["op"], failure["property"]) for entry in done if entry["defect"] for failure in entry["red"]}
    every = [[op, prop.name] for op in ops for prop in properties(OPS[op])] if len(done) == planned else []
    return {
        **head("check-mutants"),
        "examples": examples,
        "seed": seed,
        "planned": planned,
        "mutants": list(done),
        "untested": [[op, name] for op, name in every if (op, name) not in tested],
    }


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
