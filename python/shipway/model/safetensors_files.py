"""Memory-mapped tensors of a safetensors checkpoint: ``model.safetensors``, or shards with their index.

The format is eight bytes of header length, a JSON header, then the data. It is read here because the safetensors
library has no NumPy form of bfloat16 and copies each tensor.
"""

from __future__ import annotations

import json
import mmap
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shipway.errors import ShipwayError
from shipway.model.mapping import map_file
from shipway.model.weights import PLAIN, Weight

_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit, so that a wrong file is not read whole


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
        weights.update(_open_file(directory / shard))
    if absent := sorted(weight_map.keys() - weights.keys()):
        raise ShipwayError(f"{index} names tensor {absent[0]}, which {weight_map[absent[0]]} does not hold")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        ShipwayError: The file cannot be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as problem:
        raise ShipwayError(f"cannot read {path}: {problem.strerror}") from None
    except ValueError as problem:  # JSONDecodeError and UnicodeDecodeError
        raise ShipwayError(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ShipwayError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _open_file(path: Path) -> dict[str, Weight]:
    mapped = map_file(path)
    size = int.from_bytes(mapped[:8], "little")
    start = 8 + size
    if len(mapped) < 8 or size > _MAX_HEADER:
        raise ShipwayError(f"{path} is not a safetensors file: its header length makes no sense")
    if start > len(mapped):
        raise ShipwayError(f"{path} is truncated: its header alone takes {start} bytes, the file has {len(mapped)}")
    try:
        header = json.loads(mapped[8:start])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError):
        raise ShipwayError(f"{path} is not a safetensors file: its header is not a JSON object") from None
    return {name: _weight(path, mapped, start, name, entry) for name, entry in entries.items()}


def _weight(path: Path, mapped: mmap.mmap, start: int, name: str, entry: Any) -> Weight:
    try:
        dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise ShipwayError(f"{path} is damaged: the header entry of tensor {name} is incomplete") from None
    if dtype not in _FORMATS:
        raise ShipwayError(f"{path}: tensor {name} has dtype {dtype}; only {', '.join(_FORMATS)} are supported")
    carrier = PLAIN[_FORMATS[dtype]]
    if min(shape, default=1) < 0 or begin < 0 or end - begin != prod(shape) * carrier.itemsize:
        raise ShipwayError(f"{path} is damaged: tensor {name} of shape {shape} spans {end - begin} bytes")
    if start + end > len(mapped):
        raise ShipwayError(f"{path} is truncated: tensor {name} ends at byte {start + end} of {len(mapped)}")
    data = np.frombuffer(mapped, carrier, prod(shape), start + begin).reshape(shape)
    # The format does not force alignment; vector loads need it, so the rare odd tensor is copied.
    return Weight(name, shape, _FORMATS[dtype], data if data.flags.aligned else data.copy())
