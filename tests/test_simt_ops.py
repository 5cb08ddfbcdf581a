"""What the ops on a simulated GPU take from the kernels' sources."""

from __future__ import annotations

import re
from pathlib import Path

from shipway.simt import attention_ops, row_ops

KERNELS = Path(__file__).parents[1] / "mojo" / "kernels"


def constant(source: str, name: str) -> str:
    """The value of ``comptime NAME = value`` in a Mojo file."""
    found = re.search(rf"^comptime {name} = (.+)$", (KERNELS / source).read_text(), re.MULTILINE)
    assert found, f"{source} has no {name}"
    return found[1]


def test_scratch_of_greedy_has_the_kernels_spans() -> None:
    assert int(constant("gpu/greedy.mojo", "SPAN")) == row_ops.SPAN


def test_scratch_of_decode_has_the_kernels_splits() -> None:
    assert constant("gpu/attention_decode.mojo", "SPLIT") == "RUN"
    assert int(constant("kv_cache.mojo", "RUN")) == attention_ops.SPLIT
