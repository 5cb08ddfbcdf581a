"""The floating-point formats under test: rounding, unit roundoff and distance in ulps, in numpy alone.

Values of every format are carried as float32 arrays that hold only representable values, because f32, bf16 and f16
all embed exactly in float32. Stored bf16 is uint16. tf32 is float32 whose matrix products round their operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shipway.ops import tf32


@dataclass(frozen=True)
class DType:
    """One binary floating-point format.

    Attributes:
        name: ``"f32"``, ``"bf16"``, ``"f16"`` or ``"tf32"``.
        precision: Bits of the significand, the hidden one included.
        min_exponent: Exponent of the smallest normal number.
        max_finite: Largest finite value.
        underflow: Absolute error that underflow may cause. f32 and bf16 arithmetic commonly flushes subnormals
            (AVX512_BF16 always does), so theirs is the smallest normal number; f16 keeps its subnormals.
        operand_roundoff: Largest relative error of an operand that a matrix product rounds; 0 where it takes operands
            as they are stored.
    """

    name: str
    precision: int
    min_exponent: int
    max_finite: float
    underflow: float
    operand_roundoff: float = 0.0

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding to nearest, u = 2^-precision."""
        return 2.0**-self.precision

    def spacing(self, x: np.ndarray) -> np.ndarray:
        """Distance between neighbouring numbers of the binade each finite element lies in (float64, same shape)."""
        _, exponent = np.frexp(np.asarray(x, np.float64))  # |x| in [2^(e-1), 2^e)
        smallest = self.min_exponent - self.precision + 1
        return np.ldexp(1.0, np.maximum(exponent - self.precision, smallest))

    def round(self, x: np.ndarray) -> np.ndarray:
        """Rounds to nearest, ties to even, once (no double rounding from float64); overflow becomes infinite.

        Args:
            x: float32 or float64, any shape.

        Returns:
            float32 array of the same shape that holds only values of this format.
        """
        x = np.asarray(x, np.float64)
        finite = np.where(np.isfinite(x), x, 0.0)
        step = self.spacing(finite)
        rounded = np.rint(finite / step) * step
        rounded = np.where(np.abs(rounded) > self.max_finite, np.copysign(np.inf, finite), rounded)
        # A zero result keeps the sign of its operand, as hardware does.
        rounded = np.copysign(rounded, finite)
        return np.where(np.isfinite(x), rounded, x).astype(np.float32)


F32 = DType("f32", 24, -126, float(np.finfo(np.float32).max), 2.0**-126)
BF16 = DType("bf16", 8, -126, float((2 - 2.0**-7) * 2.0**127), 2.0**-126)
F16 = DType("f16", 11, -14, 65504.0, 2.0**-24)
TF32 = DType("tf32", F32.precision, F32.min_exponent, F32.max_finite, F32.underflow, tf32.ROUNDOFF)
DTYPES = {dtype.name: dtype for dtype in (F32, BF16, F16, TF32)}


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widens stored bf16 (uint16, any shape) to float32, exactly."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Stores float32 as bf16 (uint16, same shape), rounded to nearest even; every NaN becomes the quiet NaN 0x7FC0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def ulps(out: np.ndarray, ref: np.ndarray, dtype: DType) -> np.ndarray:
    """Error of each element in ulps of ``dtype`` at the reference value (float64; NaN where either is not finite).

    A correctly rounded result is at most 0.5 away. Fractions are kept, so a drift shows before it costs a whole ulp.
    """
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    both = np.isfinite(out) & np.isfinite(ref)
    distance = np.abs(np.where(both, out, 0.0) - np.where(both, ref, 0.0)) / dtype.spacing(np.where(both, ref, 1.0))
    return np.where(both, distance, np.nan)
