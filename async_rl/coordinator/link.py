"""A pair of connected sockets that carries whole values between the learner and its coordinator process.

The pair has no name and no port, and only the two processes hold it: when either is gone, however it ended, the other
reads the end of the stream at once. A value is 8 bytes of length and one block of `frames.encode_value`.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

from async_rl.frames import decode_value, encode_value

SEND_S = 60.0
"""Longest wait for a peer that reads nothing; both read on a thread that does little else."""


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
        block = encode_value(value)
        with self._lock:
            try:
                self._socket.sendall(len(block).to_bytes(8, "little"))
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
