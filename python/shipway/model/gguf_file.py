"""Reader of one GGUF file: metadata and memory-mapped tensors.

The layout is that of the GGUF specification, versions 2 and 3, little-endian. The file is walked here rather than with
``gguf.GGUFReader`` for two reasons: a corrupt array length makes that reader loop for ever, and it spends seconds on
the 100 000 strings of a vocabulary. Block sizes and dequantisation come from the ``gguf`` package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shipway.errors import ShipwayError
from shipway.model.mapping import looks_like, map_file
from shipway.model.weights import PLAIN

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_F32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4
_MIN_ALIGNMENT = 8


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored.

    Attributes:
        name: Name in the file (``blk.0.attn_q.weight``).
        shape: Logical shape, rows first (GGUF itself writes the contiguous dimension first).
        format: ``"f32"``, ``"f16"``, ``"bf16"`` or a GGUF type in lower case (``"q4_1"``).
        blocks: View of the mapped file: the numbers (bf16 as uint16), or ``[..., bytes per row]`` uint8.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    blocks: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """A parsed file: its path, metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Maps and parses ``path``.

        Raises:
            ShipwayError: The file is not GGUF, is truncated or inconsistent, or is one part of several.
        """
        mapped = map_file(path)
        if mapped[:4] != b"GGUF":
            raise ShipwayError(f"{path} is not a GGUF file: {looks_like(mapped[:64])}")
        try:
            metadata, infos, data_start = _Cursor(mapped).header()
            tensors = {name: _tensor(mapped, data_start, name, *info) for name, info in infos.items()}
        except RecursionError:
            raise ShipwayError(f"{path} is a damaged GGUF file: its metadata nests too deeply") from None
        except (struct.error, ValueError, OverflowError) as problem:
            # struct.error is a read past the end; ValueError is UnicodeDecodeError and what this module raises;
            # NumPy overflows on an empty tensor whose other dimensions no machine addresses.
            reason = "its header runs past the end of the file" if isinstance(problem, struct.error) else problem
            raise ShipwayError(f"{path} is a damaged GGUF file: {reason}") from None
        if metadata.get("split.count", 1) not in (0, 1):
            raise ShipwayError(f"{path} is one of {metadata['split.count']} parts: merge them with llama-gguf-split")
        return cls(path, metadata, tensors)


class _Cursor:
    """Reads values one after another; anything past the end raises ``struct.error``."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._data = mapped
        self._at = 4

    def header(self) -> tuple[dict[str, Any], dict[str, tuple[list[int], int, int]], int]:
        """Returns metadata, (dimensions, type, offset) per tensor, and where the tensor data start."""
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported, only 2 and 3, little-endian")
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in metadata:
                raise ValueError(f"metadata {key!r} is listed twice")
            metadata[key] = self._value(self._scalar("<I"))
        infos: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(tensor_count):
            name, dimensions = self._string(), self._scalar("<I")
            if name in infos or dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} is listed twice or has {dimensions} dimensions")
            sizes = [self._scalar("<Q") for _ in range(dimensions)]
            infos[name] = (sizes[::-1], self._scalar("<I"), self._scalar("<Q"))
        alignment = metadata.get("general.alignment", 32)
        # The least is that of the widest numbers, so that no tensor lies across them.
        if type(alignment) is not int or alignment < _MIN_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment!r} is not a power of two from {_MIN_ALIGNMENT}")
        for name, (_, _, offset) in infos.items():
            if offset % alignment:
                raise ValueError(f"tensor {name} lies at byte {offset}, not a multiple of {alignment}")
        return metadata, infos, -(-self._at // alignment) * alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._skip(length)
        return str(self._data[self._at - length : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, length = self._scalar("<I"), self._scalar("<Q")
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[element])
                self._skip(length * dtype.itemsize)
                return np.frombuffer(self._data, dtype, length, self._at - length * dtype.itemsize).tolist()
            return [self._value(element) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of unknown type {kind}")
        value = self._scalar(_SCALARS[kind])
        # The shortest decimal of a float32 is the number its author wrote: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _F32 else value

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise struct.error
        self._at += count


def _tensor(mapped: mmap.mmap, data_start: int, name: str, shape: list[int], kind: int, offset: int) -> GgufTensor:
    if kind not in GGMLQuantizationType._value2member_map_:
        raise ValueError(f"tensor {name} has the unknown type {kind}")
    type_ = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    row = shape[-1] if shape else 1
    if row % block:
        raise ValueError(f"tensor {name} has rows of {row}, not a multiple of the {type_.name} block of {block}")
    size = prod(shape) // block * block_bytes
    start = data_start + offset
    if start + size > len(mapped):
        raise ValueError(f"tensor {name} ends at byte {start + size}, the file at {len(mapped)}")
    format_ = type_.name.lower()
    if format_ in PLAIN:
        blocks = np.frombuffer(mapped, PLAIN[format_], prod(shape), start).reshape(shape)
    else:
        blocks = np.frombuffer(mapped, np.uint8, size, start).reshape(*shape[:-1], row // block * block_bytes)
    return GgufTensor(name, tuple(shape), format_, blocks)
