"""The real socket on 127.0.0.1: what arrives, what is refused, and what survives restarts of either end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from async_rl import protocol as p
from async_rl.addresses import is_loopback, join_address, split_address
from async_rl.errors import InputError
from async_rl.keys import create_keys, load_keys
from async_rl.transport import MAX_POLL, Client, Server, TransportError

LIMIT = 1 << 20
PATIENCE_S = 120.0
"""Deadline of every wait; a pass never needs it."""

HELLO = p.Hello(
    protocol=1, name="g0", incarnation="a1", run_id=None, policy_version=None, slots=4, receivers=1,
    engine="vllm", host="localhost", pid=1,
)  # fmt: skip
HEARTBEAT = p.Heartbeat(accepting=True, holding=(), policy_version=3, stats=p.GeneratorStats())


class Running:
    """A server polled by its own thread, as in the coordinator; it answers heartbeats with Alive."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        self.server = Server(LIMIT, **options)
        self.port = self.server.bind("127.0.0.1", port)
        self.messages: list[tuple[str, Any]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _serve(self) -> None:
        while not self._stop:
            for identity, message in self.server.poll(PATIENCE_S):
                self.messages.append((identity, message))
                if isinstance(message, p.Heartbeat):
                    self.server.send(identity, p.Alive(run_id="run", policy_version=message.policy_version or 0))

    def do(self, action: Callable[[], Any]) -> Any:
        """Run `action` on the server's thread and return what it returns."""
        done: list[Any] = []
        finished = threading.Event()
        self.server.call(lambda: (done.append(action()), finished.set()))
        assert finished.wait(PATIENCE_S), "the server's thread did not run a call"
        return done[0]

    def send(self, identity: str, message: p.Message) -> bool:
        return self.do(lambda: self.server.send(identity, message))

    def close(self) -> None:
        self._stop = True
        self.server.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "wake did not end poll"
        self.server.close()


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        await asyncio.sleep(0.01)


def connected(address: str, incarnation: str = "a1", **options: Any) -> Client:
    client = Client("g0", incarnation, LIMIT, **options)
    client.connect(address)
    return client


async def test_large_arrays_arrive_in_both_directions(running: Running) -> None:
    client = connected(running.address)
    length = 60_000
    rng = np.random.default_rng(0)
    trajectory = p.Trajectory(
        status="truncated",
        completion_ids=rng.integers(0, 1000, length, dtype=np.int32),
        completion_mask=np.ones(length, np.uint8),
        behavior_logprobs=-rng.random(length, dtype=np.float32),
        versions=(p.VersionSpan(2, 0, length),),
        reward=1.0,
    )
    await client.send(HELLO)
    await client.send(p.Finished.of("run", {p.LeaseKey("train", 1, 0, 0): trajectory}))
    await until(lambda: len(running.messages) == 2, "two messages")
    (first, hello), (second, finished) = running.messages
    assert first == second == "g0/a1" and hello.slots == 4
    np.testing.assert_array_equal(finished.trajectories.completion_ids, trajectory.completion_ids)
    np.testing.assert_array_equal(finished.trajectories.behavior_logprobs, trajectory.behavior_logprobs)

    problem = p.Problem(id="1", prompt="", prompt_ids=np.arange(1, 50_000, dtype=np.int32))
    sampling = p.SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    lease = p.Lease(kind="train", ticket=1, member=0, attempt=0, problem=problem, sampling=sampling)
    assert running.send("g0/a1", p.Leases.of([lease]))
    got = await client.receive(PATIENCE_S)
    np.testing.assert_array_equal(got.leases[0].problem.prompt_ids, problem.prompt_ids)
    client.close()


async def test_receive_returns_none_after_its_time(running: Running) -> None:
    client = connected(running.address)
    assert await client.receive(0.02) is None
    client.close()


async def test_the_last_message_arrives_although_the_client_closes_at_once(running: Running) -> None:
    client = connected(running.address)
    await client.send(HELLO)
    for _ in range(200):
        await client.send(HEARTBEAT)
    await client.send(p.Goodbye(reason="done"))
    await asyncio.to_thread(client.close)
    await until(lambda: len(running.messages) == 202, "all messages of a closed client")
    assert running.messages[-1] == ("g0/a1", p.Goodbye(reason="done"))


async def test_garbage_is_counted_and_the_socket_keeps_working(running: Running) -> None:
    client = connected(running.address)
    await client.send(HELLO)
    await until(lambda: len(running.messages) == 1, "Hello")
    for garbage in (
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 40,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" * 9,
    ):
        with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
            raw.sendall(garbage)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{running.address}")
    for frames in ([b"\xc1"], [b""], [b"\x80", b"x" * 10], [msgspec.msgpack.encode({"type": "Stop", "reason": ""})]):
        stranger.send_multipart(frames)
    refused = running.server.refused
    await until(lambda: refused["bad_identity"] + refused["malformed"] == 4, "four refusals")
    await client.send(HEARTBEAT)
    assert await client.receive(PATIENCE_S) == p.Alive(run_id="run", policy_version=3)
    assert [type(message).__name__ for _, message in running.messages] == ["Hello", "Heartbeat"]
    context.destroy(linger=0)
    client.close()


async def test_malformed_messages_of_a_named_peer_are_counted(running: Running) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.identity = b"g0/a1"
    peer.connect(f"tcp://{running.address}")
    peer.send_multipart(p.encode(HELLO))
    peer.send_multipart([b"\xc1", b"junk"])
    peer.send_multipart(p.encode(HEARTBEAT))
    await until(lambda: len(running.messages) == 2, "two good messages")
    assert running.server.refused == {"malformed": 1}
    context.destroy(linger=0)


async def test_oversized_messages_are_refused_on_both_sides(running: Running) -> None:
    client = connected(running.address)
    await client.send(HELLO)
    big = p.Goodbye(reason="x" * LIMIT)
    with pytest.raises(InputError, match=f"Goodbye has .* the limit is transport.max_message_bytes={LIMIT}"):
        await client.send(big)
    careless = Client("g0", "a2", 10 * LIMIT)
    careless.connect(running.address)
    await careless.send(msgspec.structs.replace(HELLO, incarnation="a2"))
    await careless.send(big)
    await careless.send(HEARTBEAT)
    await until(lambda: len(running.messages) == 3, "the messages around an oversized one")
    assert running.server.refused == {"oversized": 1}
    careless.close()
    client.close()


async def test_a_peer_must_say_hello_and_is_told_so(running: Running) -> None:
    client = connected(running.address)
    await client.send(HEARTBEAT)
    answer = await client.receive(PATIENCE_S)
    assert isinstance(answer, p.Refused) and answer.retry and "Hello" in answer.reason
    await client.send(msgspec.structs.replace(HELLO, name="other"))
    await client.send(HELLO)
    await client.send(HEARTBEAT)
    assert isinstance(await client.receive(PATIENCE_S), p.Alive)
    assert running.server.refused == {"before_hello": 1, "bad_identity": 1}
    running.do(lambda: running.server.forget("g0/a1"))
    await client.send(HEARTBEAT)
    assert isinstance(await client.receive(PATIENCE_S), p.Refused)
    client.close()


async def test_a_server_restarted_on_its_port_is_found_again() -> None:
    first = Running()
    client = connected(first.address)
    await client.send(HELLO)
    await client.send(HEARTBEAT)
    assert isinstance(await client.receive(PATIENCE_S), p.Alive)
    first.close()
    second = Running(first.port)
    await client.send(HEARTBEAT)
    assert isinstance(await client.receive(PATIENCE_S), p.Refused), "a new server knows nobody"
    await client.send(HELLO)
    await client.send(HEARTBEAT)
    assert isinstance(await client.receive(PATIENCE_S), p.Alive)
    second.close()
    client.close()


async def test_reset_drops_the_old_queue_and_keeps_the_identity() -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    client = connected(f"127.0.0.1:{port}")
    await client.send(p.Goodbye(reason="to a learner that is gone"))
    waiting = asyncio.create_task(client.receive(PATIENCE_S))
    await asyncio.sleep(0)
    client.reset()
    await client.send(HELLO)
    await client.send(HEARTBEAT)
    running = Running(port)
    assert isinstance(await waiting, p.Alive), "a receive that was running goes on with the new socket"
    assert [type(message).__name__ for _, message in running.messages] == ["Hello", "Heartbeat"]
    running.close()
    client.close()


async def test_cancelling_a_receive_cancels_it(running: Running) -> None:
    client = connected(running.address)
    waiting = asyncio.create_task(client.receive(PATIENCE_S))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    client.close()


async def test_the_identity_of_a_cut_off_client_can_return(running: Running) -> None:
    """The first connection still stands (its process hangs) when the same identity connects anew."""
    hung = connected(running.address)
    await hung.send(HELLO)
    await until(lambda: len(running.messages) == 1, "the first Hello")
    returned = connected(running.address)
    await returned.send(HELLO)
    await until(lambda: len(running.messages) == 2, "the second Hello")
    assert running.send("g0/a1", p.Stop(reason="for the new one"))
    assert await returned.receive(PATIENCE_S) == p.Stop(reason="for the new one")
    returned.close()
    hung.close()


async def test_sending_to_a_vanished_peer_is_counted(running: Running) -> None:
    assert not running.send("g9/zz", p.Stop(reason="nobody"))
    client = connected(running.address)
    await client.send(HELLO)
    await until(lambda: len(running.messages) == 1, "Hello")
    await asyncio.to_thread(client.close)
    await until(lambda: not running.send("g0/a1", p.Stop(reason="gone")), "the server to notice")
    assert running.server.undelivered == {"vanished": 2}


async def test_a_flood_is_read_in_parts_and_calls_run_between_them() -> None:
    server, client = Server(LIMIT), Client("g0", "a1", LIMIT)
    client.connect(f"127.0.0.1:{server.bind('127.0.0.1', 0)}")
    sent = [HELLO, *(msgspec.structs.replace(HEARTBEAT, policy_version=number) for number in range(3 * MAX_POLL))]
    for message in sent:
        await client.send(message)
    await asyncio.sleep(1.0)  # All of it lies there.
    received: list[Any] = []
    sizes: list[int] = []
    asked_at: list[int] = []
    called_at: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < len(sent):
        assert time.monotonic() < deadline, f"{len(received)} of {len(sent)} messages came"
        asked_at.append(len(received))
        server.call(lambda: called_at.append(len(received)))
        found = await asyncio.to_thread(server.poll, 1.0)
        received.extend(message for _, message in found)
        sizes.append(len(found))
    assert received == sent
    assert max(sizes) == MAX_POLL, "the flood came, and in parts"
    assert called_at == asked_at, "each call ran before what was received after it"
    client.close()
    server.close()


async def test_a_peer_that_reads_nothing_blocks_nobody(running: Running) -> None:
    hung = connected(running.address)
    other = connected(running.address, "a2")
    await hung.send(HELLO)
    await other.send(msgspec.structs.replace(HELLO, incarnation="a2"))
    await until(lambda: len(running.messages) == 2, "two Hellos")
    stop = p.Stop(reason="x" * 20_000)
    taken = [running.send("g0/a1", stop) for _ in range(4000)]
    assert taken[0] and not taken[-1]
    assert running.server.undelivered == {"full": taken.count(False)}
    await other.send(HEARTBEAT)
    assert isinstance(await other.receive(PATIENCE_S), p.Alive)
    hung.reset()
    hung.close()
    other.close()


def test_a_busy_port_is_named_with_the_way_out() -> None:
    server = Running()
    other = Server(LIMIT)
    with pytest.raises(TransportError, match=rf"port {server.port} on 127.0.0.1 is in use.*transport.port"):
        other.bind("127.0.0.1", server.port)
    other.close()
    server.close()


def test_other_machines_are_kept_out_unless_the_user_says_so() -> None:
    server = Server(LIMIT)
    with pytest.raises(
        InputError, match=r"transport.host=0.0.0.0 can be reached.*transport.keys=FOLDER.*insecure=true"
    ):
        server.bind("0.0.0.0", 0)
    server.close()
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "somewhere")))


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", ":29400", "127.0.0.1:x", "127.0.0.1:70000", "h:-1", "h:²"]
)
def test_a_wrong_address_is_refused(address: str) -> None:
    client = Client("g0", "a1", LIMIT)
    with pytest.raises(InputError, match="is not HOST:PORT"):
        client.connect(address)
    client.close()


