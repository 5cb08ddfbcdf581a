"""Messages between the driver and a worker: length-prefixed JSON, arrays beside it in anonymous shared memory.

A frame is an 8-byte header (payload bytes, number of arrays: two big-endian uint32), then the JSON payload. Every
NumPy array in a message is replaced in the JSON by its dtype and shape; its bytes sit in an anonymous file whose
descriptor travels with the header (SCM_RIGHTS), and the receiver maps that file: logits cross without being copied
through the socket, and nothing is left behind when a process dies.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import struct
import tempfile
from typing import Any

import numpy as np

_HEADER = struct.Struct("!II")
_MAX_ARRAYS = 16  # no message of the protocol carries more than one


class ChannelClosed(Exception):
    """The other side is gone."""


def _anonymous_file(size: int) -> int:
    """Returns the descriptor of a file of ``size`` bytes that has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shipway-array", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _share(array: np.ndarray) -> int:
    """Returns a descriptor of an anonymous file that holds the bytes of ``array`` in C order."""
    fd = _anonymous_file(max(array.nbytes, 1))
    with mmap.mmap(fd, max(array.nbytes, 1)) as memory:
        view = np.frombuffer(memory, dtype=array.dtype, count=array.size).reshape(array.shape)
        view[...] = array
        del view  # the mapping cannot be closed while a view of it lives
    return fd


def _map(fd: int, dtype: str, shape: list[int]) -> np.ndarray:
    """Maps what :func:`_share` made, read-only, and closes the descriptor."""
    try:
        count = int(np.prod(shape, dtype=np.int64))
        memory = mmap.mmap(fd, max(count * np.dtype(dtype).itemsize, 1), access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


Frame = tuple[bytes, list[np.ndarray]]
"""A message as it is sent: its JSON, and the arrays beside it."""


def frame(message: dict[str, Any]) -> Frame:
    """Encodes a message; values are JSON, ``np.integer``, ``np.floating`` or ``np.ndarray``.

    Raises:
        TypeError: A value is of another type.
    """
    arrays: list[np.ndarray] = []

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"__array__": len(arrays) - 1, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a message cannot carry {type(value).__name__}")

    return json.dumps(message, default=encode).encode(), arrays


class Channel:
    """One end of a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over ``sock``."""
        self._socket = sock

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message; raises as :func:`frame` and :meth:`send_frame`."""
        self.send_frame(frame(message))

    def send_frame(self, encoded: Frame) -> None:
        """Sends what :func:`frame` made.

        Raises:
            ChannelClosed: The other side is gone.
        """
        payload, arrays = encoded
        descriptors = [_share(array) for array in arrays]
        try:
            header = _HEADER.pack(len(payload), len(arrays))
            if descriptors:
                socket.send_fds(self._socket, [header], descriptors)
            else:
                self._socket.sendall(header)
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error
        finally:
            for fd in descriptors:
                os.close(fd)

    def receive(self) -> dict[str, Any]:
        """Waits for one message; arrays in it are read-only maps of shared memory.

        Raises:
            ChannelClosed: The other side is gone.
        """
        header, descriptors = b"", []
        while len(header) < _HEADER.size:
            try:
                part, received, _, _ = socket.recv_fds(self._socket, _HEADER.size - len(header), _MAX_ARRAYS)
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            header += part
            descriptors += received
        size, count = _HEADER.unpack(header)
        payload = bytearray()
        while len(payload) < size:
            part = self._socket.recv(min(size - len(payload), 1 << 20))
            if not part:
                raise ChannelClosed
            payload += part
        assert len(descriptors) == count

        def decode(value: dict[str, Any]) -> Any:
            if "__array__" in value:
                return _map(descriptors[value["__array__"]], value["dtype"], value["shape"])
            return value

        message = json.loads(payload, object_hook=decode)
        assert isinstance(message, dict)
        return message

    def ready(self, seconds: float = 0.0) -> bool:
        """Returns whether a message (or the end of the channel) can be read within ``seconds``."""
        if self._socket.fileno() < 0:  # closed here: reading says so
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
