"""The maps of mojo/kernels/gpu/wgmma_op.mojo, by products on the simulator: mojo/tests/gpu/panels.mojo."""

import itertools
import json
from typing import NamedTuple

import pytest
import torch

from shipway.simt.device import Device
from simt_emission import devices


class Form(NamedTuple):
    """A product of 64 rows: b is [K, N] when ``by_k``; panels have rows of ``columns`` elements."""

    dtype: str
    n: int
    k: int
    columns: int
    by_k: bool
    in_registers: bool
    swizzled: bool = True

    @property
    def kernel(self) -> str:
        return f"product[DType.{', '.join(map(str, self))}]"

    def error(self, device: Device) -> float:
        """The largest error of a simulated product of random matrices."""
        kind = getattr(torch, self.dtype)
        a, b = torch.randn(64, self.k).to(kind), torch.randn(self.n, self.k).to(kind)
        out = torch.full((64, self.n), float("nan"))
        device.launch(self.kernel, (), 1, [out, a, b.T.contiguous() if self.by_k else b])
        return float((out - a.double() @ b.double().T).abs().max())


SIZES = ((96, 128, 64), (128, 80, 64), (48, 64, 32), (80, 48, 16))
FORMS = [
    Form(dtype, *size, *order)
    for dtype, size, order in itertools.product(
        ("bfloat16", "float16"), SIZES, itertools.product((False, True), (False, True))
    )
]
PLAIN = Form("bfloat16", 96, 128, 64, False, False, swizzled=False)
WANTED = json.dumps({"sm_90a": [form.kernel for form in [*FORMS, PLAIN]]})


def device() -> Device:
    return devices("panels", WANTED, "wgmma_op", "tile_op")["sm_90a"]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_panels(form: Form) -> None:
    assert form.error(device()) < 1e-4


def test_panels_without_their_swizzle_are_wrong() -> None:
    assert PLAIN.error(device()) > 1
