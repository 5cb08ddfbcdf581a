"""Arrays as MAX buffers."""

from __future__ import annotations

from typing import Any

import numpy as np


def wrap(array: np.ndarray, format: str) -> Any:  # a max Buffer: max is imported lazily
    """Wraps an array as a MAX buffer without copying; bf16 arrives as its bits."""
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_numpy(array)
    return buffer.view(DType.bfloat16) if format == "bf16" else buffer
