"""Weights and KV cache in blocks of memory laid out for reading at full bandwidth.

Rows start on cache lines and the block is backed by huge pages, where the operating system has them: decoding
SmolLM2-135M was measured 1.26 (f32) to 1.28 (bf16) times faster than from one heap array per tensor, 1.08 to 1.10 of
it by alignment alone (interleaved, 2 cores of a Zen 4 guest). Every route on the CPU reads the same layout.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from math import prod

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.weights import PLAIN, Weight

_CACHE_LINE, _HUGE_PAGE = 64, 2 << 20


def zeros(shape: tuple[int, ...], dtype: type[np.generic], what: str) -> np.ndarray:
    """Returns an array of zeros on huge pages.

    Raises:
        ShipwayError: There is no memory for this much of ``what``.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    return _block(size, what)[:size].view(dtype).reshape(shape)


def place(weights: Mapping[str, Weight], matrices: str, vectors: str) -> dict[str, np.ndarray]:
    """Decodes every weight once, straight into place.

    Args:
        weights: The checkpoint's tensors.
        matrices: Format of those with two dimensions: ``"f32"``, ``"bf16"`` (uint16 bits) or ``"f16"``.
        vectors: Format of those with one: norm weights and biases.

    Returns:
        Arrays by name, in the checkpoint's order; they keep the block alive.

    Raises:
        ShipwayError: A tensor cannot be decoded, or the memory is not to be had.
    """
    formats = {name: matrices if len(weight.shape) == 2 else vectors for name, weight in weights.items()}
    sizes = {name: prod(weights[name].shape) * PLAIN[kept].itemsize for name, kept in formats.items()}
    total = sum(-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes.values())
    memory = _block(total, "weights")
    at = 0
    placed = {}
    for name, kept in formats.items():
        out = memory[at : at + sizes[name]].view(PLAIN[kept]).reshape(weights[name].shape)
        weights[name].decode_into(out, kept)
        placed[name] = out
        at += -(-sizes[name] // _CACHE_LINE) * _CACHE_LINE
    return placed


def _block(size: int, what: str) -> np.ndarray:
    """``size`` zero bytes that start on a huge page."""
    try:
        block = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ShipwayError(f"no memory for {size / 2**30:.2f} GiB of {what}: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
            block.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(block, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE
    return memory[start : start + size]
