"""What the catalogue does not ask of the GPU matrix kernels: packed weights, q/k/v in one launch, any grid and base."""

import numpy as np
import pytest
import torch

from shipway.errors import ShipwayError
from shipway.ops import tf32
from shipway.simt import matrix_ops
from shipway.simt.device import Device
from shipway.targets.kernels import HOPPER

DEVICES = {arch: Device(arch) for arch in ("sm_90a", "gfx942")}
GROUP = 32


def close(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether out is x @ w^T within the a-priori bound of a float32 sum; w is float64."""
    x = x.double()
    bound = 4 * x.shape[1] ** 0.5 * 2**-24 * (x.abs() @ w.abs().T) + 2**-24 * (x @ w.T).abs()
    return bool(((out.double() - x @ w.T).abs() <= bound).all())


def packed(word: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights in a format of ``kernels.gpu.weight_format``, by its definition.

    Returns:
        Stored elements, scales, zero points, and the matrix in float64.
    """
    rng = np.random.default_rng(rows * columns)
    groups = -(-columns // GROUP)
    scales = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (rows, groups)).astype(np.uint8)
    if word == "int8":
        zeros[:] = 0
        stored = values = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    else:
        values = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        # Where a row has an odd number of elements its last byte has a high half of no meaning.
        halves = np.concatenate([values, np.full((rows, columns % 2), 15, np.uint8)], axis=1)
        stored = halves[:, 0::2] | halves[:, 1::2] << 4
    wide = [np.repeat(part.astype(np.float64), GROUP, axis=1)[:, :columns] for part in (scales, zeros)]
    matrix = (values - wide[1]) * wide[0]
    return torch.from_numpy(stored), torch.from_numpy(scales), torch.from_numpy(zeros), torch.from_numpy(matrix)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("word", ["int8", "uint8"])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_packed_weights_are_dequantised_then_multiplied(arch: str, word: str, rows: int) -> None:
    for columns in (1, 15, 33, 576, 1040, 2080):
        stored, scales, zeros, matrix = packed(word, 13, columns)
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
        out = torch.full((rows, 13), torch.nan)
        unread = torch.empty(0)
        DEVICES[arch].launch(
            "linear_gemv",
            (word, "bf16", "1" if rows == 1 else "4", "0", "0"),
            2,
            [out, x, stored, scales, zeros, unread, unread.int(), rows, 13, columns],
        )
        assert close(out, x, matrix), (columns, out)


@pytest.mark.parametrize("arch", DEVICES)
def test_the_grid_and_the_schedule_change_no_bit(arch: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 104, generator=generator).bfloat16() for rows in (70, 97))
    unread = torch.empty(0)
    kernels = [("gemm", ("bf16", "64"), 70), ("gemm", ("bf16", "16"), 70), ("gemv", ("bf16", "bf16", "8"), 7)]
    if arch in HOPPER:
        kernels.append(("wgmma", ("bf16",), 70))
    for kernel, parameters, rows in kernels:
        weights = [w, unread.half(), unread.byte()] if kernel == "gemv" else [w]
        outs = []
        for grid, seed in ((1, 0), (2, 1), (7, 2), (40, 3)):
            out = torch.full((rows, 97), torch.nan)
            arguments = [out, x[:rows], *weights, unread, unread.int(), rows, 97, 104]
            DEVICES[arch].launch(f"linear_{kernel}", (*parameters, "0", "0"), grid, arguments, seed=seed)
            outs.append(out)
        assert close(outs[0], x[:rows], w.double())
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 5, 20, 70])
def test_q_k_and_v_stand_side_by_side(arch: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for columns in (33, 64):
        x, wq, wk, wv = (torch.randn(n, columns, generator=generator).bfloat16() for n in (rows, 70, 9, 9))
        out = matrix_ops.qkv(DEVICES[arch], x, wq, wk, wv)
        assert close(out, x, torch.cat([wq, wk, wv]).double())


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("rows", [2, 40])
def test_rows_that_are_not_aligned_are_read_by_elements(arch: str, rows: int) -> None:
    # 64 columns would do for 16-byte loads, but the arrays begin 2 bytes after a multiple of 16.
    generator = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n * 64 + 1, generator=generator).bfloat16()[1:].view(n, 64) for n in (rows, 50))
    assert x.data_ptr() % 16
    assert w.data_ptr() % 16
    assert close(matrix_ops.linear(DEVICES[arch], x, w), x, w.double())


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16, torch.float32])
def test_hopper_takes_its_own_products_for_tall_matrices(act: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[tuple[str, int], str] = {}
    for arch, device in DEVICES.items():
        for rows in (matrix_ops.FEW_ROWS, matrix_ops.FEW_ROWS + 1):

            def launch(kernel: str, *_: object, key: tuple[str, int] = (arch, rows)) -> None:
                launched[key] = kernel

            monkeypatch.setattr(device, "launch", launch)
            matrix_ops.linear(device, torch.zeros(rows, 16, dtype=act), torch.zeros(16, 16, dtype=act))
    tall = {key for key, kernel in launched.items() if kernel == "linear_wgmma"}
    assert tall == (set() if act == torch.float32 else {("sm_90a", matrix_ops.FEW_ROWS + 1)})
    assert set(launched.values()) - {"linear_wgmma"} == {"linear_gemm"}


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(tf32.operand(x.numpy()))


@pytest.mark.parametrize("rows", [9, 40])
def test_tf32_multiplies_rounded_operands_and_is_taken_only_where_it_is_asked_for(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    device = DEVICES["sm_90a"]
    for columns in (33, 64):
        x, w, up, k, v = (torch.randn(n, columns, generator=generator) for n in (rows, 70, 70, 9, 9))
        # Within the bound of float32 sums: neither truncated operands nor those of another format are.
        out = matrix_ops.linear(device, x, w, tf32=True)
        assert close(out, in_tf32(x), in_tf32(w).double())
        assert not close(out, x, w.double())
        assert close(matrix_ops.linear(device, x, w), x, w.double())
        projections = in_tf32(torch.cat([w, k, v])).double()
        assert close(matrix_ops.qkv(device, x, w, k, v, tf32=True), in_tf32(x), projections)
        gate_up = matrix_ops.gate_up_silu(device, x, w, up, tf32=True)
        wanted = matrix_ops.gate_up_silu(device, in_tf32(x), in_tf32(w), in_tf32(up))
        torch.testing.assert_close(gate_up, wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(gate_up, matrix_ops.gate_up_silu(device, x, w, up), rtol=1e-4, atol=1e-4)


def test_few_rows_are_multiplied_exactly_in_tf32_too() -> None:
    x, w = torch.randn(8, 33), torch.randn(20, 33)
    assert close(matrix_ops.linear(DEVICES["sm_90a"], x, w, tf32=True), x, w.double())


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(ShipwayError, match=r"linear_gemm\[tf32,16,0,0\] is not written for gfx942"):
        matrix_ops.linear(DEVICES["gfx942"], torch.randn(9, 33), torch.randn(20, 33), tf32=True)
