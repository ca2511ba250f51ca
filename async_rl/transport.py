"""The socket between coordinator and generators: a ROUTER with a DEALER for each generator, on one port.

Delivery is nobody's promise here: a message to a peer that vanished is counted and lost, one from a peer may come twice
or never. Leases, acknowledgements and heartbeats above this module make the exchange exact. What this module promises:
nothing blocks without a deadline, a malformed or hostile frame costs nothing but a count, and one thread owns a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from async_rl.addresses import is_loopback, join_address, split_address
from async_rl.errors import InputError
from async_rl.frames import Frame, one_line
from async_rl.keys import Keys
from async_rl.protocol import (
    FromCoordinator,
    FromGenerator,
    Hello,
    Message,
    ProtocolError,
    Refused,
    TooLarge,
    decode,
    encode,
)

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""How long a closing socket may still deliver what was sent."""
MAX_IDENTITY_BYTES = 255
MAX_POLL = 16
"""Messages of one poll: the learner is answered between polls, so that a flood of results must not make them long."""
_MAX_HANDSHAKES = 256
"""Failed ones that a poll counts."""
_PROBE_S = 5.0
"""TCP keep-alive: a peer without network is noticed after about three of these."""


class TransportError(Exception):
    """The socket cannot be opened or used; the message says what to do."""


# --- server -------------------------------------------------------------------------------------


