"""How a case's arrays are filled and laid out. Data come from a seeded generator, so that shrinking works on shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

FILLS = ("normal", "uniform", "constant", "spike", "zero_row", "alternating", "tiny", "levels")
LAYOUTS = ("contiguous", "transposed", "stride2_rows", "stride2_columns")


def fill(rng: np.random.Generator, shape: tuple[int, ...], distribution: str, scale: float = 1.0) -> np.ndarray:
    """Fills an array, float32, any shape with a last axis of rows.

    Args:
        rng: Seeded generator.
        shape: Shape of the result.
        distribution: ``normal``; ``uniform`` (non-negative, so that sums do not cancel); ``constant`` (one value per
            row); ``spike`` (one element per row 100 times larger); ``zero_row`` (the first row is zero);
            ``alternating`` (signs alternate, so that sums cancel); ``tiny`` (near 2^-100 at any scale up to 1, so that
            squares underflow in f32 and bf16; never subnormal, which AVX512_BF16 and some thread pools flush to zero);
            ``levels`` (multiples of 1/2, so that equal values are common).
        scale: Factor on the result.
    """
    x = rng.standard_normal(shape)
    match distribution:
        case "normal":
            pass
        case "uniform":
            x = rng.random(shape)
        case "constant":
            x = np.broadcast_to(rng.standard_normal((*shape[:-1], 1)), shape)
        case "spike":
            if x.size:
                at = rng.integers(0, shape[-1], (*shape[:-1], 1))
                x = np.where(np.arange(shape[-1]) == at, 100 * x, x)
        case "zero_row":
            x[:1] = 0
        case "alternating":
            x = np.abs(x) * (1 - 2.0 * (np.arange(shape[-1]) % 2))
        case "tiny":
            x = x * 2.0**-100 * max(scale, 1.0) / scale
            x[np.abs(x * scale) < 2.0**-126] = 0
        case "levels":
            x = np.rint(2 * x) / 2
        case _:
            raise ValueError(f"distribution {distribution!r} is none of {', '.join(FILLS)}")
    return (x * scale).astype(np.float32)


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A matrix ``[N, K]`` (float32) whose products with unit-variance rows have unit variance."""
    return (rng.standard_normal(shape) / np.sqrt(max(shape[-1], 1))).astype(np.float32)


def ragged(rng: np.random.Generator, batch: int, length: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws a ragged batch: ``offsets [batch + 1]`` and ``start [batch]``, int32.

    The first sequence has exactly ``length`` new tokens and ``start`` cached ones, the others at most that many,
    none included.
    """
    lengths = rng.integers(0, length + 1, batch)
    starts = rng.integers(0, start + 1, batch)
    lengths[0], starts[0] = length, start
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), starts.astype(np.int32)


def sequences(offsets: np.ndarray, start: np.ndarray) -> list[tuple[int, slice, int, int]]:
    """The sequences of a ragged batch: ``(index, rows of the new tokens, cached tokens, all tokens)``."""
    return [
        (b, slice(int(offsets[b]), int(offsets[b + 1])), int(s), int(s) + int(offsets[b + 1] - offsets[b]))
        for b, s in enumerate(start)
    ]


def lay_out(tensor: Any, layout: str) -> Any:
    """Returns a torch view with the same values and another memory layout; what lies in the gaps is NaN.

    Tensors of rank below 2 and integer tensors are returned as they are.
    """
    if layout == "contiguous" or tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    shape = list(tensor.shape)
    axis = {"stride2_rows": 0, "stride2_columns": tensor.dim() - 1}[layout]
    shape[axis] *= 2
    view = tensor.new_full(shape, float("nan"))
    view = view[::2] if axis == 0 else view[..., ::2]
    view.copy_(tensor)
    return view
