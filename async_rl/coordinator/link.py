"""A pair of connected sockets that carries whole values between the learner and its coordinator process.

The pair has no name and no port, and only the two processes hold it: when either is gone, however it ended, the other
reads the end of the stream at once. A value is 8 bytes of length and one block of frames (`frames.join_frames`).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.frames import Frame, block_parts, decode_value, value_to_frames

SEND_S = 60.0
"""Longest wait for a peer that reads nothing; both read on a thread that does little else."""
_LARGE_BYTES = 64 << 10
"""A part of this size is sent as it lies; to copy a batch once more takes longer than to read it."""


class Link:
    """One end. `send` is safe from every thread, `receive` belongs to one."""

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        """`incoming` is the type of what the other side sends."""
        self._socket = end
        self._incoming = incoming
        self._lock = threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))

    def send(self, value: Any) -> None:
        """Send a value; raises OSError when the other side is gone, TimeoutError when it reads nothing."""
        parts = block_parts(value_to_frames(value))
        length = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            try:
                for block in _gathered([length.to_bytes(8, "little"), *parts]):
                    self._socket.sendall(block)
            except BlockingIOError:
                # A part of the value may be sent: nothing that follows could be read.
                self.close()
                raise TimeoutError(f"the other side of the link has read nothing for {SEND_S:g} s") from None

    def receive(self) -> Any:
        """The next value; None at the end of the stream. Raises ProtocolError for what is not a value."""
        length = self._read(8)
        block = None if length is None else self._read(int.from_bytes(length, "little"))
        return None if block is None else decode_value(block, self._incoming)

    def close(self) -> None:
        """End the stream for both sides; a waiting `receive` returns. Callable more than once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other side is gone already.

    def _read(self, size: int) -> bytearray | None:
        """Exactly `size` bytes; None if the stream ends before."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                return None
            if count == 0:
                return None
            view = view[count:]
        return data


def _gathered(parts: Sequence[Frame]) -> Iterator[Frame]:
    """The parts in order, small neighbours joined."""
    small: list[Frame] = []
    for part in parts:
        if memoryview(part).nbytes < _LARGE_BYTES:
            small.append(part)
            continue
        yield b"".join(small)
        yield part
        small = []
    yield b"".join(small)
