"""One tensor of a checkpoint, as stored, and its conversion to the dtypes routes compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from shipway.errors import ShipwayError

PLAIN: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
"""Formats that are one number per element, with the NumPy dtype that carries them (bf16 as its bits)."""

# Elements converted at a time: the float32 intermediate then stays in a core's cache and no second copy of a large
# embedding ever exists.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Weight:
    """A tensor as the file stores it.

    Attributes:
        name: Hugging Face name.
        shape: Logical shape.
        format: ``"f32"``, ``"f16"``, ``"bf16"`` or a GGUF type in lower case (``"q4_1"``).
        blocks: Memory-mapped data: ``shape`` in the format's dtype, or uint8 ``[..., bytes per row]``.
        scales: Scales where the format keeps them apart from the blocks, else ``None``.
        zeros: Zero points likewise.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    blocks: np.ndarray
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None

    def dequantise(self, dtype: str) -> np.ndarray:
        """Returns the tensor as ``"f32"`` (float32), ``"f16"`` (float16) or ``"bf16"`` (uint16 bits), ``shape``.

        Rounds to nearest even. No copy when the stored format is the one asked for.

        Raises:
            ShipwayError: The format cannot be decoded, or a finite value overflows float16.
        """
        if self.format == dtype:
            return self.blocks
        out = np.empty(self.shape, PLAIN[dtype])
        self.decode_into(out, dtype)
        return out

    def decode_into(self, out: np.ndarray, dtype: str) -> None:
        """Writes what :meth:`dequantise` returns to ``out``, contiguous.

        Raises:
            ShipwayError: As for :meth:`dequantise`.
        """
        if self.format == dtype:
            out[...] = self.blocks
            return
        rows_in = self.blocks.reshape(-1, self.blocks.shape[-1])
        rows_out = out.reshape(rows_in.shape[0], -1)
        step = max(1, _CHUNK // max(1, rows_out.shape[1]))
        for start in range(0, len(rows_in), step):
            rows_out[start : start + step] = self._convert(rows_in[start : start + step], dtype)

    def _convert(self, rows: np.ndarray, dtype: str) -> np.ndarray:
        values = self._float32(rows)
        if dtype == "f32":
            return values
        if dtype == "bf16":
            return bf16_bits(values)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if np.any(np.isinf(half) & np.isfinite(values)):
            raise ShipwayError(f"tensor {self.name} holds values beyond the range of f16: use f32 or bf16")
        return half

    def _float32(self, rows: np.ndarray) -> np.ndarray:
        if self.format == "f32":
            return rows
        if self.format == "f16":
            return rows.astype(np.float32)
        if self.format == "bf16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        try:
            return dequantize(rows, GGMLQuantizationType[self.format.upper()])
        except (KeyError, NotImplementedError):
            raise ShipwayError(f"tensor {self.name} has format {self.format}, which cannot be decoded") from None


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest bfloat16, ties to even; returns its bits as uint16. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        # Rounding may carry a NaN's payload into infinity or zero: keep sign and exponent, set the quiet bit.
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x0040
    return rounded
