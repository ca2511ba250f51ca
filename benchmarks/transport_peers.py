"""Load for the suite `transport`: many peers in one process, each with its own socket, as cheap as Python allows.

A peer answers every `Leases` message at once with finished members of fixed tokens. Only the keys of leases are read,
the arrays of messages are made once. So a maker costs less than what it loads, and is not the limit.

    python -m benchmarks.transport_peers SIDE ADDRESS SLOTS BUNDLE NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from async_rl import protocol as p

GROUP_SIZE = 8
MEMBER_TOKENS = 1388
"""Of 9 bytes each (id, mask, logprob): a group of 8 has 100 kB."""
Side = Literal["coordinator", "raw", "relay"]


def make_trajectory(number: int) -> p.Trajectory:
    """One of a group's members; rewards differ."""
    draws = np.random.default_rng(number)
    return p.Trajectory(
        status="complete",
        completion_ids=draws.integers(0, 150_000, MEMBER_TOKENS, dtype=np.int32),
        completion_mask=np.ones(MEMBER_TOKENS, np.uint8),
        behavior_logprobs=-draws.exponential(size=MEMBER_TOKENS).astype(np.float32),
        versions=(p.VersionSpan(0, 0, MEMBER_TOKENS),),
        reward=float(number % 2),
        sample_s=1.0,
        reward_s=0.01,
    )


MEMBERS = tuple(make_trajectory(number) for number in range(GROUP_SIZE))


class _Ticket(msgspec.Struct):
    ticket: int
    places: list[p.Place]


class _Leases(msgspec.Struct, tag="Leases"):
    tickets: list[_Ticket]


class _Acknowledged(msgspec.Struct, tag="Acknowledged"):
    pass


class _Welcome(msgspec.Struct, tag="Welcome"):
    pass


class _RelabelVersion(msgspec.Struct, tag="RelabelVersion"):
    version: int


class _Refused(msgspec.Struct, tag="Refused"):
    reason: str


class _Stop(msgspec.Struct, tag="Stop"):
    pass


_DECODER = msgspec.msgpack.Decoder(_Leases | _Acknowledged | _Welcome | _RelabelVersion | _Refused | _Stop)
RUN_ID = "transport"


def finished(keys: Sequence[p.LeaseKey]) -> list[Any]:
    """Frames of one message."""
    return p.encode(p.Finished.of(RUN_ID, {key: MEMBERS[key.member % GROUP_SIZE] for key in keys}))


def whole_group(bundle: int) -> list[list[Any]]:
    """The messages of one group, as a peer of the coordinator sends them."""
    keys = [p.LeaseKey("train", 1000, member, 1) for member in range(GROUP_SIZE)]
    return [[bytes(frame) for frame in finished(keys[i : i + bundle])] for i in range(0, GROUP_SIZE, bundle)]


def open_sockets(context: zmq.Context, address: str, names: Sequence[str]) -> list[zmq.Socket]:
    """One DEALER for each peer."""
    sockets = []
    for name in names:
        dealer = context.socket(zmq.DEALER)
        dealer.identity = f"{name}/1".encode()
        dealer.sndhwm = dealer.rcvhwm = 64
        dealer.linger = 0
        dealer.connect(f"tcp://{address}")
        sockets.append(dealer)
    return sockets


def make_load(side: Side, address: str, names: Sequence[str], slots: int, bundle: int) -> None:
    """A maker's process: until it is killed, or told to stop."""
    sockets = open_sockets(zmq.Context(), address, names)
    if side == "coordinator":
        work(sockets, names, slots, bundle)
    else:
        flood(sockets, bundle)


def flood(sockets: Sequence[zmq.Socket], bundle: int) -> None:
    """Send whole groups as fast as they are taken."""
    messages = whole_group(bundle)
    poller = zmq.Poller()
    for dealer in sockets:
        poller.register(dealer, zmq.POLLOUT)
    while True:
        for dealer, _ in poller.poll():
            for message in messages:
                dealer.send_multipart(message)


def work(sockets: Sequence[zmq.Socket], names: Sequence[str], slots: int, bundle: int) -> None:
    """Say Hello with every socket and finish whatever is leased."""
    poller = zmq.Poller()
    for name, dealer in zip(names, sockets, strict=True):
        poller.register(dealer, zmq.POLLIN)
        dealer.send_multipart(p.encode(hello(name, slots)))
    while True:
        for dealer, _ in poller.poll():
            for _ in range(16):
                try:
                    header, *_ = dealer.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not answer(dealer, _DECODER.decode(header), bundle):
                    return


def hello(name: str, slots: int) -> p.Hello:
    """A simulated engine, which loads no weights."""
    return p.Hello(
        protocol=p.PROTOCOL_VERSION, name=name, incarnation="1", run_id=None, policy_version=None, slots=slots,
        receivers=0, engine="simulated", host="localhost", pid=1,
    )  # fmt: skip


def keys_of(message: _Leases) -> list[p.LeaseKey]:
    """All that was leased."""
    return [
        p.LeaseKey("train", ticket.ticket, place.member, place.attempt)
        for ticket in message.tickets
        for place in ticket.places
    ]


def answer(dealer: zmq.Socket, message: Any, bundle: int) -> bool:
    """Do what a generator does; False: the run is over."""
    match message:
        case _Leases():
            keys = keys_of(message)
            for start in range(0, len(keys), bundle):
                dealer.send_multipart(finished(keys[start : start + bundle]))
        case _RelabelVersion():
            loaded = p.Loaded(version=message.version, checksum=None, load_s=0.0, paused_s=0.0, source="none")
            dealer.send_multipart(p.encode(loaded))
        case _Refused():
            raise RuntimeError(f"the coordinator refused a peer: {message.reason}")
        case _Stop():
            return False
    return True


if __name__ == "__main__":
    side, address, slots, bundle, *names = sys.argv[1:]
    make_load(side, address, names, int(slots), int(bundle))  # type: ignore[arg-type]
