"""Hopper's asynchronous products against their definition, and broken: mojo/tests/gpu/products.mojo."""

import json

import pytest
import torch

from shipway.simt.device import Device
from shipway.simt.findings import Finding
from simt_emission import devices

DTYPES = ("bfloat16", "float16")
STILL_READ = "write of shared memory that an asynchronous product may still read"
BROKEN = {
    "no proxy fence": "asynchronous product reads what no fence.proxy.async has followed",
    "no barrier": "",
    "no fence": "asynchronous product without a wgmma.fence before it",
    "written before the wait": STILL_READ,
    "read and written before the wait": STILL_READ,
    "written before the wait of another group": STILL_READ,
    "no wait": "use of the sums of an asynchronous product that no wgmma.wait_group has awaited",
    "not settled": "asynchronous product whose sums nothing settles after a wgmma.wait_group",
    "descriptors differ": "of other descriptors or scales than the warpgroup's first lane",
}


def shared(dtype: str, columns: int, swizzled: bool, defect: str = "") -> str:
    return f'from_shared[DType.{dtype}, {columns}, {swizzled}, "{defect}"]'


WANTED = [
    *(shared(dtype, columns, swizzled) for dtype in DTYPES for columns in (64, 128) for swizzled in (False, True)),
    *(shared("bfloat16", 64, False, defect) for defect in BROKEN),
    "from_registers[DType.bfloat16]",  # Mojo has no other
]


def device() -> Device:
    return devices("products", json.dumps({"sm_90a": WANTED}))["sm_90a"]


def laid_out(matrix: torch.Tensor, swizzled: bool) -> torch.Tensor:
    """[rows, 64] as the kernel wants it in shared memory."""
    rows = len(matrix)
    if not swizzled:
        return matrix.view(rows, 8, 8).transpose(0, 1).contiguous()
    units = matrix.view(rows, 8, 8)
    place = torch.arange(8)[None, :] ^ (torch.arange(rows) % 8)[:, None]
    return torch.gather(units, 1, place[:, :, None].expand(-1, -1, 8)).contiguous()


def fragment(thread: int, i: int) -> tuple[int, int]:
    """Row and column of D in the i-th register of a thread of the warpgroup."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + thread % 4 * 2 + i % 2


def check(out: torch.Tensor, wanted: torch.Tensor) -> None:
    for thread in range(128):
        for i in range(out.shape[1]):
            row, column = fragment(thread, i)
            assert abs(out[thread, i] - wanted[row, column]) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("swizzled", [False, True])
def test_products_of_shared_matrices(dtype: str, columns: int, swizzled: bool) -> None:
    kind = getattr(torch, dtype)
    a, b = torch.randn(64, 64).to(kind), torch.randn(columns, 64).to(kind)
    out = torch.full((128, columns // 2), float("nan"))
    device().launch(shared(dtype, columns, swizzled), (), 1, [out, laid_out(a, swizzled), laid_out(b, swizzled)])
    check(out, a.double() @ b.double().T)


def test_products_of_registers_and_a_shared_matrix_along_its_rows() -> None:
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(16, 64).bfloat16()
    held = torch.stack(
        [a[fragment(t, i % 4)[0], t % 4 * 2 + i % 2 + 8 * (i // 4)] for t in range(128) for i in range(8)]
    )
    out = torch.full((128, 32), float("nan"))
    device().launch("from_registers[DType.bfloat16]", (), 1, [out, held, laid_out(b, True)])
    check(out, a.double() @ b.double())


@pytest.mark.parametrize(("defect", "said"), BROKEN.items())
def test_broken_products_are_found(defect: str, said: str) -> None:
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    found: list[str] = []
    for seed in range(6):
        try:
            device().launch(shared("bfloat16", 64, False, defect), (), 1, [torch.zeros(128, 32), a, b], seed=seed)
        except Finding as finding:
            found.append(str(finding))
    assert found
    assert all(said in finding for finding in found)


def test_products_want_a_whole_warpgroup() -> None:
    with pytest.raises(Finding, match=r"divergence: .*wgmma"):
        device().launch(shared("bfloat16", 64, False), (), 1, [torch.zeros(4096).bfloat16()] * 3, threads=96)
