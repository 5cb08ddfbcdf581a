"""Hopper's GEMM, mojo/kernels/gpu/wgmma_tile.mojo, broken in one place: the simulator finds each."""

import json
from dataclasses import dataclass

import pytest
import torch

from shipway.simt.device import Device
from shipway.simt.findings import Finding
from simt_emission import MOJO, devices

SEEDS = range(3)
USES = ("block", "gemm_tile", "linear", "staging", "tile_op", "wgmma_op", "wgmma_tile")
SOURCE = (MOJO / "kernels/gpu/wgmma_tile.mojo").read_text()
KERNEL = """
def linear_{name}(
    dst: MutPointer[Float32, MutAnyOrigin],
    x: ImmPointer[BFloat16, ImmutAnyOrigin],
    w: ImmPointer[BFloat16, ImmutAnyOrigin],
    m: Int32,
    n: Int32,
    k: Int32,
):
    _linear_by_tiles[{name}[DType.bfloat16, 64, 1], False, False](
        dst, x, w, dst.unsafe_mut_cast[False](), w.unsafe_bitcast[Int32](), m, n, k
    )
"""


@dataclass
class Defect:
    """A line of the tile replaced by another.

    Attributes:
        name: Name of the module, and of the tile in it.
        line: The line, the only one that begins so.
        by: What stands there instead.
        found: What the findings say.
    """

    name: str
    line: str
    by: str
    found: str

    def module(self) -> str:
        lines = SOURCE.splitlines()
        (at,) = [at for at, line in enumerate(lines) if line.startswith(self.line)]
        indent = len(self.line) - len(self.line.lstrip())
        lines[at] = " " * indent + self.by
        return "\n".join(lines)


UNREAD = "write of shared memory that an asynchronous product may still read"
UNAWAITED = "that no wgmma.wait_group has awaited"
DEFECTS = (
    Defect("no_proxy_fence", "            copies_seen()", "pass", "what no fence.proxy.async has followed"),
    Defect("no_fence", "        begin_products(sums)", "pass", "asynchronous product without a wgmma.fence before it"),
    Defect(
        "copies_awaited_late",
        "            async_copy_wait_group(",
        "async_copy_wait_group(Int32(AHEAD))",
        "read of shared memory that an asynchronous copy of thread",
    ),
    Defect("no_barrier", "            barrier()", "pass", "read of"),
    Defect("products_awaited_late", "            wait_products[1]()", "wait_products[2]()", UNREAD),
    Defect("last_product_not_awaited", "        wait_products[0]()", "pass", UNAWAITED),
    Defect("one_stage_fewer", "comptime STAGES", "comptime STAGES = AHEAD + 1", UNREAD),
    Defect("no_barrier_between_tiles", "        barrier()", "pass", "write of"),
)


def device() -> Device:
    head = "from kernels.gpu.linear import _linear_by_tiles\n"
    imports = [f"from {defect.name} import WgmmaTile as {defect.name}\n" for defect in DEFECTS]
    bodies = [KERNEL.format(name=defect.name) for defect in DEFECTS]
    texts = {defect.name: defect.module() for defect in DEFECTS} | {"broken": "".join([head, *imports, *bodies])}
    wanted = json.dumps({"sm_90a": [f"linear_{defect.name}" for defect in DEFECTS]})
    return devices("broken", wanted, *USES, texts=json.dumps(texts))["sm_90a"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_broken_tiles_are_found(defect: Defect) -> None:
    # Two tiles a block, of more steps than there are stages.
    x, w = torch.randn(128, 192).bfloat16(), torch.randn(64, 192).bfloat16()
    found: list[str] = []
    for seed in SEEDS:
        out = torch.full((128, 64), float("nan"))
        try:
            device().launch(f"linear_{defect.name}", (), 1, [out, x, w, 128, 64, 192], seed=seed)
        except Finding as finding:
            found.append(str(finding))
    assert found
    assert all(defect.found in finding for finding in found)
