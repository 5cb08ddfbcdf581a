"""Memory-mapped tensors of a safetensors checkpoint: ``model.safetensors``, or shards with their index.

The format is eight bytes of header length, a JSON header, then the data. It is read here because the safetensors
library has no NumPy form of bfloat16 and copies each tensor.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.mapping import looks_like, map_file
from shipway.model.weights import PLAIN, Weight

_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit, so that a wrong file is not read whole
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**48


def open_safetensors(directory: Path) -> dict[str, Weight]:
    """Maps every tensor of the checkpoint in ``directory``.

    Raises:
        ShipwayError: A file is missing, damaged or not what its name says, or a dtype is not supported.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        return _open_file(single)
    if not index.is_file():
        raise ShipwayError(f"{directory} holds neither {_SINGLE} nor {_INDEX}: only safetensors and GGUF are read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ShipwayError(f"{index} has no weight_map of tensor names to files")
    weights: dict[str, Weight] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise ShipwayError(f"{index} names {shard}, which is not in {directory}")
        found = _open_file(directory / shard)
        if twice := sorted(weights.keys() & found.keys()):
            raise ShipwayError(f"{directory / shard} holds tensor {twice[0]}, which another shard holds too")
        weights.update(found)
    if absent := sorted(weight_map.keys() - weights.keys()):
        raise ShipwayError(f"{index} names tensor {absent[0]}, which {weight_map[absent[0]]} does not hold")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        ShipwayError: The file cannot be read, is not JSON, or is not an object.
    """
    try:
        with path.open("rb") as file:
            # By its size: Python first allocates what it is asked to read. What has none is read up to the limit.
            data = file.read(min(os.fstat(file.fileno()).st_size or _MAX_HEADER, _MAX_HEADER))
        value = json.loads(data.decode("utf-8"))
    except OSError as problem:
        raise ShipwayError(f"cannot read {path}: {problem.strerror}") from None
    except ValueError as problem:  # JSONDecodeError and UnicodeDecodeError
        other = "" if data.lstrip().startswith(b"{") else f" ({looks_like(data[:64])})"
        raise ShipwayError(f"{path} is not valid JSON: {problem}{other}") from None
    except RecursionError:
        raise ShipwayError(f"{path} is not valid JSON: it nests too deeply") from None
    if not isinstance(value, dict):
        raise ShipwayError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _open_file(path: Path) -> dict[str, Weight]:
    mapped = map_file(path)
    size = int.from_bytes(mapped[:8], "little")
    start = 8 + size
    if size > _MAX_HEADER and mapped[8:9] == b"{":
        raise ShipwayError(f"{path} is damaged: it says that its header takes {size} bytes")
    if len(mapped) < 8 or size > _MAX_HEADER:
        raise ShipwayError(f"{path} is not a safetensors file: {looks_like(mapped[:64])}")
    if start > len(mapped):
        raise ShipwayError(f"{path} is truncated: its header alone takes {start} bytes, the file has {len(mapped)}")
    try:
        header = json.loads(mapped[8:start], object_pairs_hook=_once)
    except _TwiceError as problem:
        raise ShipwayError(f"{path} is damaged: its header lists {problem} twice") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ShipwayError(f"{path} is not a safetensors file: its header is not a JSON object")
    spans = {name: _entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    end_before = 0
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin < end_before:
            raise ShipwayError(f"{path} is damaged: tensor {name} begins within another")
        if start + end > len(mapped):
            raise ShipwayError(f"{path} is truncated: tensor {name} ends at byte {start + end} of {len(mapped)}")
        end_before = end
    return {name: _weight(mapped, start, name, *span) for name, span in spans.items()}


class _TwiceError(ValueError):
    """A JSON object names something twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its pairs, of which Python would silently keep the last of a name."""
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise _TwiceError(twice[0])
    return dict(pairs)


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Format, shape, and first and last byte of one tensor."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, *offsets]
        begin, end = offsets
    except (KeyError, TypeError, ValueError):
        raise ShipwayError(f"{path} is damaged: the header entry of tensor {name} is incomplete") from None
    if not isinstance(dtype, str) or dtype not in _FORMATS:
        raise ShipwayError(f"{path}: tensor {name} has dtype {dtype}; only {', '.join(_FORMATS)} are supported")
    whole = all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers)
    if not whole or len(shape) > _MAX_DIMENSIONS or end - begin != prod(shape) * PLAIN[_FORMATS[dtype]].itemsize:
        raise ShipwayError(f"{path} is damaged: tensor {name} of shape {shape} has the bytes {offsets}")
    return _FORMATS[dtype], tuple(shape), begin, end


def _weight(
    mapped: mmap.mmap, start: int, name: str, format_: str, shape: tuple[int, ...], begin: int, _: int
) -> Weight:
    data = np.frombuffer(mapped, PLAIN[format_], prod(shape), start + begin).reshape(shape)
    # The format does not force alignment; vector loads need it, so the rare odd tensor is copied.
    return Weight(name, shape, format_, data if data.flags.aligned else data.copy())
