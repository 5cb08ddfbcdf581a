"""From a Relax module to a shared library for this machine: the passes that apply the schedule rules."""

from __future__ import annotations

import tvm
from tvm import relax

from shipway.schedule.cpu_rules import CPU_RULES


def cpu_options(threads: int) -> dict[str, object]:
    """The target for this machine. The whole processor is meant: LLVM knows its vector width by its name."""
    return {"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": threads}


def compile_library(module: tvm.IRModule, target: tvm.target.Target, path: str) -> None:
    """Schedules every function by the rules of the project, compiles, and writes a shared library."""
    passes = relax.transform
    with target:
        module = tvm.transform.Sequential(
            [
                passes.LegalizeOps(),
                passes.AnnotateTIROpPattern(),
                passes.FoldConstant(),
                passes.FuseOps(),
                passes.FuseTIR(),
                passes.DeadCodeElimination(),
                tvm.s_tir.dlight.ApplyDefaultSchedule(*CPU_RULES),
            ]
        )(module)
    tvm.compile(module, target=target).export_library(path)