class _Gatekeeper:
    """Answers libzmq's question (ZAP, RFC 27) whether a client's key may enter; it lives in the server's own poll."""

    def __init__(self, context: zmq.Context, keys: Keys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._allowed = z85.decode(keys.peer)

    def answer(self) -> bool:
        """Answer one waiting question; returns whether the client may enter."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
            zmq.NOBLOCK
        )
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
        self.socket.send_multipart([version, request, code, text, b"", b""], zmq.NOBLOCK)
        return allowed


class _Refusal(Exception):
    """Why a message is not accepted; `reason` is the key of its count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Server:
    """The coordinator's end. All methods belong to one thread, except `wake` and `call`."""

    def __init__(self, max_message_bytes: int, security: Keys | None = None) -> None:
        self.max_message_bytes = max_message_bytes
        self.refused: Counter[str] = Counter()
        """Messages and connections that were not accepted, by reason."""
        self.undelivered: Counter[str] = Counter()
        """Messages that could not be sent, by reason (vanished, full)."""
        self._context = zmq.Context()
        self._gatekeeper = _Gatekeeper(self._context, security) if security else None
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, max_message_bytes)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        if security:
            self._socket.curve_server = True
            self._socket.curve_secretkey = security.secret
        self._secured = security is not None
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_EVENTS)
        self._greeted: set[str] = set()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        for item in (self._socket, self._monitor, self._wake_out):
            self._poller.register(item, zmq.POLLIN)
        if self._gatekeeper:
            self._poller.register(self._gatekeeper.socket, zmq.POLLIN)

    def bind(self, host: str, port: int, insecure: bool = False) -> int:
        """Listen on host:port (0: any free port) and return the port.

        Raises InputError for an address that others can reach without keys, TransportError if it cannot be bound.
        """
        if not (self._secured or insecure or is_loopback(host)):
            raise InputError(
                f"transport.host={host} can be reached by other machines and no keys are set; write a pair with "
                "`async-rl keys FOLDER` and set transport.keys=FOLDER, use 127.0.0.1, or say transport.insecure=true "
                "in a network that you trust"
            )
        try:
            self._socket.bind(f"tcp://{join_address(host, port or '*')}")
        except zmq.ZMQError as error:
            raise TransportError(_bind_advice(host, port, error)) from None
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def wake(self) -> None:
        """Make a running or the next `poll` return soon; safe from every thread."""
        # A full pipe means that enough wake-ups are waiting already, a closed one that nobody polls any more.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def call(self, action: Callable[[], None]) -> None:
        """Have `action` run by the thread that polls, before its `poll` returns, never after `close`.

        Safe from every thread.
        """
        self._calls.put(action)
        self.wake()

    def poll(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Messages (identity, message) that came within `timeout_s`, in order, at most MAX_POLL; may be none."""
        ready = dict(self._poller.poll(_milliseconds(timeout_s)))
        if self._wake_out.fileno() in ready:
            self._run_calls()
        if self._monitor in ready:
            self._count_handshakes()
        if self._gatekeeper and self._gatekeeper.socket in ready and not self._gatekeeper.answer():
            self.refused["wrong_key"] += 1
        return self._receive() if self._socket in ready else []

    def send(self, identity: str, message: Message) -> bool:
        """Queue a message; False (and a count) if the peer is gone or takes nothing. Never blocks.

        Raises TooLarge if the message is larger than any peer accepts.
        """
        frames = _encode_bounded(message, self.max_message_bytes)
        try:
            self._socket.send_multipart([identity.encode(), *frames], zmq.NOBLOCK)
        except zmq.Again:
            self.undelivered["full"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # What it sent before it went may still be waiting here (its last results, its goodbye): it stays known
            # until the coordinator forgets it.
            self.undelivered["vanished"] += 1
            return False
        return True

    def forget(self, identity: str) -> None:
        """Refuse this peer's messages until it says Hello again."""
        self._greeted.discard(identity)

    def close(self) -> None:
        """Deliver what was sent, for at most LINGER_S, and close; callable more than once."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_milliseconds(LINGER_S))
        if self._gatekeeper:
            self._gatekeeper.socket.close(linger=0)
        self._wake_in.close()
        self._wake_out.close()
        self._context.term()

    def _run_calls(self) -> None:
        self._wake_out.recv(4096)
        for _ in range(self._calls.qsize()):
            self._calls.get_nowait()()

    def _receive(self) -> list[tuple[str, Any]]:
        accepted = []
        for _ in range(MAX_POLL):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            entry = self._accept(identity, frames)
            if entry is not None:
                accepted.append(entry)
        return accepted

    def _accept(self, raw_identity: bytes, frames: list[bytes]) -> tuple[str, Any] | None:
        """(identity, message) if the frames are a message of a peer that has said Hello; otherwise count why not."""
        identity = raw_identity.decode(errors="replace")
        try:
            message = self._check(identity, raw_identity, frames)
        except _Refusal as refusal:
            self._count_refusal(refusal.reason, identity, str(refusal))
            return None
        return identity, message

    def _check(self, identity: str, raw_identity: bytes, frames: list[bytes]) -> Any:
        if identity.encode() != raw_identity or not identity.isprintable():
            raise _Refusal("bad_identity", "its identity is not a name")
        size = sum(map(len, frames))
        if size > self.max_message_bytes:
            raise _Refusal("oversized", f"{size} bytes exceed transport.max_message_bytes={self.max_message_bytes}")
        try:
            message = decode(frames, FromGenerator)
        except ProtocolError as error:
            raise _Refusal("malformed", str(error)) from None
        if isinstance(message, Hello):
            if identity != peer_identity(message.name, message.incarnation):
                raise _Refusal("bad_identity", f"it says Hello as {message.name}/{message.incarnation}")
            self._greeted.add(identity)
        elif identity not in self._greeted:
            self.send(identity, Refused(reason="this learner does not know you; say Hello first", retry=True))
            raise _Refusal("before_hello", f"{type(message).__name__} came before Hello")
        return message

    def _count_refusal(self, reason: str, identity: str, detail: str) -> None:
        self.refused[reason] += 1
        count = self.refused[reason]
        if count in (1, 10, 100) or count % 1000 == 0:
            log.warning("refused a message (%s, %d so far) from %s: %s", reason, count, one_line(identity), detail)

    def _count_handshakes(self) -> None:
        for _ in range(_MAX_HANDSHAKES):
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.refused["handshake"] += 1


# --- client -------------------------------------------------------------------------------------


class Client:
    """A generator's end; all methods belong to one asyncio loop."""

    def __init__(self, name: str, incarnation: str, max_message_bytes: int, security: Keys | None = None) -> None:
        self.identity = peer_identity(name, incarnation)
        self.max_message_bytes = max_message_bytes
        self.address = ""
        self._security = security
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None

    def connect(self, address: str) -> None:
        """Connect to the learner at `HOST:PORT`; returns at once, the connection is made in the background."""
        self.address = join_address(*split_address(address))
        self.reset()

    def reset(self) -> None:
        """Replace the socket: what was queued for a learner that is gone is dropped; a running `receive` goes on."""
        assert self.address, "connect comes first"
        old, self._socket = self._socket, self._open()
        if old is not None:
            old.close(linger=0)

    async def send(self, message: Message, timeout_s: float = 30.0) -> None:
        """Queue a message for the learner, also while it is not there.

        Raises TimeoutError if the queue stays full for `timeout_s`, TooLarge if the message is.
        """
        frames = _encode_bounded(message, self.max_message_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                await self._outlive_reset(lambda current: current.send_multipart(frames))
        except TimeoutError:
            kind = type(message).__name__
            raise TimeoutError(f"{kind} to {self.address} waited {timeout_s:g} s: the learner reads nothing") from None

    async def receive(self, timeout_s: float) -> Any:
        """The next message, or None after `timeout_s`. Raises ProtocolError for what is not a learner's message."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        # Waiting for readiness and then taking without waiting: a cancelled or timed-out `receive` loses no message.
        while await self._outlive_reset(lambda current: current.poll(_milliseconds(deadline - clock()))):
            assert self._socket is not None
            with contextlib.suppress(zmq.Again):
                return decode(await self._socket.recv_multipart(zmq.NOBLOCK), FromCoordinator)
        return None

    async def _outlive_reset(self, operation: Callable[[zmq.asyncio.Socket], Awaitable[Any]]) -> Any:
        """Do `operation` with the socket, and again with the new one if `reset` closes it under the wait."""
        while True:
            assert self._socket is not None, "the client is not connected"
            current = self._socket
            try:
                return await operation(current)
            except asyncio.CancelledError:
                # pyzmq reports a closed socket as a cancellation of what waits for it.
                task = asyncio.current_task()
                if current is self._socket or (task is not None and task.cancelling()):
                    raise

    def close(self) -> None:
        """Deliver what was sent, for at most LINGER_S, and close; callable more than once."""
        if self._socket is not None:
            self._socket.close(linger=_milliseconds(LINGER_S))
            self._socket = None
        self._context.term()

    def _open(self) -> zmq.asyncio.Socket:
        opened = self._context.socket(zmq.DEALER)
        _configure(opened, self.max_message_bytes)
        opened.identity = self.identity.encode()
        if self._security:
            opened.curve_serverkey, opened.curve_publickey = self._security.peer, self._security.public
            opened.curve_secretkey = self._security.secret
        opened.connect(f"tcp://{self.address}")
        return opened


# --- both ends ----------------------------------------------------------------------------------

_HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def peer_identity(name: str, incarnation: str) -> str:
    """The socket identity of a generator process: the same after a reconnect, another after a restart."""
    return f"{name}/{incarnation}"


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _configure(opened: zmq.Socket, max_message_bytes: int) -> None:
    # A peer a little over the limit gets a count and a name; libzmq itself cuts off whoever announces twice as much.
    opened.maxmsgsize = 2 * max_message_bytes
    opened.linger = _milliseconds(LINGER_S)
    opened.ipv6 = True
    opened.reconnect_ivl = 100
    opened.reconnect_ivl_max = 2000
    opened.tcp_keepalive = 1
    opened.tcp_keepalive_idle = opened.tcp_keepalive_intvl = round(_PROBE_S)
    opened.tcp_keepalive_cnt = 3


def _encode_bounded(message: Message, limit: int) -> Sequence[Frame]:
    frames = encode(message)
    size = sum(len(frame) for frame in frames)
    if size > limit:
        raise TooLarge(
            f"{type(message).__name__} has {size} bytes, the limit is transport.max_message_bytes={limit}; "
            "raise it on both sides, or shorten what is sent"
        )
    return frames


def _bind_advice(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there, or set transport.port (0: any free one)"
    return f"cannot listen on {host}:{port}: {error.strerror}; set transport.host to an address of this machine"
