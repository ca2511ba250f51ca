"""Hostile and damaged traffic on the port of a run under way: it is refused and counted, and the run goes on."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl import protocol as p
from async_rl.addresses import split_address
from tests.loop.rig import Learner, fleet, make_config
from tests.loop.test_fleet import check_account

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
KEY = p.LeaseKey("train", 0, 0, 1)
HELLO = p.Hello(
    protocol=p.PROTOCOL_VERSION, name="fuzz", incarnation="1", run_id=None, policy_version=None, slots=0, receivers=0,
    engine="simulated", host="h", pid=1,
)  # fmt: skip
TRAJECTORY = p.Trajectory(
    status="complete",
    completion_ids=np.arange(5, dtype=np.int32),
    completion_mask=np.ones(5, np.uint8),
    behavior_logprobs=-np.ones(5, np.float32),
    versions=(p.VersionSpan(0, 0, 5),),
    reward=1.0,
)
MESSAGES: tuple[p.Message, ...] = (
    p.Heartbeat(accepting=True, holding=(KEY,), policy_version=3, stats=p.GeneratorStats()),
    p.Finished.of("run-1", {KEY: TRAJECTORY, msgspec.structs.replace(KEY, member=1): TRAJECTORY}),
    p.Returned(run_id="run-1", keys=(KEY,)),
    p.EpochJoined(epoch=1),
    p.Received(version=1, epoch=1, checksum="c", receive_s=0.0),
    p.Loaded(version=1, checksum="c", load_s=0.0, paused_s=0.0, source="none"),
    p.Goodbye(reason="bye"),
)
GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(48)
"""How a ZeroMQ connection begins (ZMTP 3.1, without security): what follows reaches the parser of frames."""


class LiveRun:
    """Learner and two generators in a thread of their own, training until they are told to end."""

    def __init__(self, folder: Path) -> None:
        config = make_config(folder, run={"steps": 1_000_000, "stall_timeout_s": 60.0})
        self.learner = Learner(config)
        self.address = self.learner.start()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()

    async def _serve(self) -> None:
        async with fleet(self.learner.config, self.address, "g0", "g1"):
            while not self._over.is_set():
                await asyncio.sleep(0.05)

    def refused(self) -> int:
        return sum(self.learner.coordinator.server.refused.values())

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.learner.error is None, self.learner.error
            assert time.monotonic() < deadline, self.learner.coordinator.status()
            time.sleep(0.01)

    def goes_on(self) -> None:
        """Two more steps are made."""
        steps = len(self.learner.batches)
        self.until(lambda: len(self.learner.batches) >= steps + 2)

    def end(self) -> None:
        self.learner.coordinator.stop("test")
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path_factory.mktemp("live"))
    run.until(lambda: len(run.learner.batches) >= 2)
    yield run
    run.end()
    check_account(run.learner)
    assert not any("trained twice" in note for note in run.learner.notes)


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def dealer(context: zmq.Context, address: str, identity: bytes | None) -> zmq.Socket:
    peer = context.socket(zmq.DEALER)
    peer.linger = 2000
    if identity is not None:
        peer.identity = identity
    peer.connect(f"tcp://{address}")
    return peer


# The fixtures are shared on purpose: one run takes all that is thrown at it.
EXAMPLES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(greet=st.booleans(), data=st.binary(min_size=1, max_size=3000))
def test_random_bytes_end_at_the_connection(live: LiveRun, greet: bool, data: bytes) -> None:
    with socket.create_connection(split_address(live.address), PATIENCE_S) as raw:
        raw.sendall(GREETING + data if greet else data)
    live.goes_on()


@EXAMPLES
@given(
    identity=st.none() | st.binary(min_size=1, max_size=40).filter(lambda name: name[0] != 0),
    frames=st.lists(st.binary(max_size=400), min_size=1, max_size=5),
)
def test_random_frames_of_strangers_are_refused(
    live: LiveRun, context: zmq.Context, identity: bytes | None, frames: list[bytes]
) -> None:
    before = live.refused()
    stranger = dealer(context, live.address, identity)
    stranger.send_multipart(frames)
    live.until(lambda: live.refused() > before)
    stranger.close()
    live.goes_on()


@EXAMPLES
@given(
    message=st.sampled_from(MESSAGES),
    faults=st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=6),
)
def test_damaged_messages_of_a_member_change_nothing(
    live: LiveRun, context: zmq.Context, message: p.Message, faults: list[tuple[int, bytes]]
) -> None:
    """It has introduced itself, and then sends what a broken machine or a broken program would."""
    incarnation = uuid.uuid4().hex
    member = dealer(context, live.address, f"fuzz/{incarnation}".encode())
    member.send_multipart(p.encode(msgspec.structs.replace(HELLO, incarnation=incarnation)))
    frames = [bytearray(frame) for frame in p.encode(message)]
    for position, bytes_ in faults:
        frame = frames[position % len(frames)]
        start = position % max(len(frame), 1)
        frame[start : start + len(bytes_)] = bytes_
    member.send_multipart(frames)
    member.send_multipart(p.encode(p.Goodbye(reason="done")))
    live.goes_on()
    member.close()
    live.until(lambda: len(live.learner.coordinator.members) == 2)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (msgspec.structs.replace(HELLO, protocol=99), "hello"),
        (msgspec.structs.replace(HELLO, name="g0"), "bad_identity"),
        (MESSAGES[0], "before_hello"),
        (p.Stop(reason="stop"), "malformed"),
    ],
)
def test_well_formed_messages_that_are_not_due_are_refused(
    live: LiveRun, context: zmq.Context, message: p.Message, reason: str
) -> None:
    refused = live.learner.coordinator.server.refused
    before = refused[reason]
    stranger = dealer(context, live.address, b"fuzz/1")
    stranger.send_multipart(p.encode(message))
    live.until(lambda: refused[reason] == before + 1)
    stranger.close()
    live.goes_on()


def test_a_flood_costs_messages_and_not_steps(live: LiveRun, context: zmq.Context) -> None:
    before = live.learner.coordinator.server.refused["malformed"]
    flood = dealer(context, live.address, b"flood")
    for _ in range(5000):
        flood.send_multipart([b"\xc1" * 100])
    live.goes_on()
    live.until(lambda: live.learner.coordinator.server.refused["malformed"] >= before + 5000)
    flood.close()
    live.goes_on()
