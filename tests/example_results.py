"""A result of ``shipway bench`` with chosen times, and what is printed of one."""

from __future__ import annotations

import io
from typing import Any

from shipway.measure.result import Entry, Result
from shipway.report.table import print_result

START = {
    "total_s": 2.0,
    "import_s": 1.0,
    "load_s": 0.5,
    "compile_s": 0.25,
    "compile_cold": False,
    "cold_compile_s": 14.0,
    "cold_date": "2026-01-02",
    "artefact_bytes": 3 << 20,
    "notes": [],
}

VERDICT = {
    "ok": True,
    "reason": "",
    "positions": 64,
    "kl_mean": 1e-12,
    "delta_nll_mean": 2e-6,
    "base_kl_mean": None,
    "base_delta_nll_mean": None,
    "agreement": 1.0,
    "first_divergence": None,
}


def entry(route: str, tpots: list[float], ttft: float = 0.2, dtype: str = "f32", **changes: Any) -> Entry:
    """A route whose rounds took ``ttft`` s to the first and ``tpots[r]`` s to each of two further tokens."""
    samples = [
        {"round": r, "position": 0, "prompt_tokens": 100, "times": [ttft, ttft + tpot, ttft + 2 * tpot]}
        for r, tpot in enumerate(tpots)
    ]
    fields = {
        "route": route,
        "dtype": dtype,
        "weights": dtype,
        "status": "ok",
        "reason": None,
        "verdict": VERDICT,
        "starts": [START],
        "install_bytes": 5 << 30,
        "lock_in": "open (MIT)",
        "peak_memory_bytes": 700 << 20,
        "decode_bytes": 1e9,
        "prefill_flops": 2e10,
        "ids": [1, 2, 3],
        "samples": samples,
        "sweep": [],
        "sweep_decode_bytes": {},
    }
    return fields | changes  # type: ignore[return-value]


def result(*entries: Entry, rounds: int = 5) -> Result:
    probes = []
    for number in range(rounds):
        probes += [
            {"round": number, "pattern": "weak", "kind": "read bytes/s", "value": 1e10},
            {"round": number, "pattern": "strong", "kind": "read bytes/s", "value": 4e10},
            {"round": number, "pattern": "gemm", "kind": "f32 GEMM FLOP/s", "value": 2e11},
        ]
    return {
        "schema_version": 1,
        "command": "bench",
        "created": "2026-01-02T03:04:05+0000",
        "environment": {
            "cpu": "a CPU",
            "threads": 2,
            "cores": 2,
            "memory_bytes": 24 << 30,
            "gpu": "none",
            "packages": {"torch": "2.13.0"},
        },
        "workload": {
            "model": "tiny",
            "architecture": "llama",
            "parameters": 1_000_000,
            "prompt_tokens": 100,
            "new_tokens": 3,
            "batch": 1,
            "rounds": rounds,
            "contexts": [],
            "sweep_new_tokens": 16,
            "verdict_tokens": 64,
            "device": "cpu",
            "baseline": "torch-eager",
        },
        "price": {"usd_per_hour": 0.36, "machine": "a machine", "source": "a list, 2026"},
        "rounds": [{"round": number, "busy_share": 0.0} for number in range(rounds)],
        "probes": probes,  # type: ignore[typeddict-item]
        "entries": list(entries),
        "warnings": ["round 2: 30% of the CPU was in use by others"],
    }


SLOW, FAST = [0.1, 0.11, 0.1, 0.12, 0.1], [0.05, 0.05, 0.055, 0.05, 0.06]


def printed(document: Result) -> str:
    out = io.StringIO()
    print_result(document, out)
    return out.getvalue()
