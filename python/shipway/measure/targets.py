"""The result documents of ``shipway targets``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from shipway.measure.checks import head
from shipway.model.config import ModelConfig
from shipway.targets.arch import Arch
from shipway.targets.budgets import Budget, exceeded
from shipway.targets.graph import compile_route
from shipway.targets.kernels import Variant
from shipway.targets.survey import Entry, survey


def compile_targets(
    variants: Sequence[Variant], archs: Sequence[Arch], budgets: Sequence[Budget], show: Callable[[str], None]
) -> dict[str, Any]:
    """Compiles kernels for targets and holds them to budgets; returns the document."""
    entries = survey(variants, archs, show)
    return {
        **head("targets"),
        "targets": {arch.name: asdict(arch) for arch in archs},
        "entries": [_described(entry) for entry in entries],
        "exceeded": [asdict(excess) for excess in exceeded(entries, budgets)],
    }


def _described(entry: Entry) -> dict[str, Any]:
    needs = entry.figures
    return {
        "kernel": entry.variant.kernel.name,
        "variant": str(entry.variant),
        "target": entry.arch.name,
        "status": "failed" if needs is None else "ok",
        "error": entry.error,
        "compile_s": entry.compile_s,
        "compiled_together": entry.compiled_together,
        "compile_cold": entry.cold,
        "figures": None if needs is None else asdict(needs),
        "blocks": entry.blocks,
        "occupancy": entry.occupancy,
    }


def compile_graphs(
    route: str, model: str, config: ModelConfig, dtype: str, archs: Sequence[Arch], show: Callable[[str], None]
) -> dict[str, Any]:
    """Compiles a whole graph for targets; returns the document."""
    reports = [compile_route(route, config, dtype, arch, show) for arch in archs]
    return {
        **head("targets-graph"),
        "route": route,
        "model": model,
        "dtype": dtype,
        "graphs": [
            {
                "target": report.arch.name,
                "compile_s": report.compile_s,
                "compile_cold": report.cold,
                "error": report.error,
                "launches": list(report.launches),
                "kernels": [asdict(kernel) for kernel in report.kernels],
            }
            for report in reports
        ],
    }


def exit_code(document: dict[str, Any]) -> int:
    """Returns 1 if a kernel or a graph does not compile, or a kernel does not keep a budget, else 0."""
    return 1 if document.get("exceeded") or any(graph["error"] for graph in document.get("graphs", ())) else 0