def test_addresses_of_both_families() -> None:
    assert split_address("[::1]:29400") == ("::1", 29400)
    assert split_address("learner.example:1") == ("learner.example", 1)
    assert [join_address("::1", 5), join_address("127.0.0.1", 5)] == ["[::1]:5", "127.0.0.1:5"]


async def test_keys_admit_their_holders_only(tmp_path: Path) -> None:
    create_keys(tmp_path / "run")
    create_keys(tmp_path / "other")
    learner, holder_keys = load_keys(tmp_path / "run", "learner"), load_keys(tmp_path / "run", "generator")
    other = load_keys(tmp_path / "other", "generator")
    running = Running(security=learner)
    holder = connected(running.address, security=holder_keys)
    await holder.send(HELLO)
    await holder.send(HEARTBEAT)
    assert isinstance(await holder.receive(PATIENCE_S), p.Alive)

    knows_only_public = msgspec.structs.replace(other, peer=holder_keys.peer)
    for security in (None, other, knows_only_public):
        before = sum(running.server.refused.values())
        intruder = connected(running.address, "a2", security=security)
        await intruder.send(msgspec.structs.replace(HELLO, incarnation="a2"))
        await until(lambda before=before: sum(running.server.refused.values()) > before, "a refusal")
        intruder.reset()
        intruder.close()
    assert {identity for identity, _ in running.messages} == {"g0/a1"}
    assert running.server.refused["wrong_key"] >= 1 and running.server.refused["handshake"] >= 2
    holder.close()
    running.close()


async def test_a_generator_key_cannot_pose_as_the_learner(tmp_path: Path) -> None:
    """A stolen generator.key lets its holder join; other generators do not take it for their learner."""
    create_keys(tmp_path / "run")
    stolen = load_keys(tmp_path / "run", "generator")
    impostor = Running(security=msgspec.structs.replace(stolen, peer=stolen.public))
    victim = connected(impostor.address, security=stolen)
    await victim.send(HELLO)
    await until(lambda: impostor.server.refused["handshake"] > 0, "the victim's client to break off")
    assert impostor.messages == []
    victim.reset()
    victim.close()
    impostor.close()
