"""tf32: float32 whose matrix products round their operands to 10 bits of fraction (PTX ISA, ``cvt.rna.tf32.f32``)."""

from __future__ import annotations

import numpy as np

ROUNDOFF = 2.0**-11
"""Largest relative error of an operand."""
PRODUCT = 2 * ROUNDOFF
"""Largest relative error of a product of two operands, to first order."""
LARGEST = (2 - 2.0**-10) * 2.0**127
"""Largest finite operand."""


def operand(x: np.ndarray) -> np.ndarray:
    """Rounds finite float32, any shape, to nearest, ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(np.float32)
