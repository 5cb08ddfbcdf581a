"""What a call costs at each door: our ops from torch, the op's own function, plain torch; a compiled model as a module.

./dev python bench/interop_overhead.py --json bench/results/interop.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shipway.interop.torch_ops  # noqa: F401  (registers torch.ops.shipway.*)
from shipway.graphs.single_op import load_ops
from shipway.interop.max_module import MaxModule
from shipway.measure.environment import describe_environment
from shipway.measure.result import SCHEMA_VERSION, check_writable, write_json
from shipway.model.resolve import DEFAULT_MODEL

ROUNDS, CALLS = 15, 200


def main() -> None:
    """Interleaves the doors round by round; the work itself (16 x 16) is next to nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json:
        check_writable(arguments.json)
    x, w, token = torch.randn(1, 16), torch.randn(16, 16), torch.tensor([1])
    op = load_ops("f32", 64)["linear"]
    compiled = torch.compile(lambda a, b: torch.ops.shipway.linear(a, b), fullgraph=True, backend="aot_eager")
    module = MaxModule(DEFAULT_MODEL, "bf16", max_context=16)
    score = module._route.score
    ids = token.to(torch.int32).numpy()
    doors: dict[str, tuple[Callable[[], object], int]] = {
        "torch.nn.functional.linear": (lambda: torch.nn.functional.linear(x, w), CALLS),
        "single_op linear": (lambda: op(x, w), CALLS),
        "torch.ops.shipway.linear": (lambda: torch.ops.shipway.linear(x, w), CALLS),
        "torch.ops.shipway.linear under torch.compile": (lambda: compiled(x, w), CALLS),
        "MaxModule, one token of the default model": (lambda: module(token), 20),
        "the same model without the module": (lambda: score(ids), 20),
    }
    samples: dict[str, list[float]] = {name: [] for name in doors}
    with torch.inference_mode():
        for call, _ in doors.values():
            for _ in range(5):
                call()
        for _ in range(ROUNDS):
            for name, (call, calls) in doors.items():
                began = time.perf_counter()
                for _ in range(calls):
                    call()
                samples[name].append((time.perf_counter() - began) / calls)
    for name, seconds in samples.items():
        print(f"{name:<46}{statistics.median(seconds) * 1e6:10.1f} us a call")
    if arguments.json:
        document = {"schema_version": SCHEMA_VERSION, "command": "interop-overhead", "seconds_per_call": samples}
        write_json(arguments.json, document | {"environment": describe_environment(torch.get_num_threads())})
    sys.stdout.flush()


if __name__ == "__main__":
    main()
