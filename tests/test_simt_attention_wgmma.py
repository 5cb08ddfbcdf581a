"""Hopper's attention over a prompt, mojo/kernels/gpu/attention_prefill_wgmma.mojo, broken in one place: the simulator
finds each, or its output is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from shipway.simt.device import Device
from shipway.simt.findings import Finding
from simt_emission import MOJO, devices

FILE = "attention_prefill_wgmma"
SOURCE = (MOJO / f"kernels/gpu/{FILE}.mojo").read_text()
USES = ("attention_prefill", "attention_queries", "attention_rows", "attention_step", "staging", "tile_op", "wgmma_op")
HEAD_DIM = 64
ROWS = 70  # two tiles, the last one of two steps
WRONG = "wrong"
NOT_FENCED = "what no fence.proxy.async has followed"
STILL_READ = "write of shared memory that an asynchronous product may still read"
UNSETTLED = "whose sums nothing settles"
UNAWAITED = "that no wgmma.wait_group has awaited"


@dataclass(frozen=True)
class Defect:
    """Pieces of the file, each of which is there once, replaced by others.

    Attributes:
        name: Name of the module.
        pieces: What is replaced, and by what.
        found: What every finding says, or :data:`WRONG` for outputs that are.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    found: str

    def module(self) -> str:
        text = SOURCE
        for old, new in self.pieces:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


NEXT_KEYS = "        begin(0, base, sk)\n        comptime"
NEXT_KEYS_LATER = (NEXT_KEYS, "        comptime")
THEIR_BASE = "        begin(0, base + Int32(KEYS), sk)\n"
SCORES_AWAITED = "        wait_products[0]()\n        settle(scores)\n"
VALUES_ARRIVE = "        arrive_for_products()\n        if edge"
BEGIN_VALUES = "        begin(1, base, sv)\n"
ARRIVE = "    async_copy_wait_group(0)\n    copies_seen()\n    barrier()\n"
CLEANED = "            copies_seen()\n            barrier()\n"

DEFECTS = (
    Defect("none", (), ""),
    Defect("no_proxy_fence", ((ARRIVE, ARRIVE.replace("    copies_seen()\n", "")),), NOT_FENCED),
    Defect("no_proxy_fence_of_cleaned_values", ((CLEANED, "            barrier()\n"),), NOT_FENCED),
    Defect("no_barrier_of_copies", ((ARRIVE, ARRIVE.replace("    barrier()\n", "")),), ""),
    Defect("copies_not_awaited", ((ARRIVE, ARRIVE[ARRIVE.index("    copies") :]),), "asynchronous copy of thread"),
    Defect("keys_overwritten", (NEXT_KEYS_LATER, (SCORES_AWAITED, THEIR_BASE + SCORES_AWAITED)), STILL_READ),
    Defect("keys_overwritten_by_some", (NEXT_KEYS_LATER, (VALUES_ARRIVE, THEIR_BASE + VALUES_ARRIVE)), "write of"),
    Defect(
        "values_overwritten",
        (("        arrive_for_products()\n" + BEGIN_VALUES, BEGIN_VALUES + "        arrive_for_products()\n"),),
        "write of",
    ),
    Defect("scores_not_awaited", ((SCORES_AWAITED, "        settle(scores)\n"),), UNAWAITED),
    Defect("scores_not_settled", ((SCORES_AWAITED, "        wait_products[0]()\n"),), UNSETTLED),
    Defect(
        "sums_not_awaited",
        (("        wait_products[0]()\n        comptime", "        comptime"),),
        UNAWAITED,
    ),
    Defect("no_fence", (("        begin_products(scores)\n", ""),), "asynchronous product without a wgmma.fence"),
    Defect("no_fence_of_sums", (("        begin_products(sums)\n", ""),), "asynchronous product without a wgmma.fence"),
    Defect("flags_overwritten", (("                )\n            barrier()\n", "                )\n"),), ""),
    Defect("outputs_not_awaited", (("    barrier()\n    write_outputs", "    write_outputs"),), "unordered with"),
    Defect("weights_not_masked", (("            mask.hide(scores)", "            pass"),), WRONG),
    Defect(
        "values_not_cleaned",
        (("            clean_values[Step, D, KEYS](sv, odd, thread)", "            odd[unsafe_offset=thread] = 0"),),
        WRONG,
    ),
    Defect("values_cleaned_for_all", (("            if any_odd(odd, lane):", "            if False:"),), WRONG),
)


def device() -> Device:
    imports = [f"from {defect.name} import {FILE} as {defect.name}\n" for defect in DEFECTS]
    texts = {defect.name: defect.module() for defect in DEFECTS} | {"broken": "".join(imports)}
    wanted = json.dumps({"sm_90a": [f"{defect.name}[DType.bfloat16, {HEAD_DIM}, False]" for defect in DEFECTS]})
    return devices("broken", wanted, *USES, texts=json.dumps(texts))["sm_90a"]


def wanted(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """What the definition gives, in float64; every row has the keys up to its own."""
    keys, values = cache[0, 0, :, :, 0].double()
    scores = 0.125 * q[:, 0].double() @ keys.T
    weights = torch.softmax(scores.masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf), 1)
    # 0 times a value that a row does not see is 0, whatever the value.
    return torch.stack([weights[row, : row + 1] @ values[: row + 1] for row in range(ROWS)])[:, None]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defects_are_found(defect: Defect) -> None:
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, 1, HEAD_DIM, generator=drawn).bfloat16()
    cache = torch.randn(1, 1, 2, ROWS, 1, HEAD_DIM, generator=drawn).bfloat16()
    cache[0, 0, 1, 66, 0, 9], cache[0, 0, 1, 5, 0, 3] = torch.nan, torch.inf
    zero, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([0, ROWS], dtype=torch.int32)
    found = []
    for seed in range(6):
        out = torch.full_like(q, float("nan"))
        arguments = [out, q, cache, zero, ends, zero, 1, 1, 1, 1, 0, ROWS, 0, 0, 0.125, 0, 1]
        try:
            device().launch(f"{defect.name}[DType.bfloat16, {HEAD_DIM}, False]", (), 1, arguments, seed=seed)
            right = torch.allclose(out.double(), wanted(q, cache), atol=0.02, rtol=0.02, equal_nan=True)
            found += [] if right else [WRONG]
        except Finding as finding:
            found.append(str(finding))
    assert bool(found) == bool(defect.pieces)
    assert all(defect.found in finding for finding in found), found[0]
