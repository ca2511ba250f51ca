"""A stand-in for the learner, in a process of its own: leases members to one generator, and publishes when told to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from async_rl import protocol as p
from async_rl.transport import Server
from async_rl.weights.base import SendBuffers
from async_rl.weights.broadcast import Sender

HOST = "127.0.0.1"
LIMIT_BYTES = 64 << 20
TIMEOUT_S = 300.0
SIZE = 2
"""Ranks of the broadcast group: this process and the engine."""


@dataclass
class Round:
    """What one round took, and what its publications cost."""

    seconds: float = 0.0
    tokens: int = 0
    publications: int = 0
    while_sampling: int = 0
    """Of the publications, those that were loaded before the last member came back."""
    receive_s: list[float] = field(default_factory=list)
    """From the word that a publication comes to all bytes verified, while sampling goes on."""
    load_s: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)


def tensors(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model folder, in an order that is the same every time."""
    for file in sorted(model.glob("*.safetensors")):
        yield from sorted(load_file(file).items())


class StandIn:
    """The state of this process; the generator's side tells it over `pipe` what to do."""

    def __init__(self, pipe: Any, leases: Sequence[p.Lease], slots: int, model: Path) -> None:
        self.pipe, self.leases, self.slots = pipe, leases, slots
        self.server = Server(LIMIT_BYTES)
        self.pipe.send(self.server.bind(HOST, 0))
        self.sender, self.buffers = Sender(HOST, "gloo"), SendBuffers(LIMIT_BYTES)
        self.buffers.fill(tensors(model))  # the same weights each time: tokens do not depend on when they come
        self.pool = ThreadPoolExecutor(1)
        self.sending: Future[None] | None = None
        """A join or a publication under way, as far as this end goes."""
        self.peer = ""
        self.version = self.loaded = 0
        self.todo: list[p.Lease] = []
        self.outstanding, self.attempt, self.began = 0, 0, 0.0
        self.round = Round()
        self.wanted: list[int] = []
        """Members after whose end a publication begins, the next one last."""

    def serve(self) -> None:
        """Until it is told to stop."""
        while True:
            if self.pipe.poll():
                told = self.pipe.recv()
                if told == "stop":
                    break
                self.begin(publications=told)
            for identity, message in self.server.poll(0.01):
                self.handle(identity, message)
            self.lease()
            self.publish()
        self.sender.close()
        self.pool.shutdown()
        self.server.close()

    def begin(self, publications: int) -> None:
        """A round: every member once, weights published evenly between the first and the last."""
        self.attempt += 1
        self.todo = [msgspec.structs.replace(lease, attempt=self.attempt) for lease in reversed(self.leases)]
        self.wanted = [len(self.leases) * (n + 1) // (publications + 1) for n in reversed(range(publications))]
        self.round, self.began = Round(publications=publications), time.perf_counter()

    def handle(self, identity: str, message: p.Message) -> None:
        match message:
            case p.Hello():
                self.welcome(identity)
            case p.Heartbeat():
                self.server.send(identity, p.Alive(run_id="benchmark", policy_version=self.loaded))
            case p.EpochJoined(error=None):
                self.pipe.send("joined")
            case p.Received(error=None):
                self.round.receive_s.append(message.receive_s)
            case p.Loaded(error=None):
                self.loaded = message.version
                self.round.while_sampling += not self.round.seconds
                self.round.load_s.append(message.load_s)
                self.round.paused_s.append(message.paused_s)
                self.end_of_round()
            case p.Finished():
                outcomes = ("stored",) * len(message.keys)
                self.server.send(identity, p.Acknowledged(keys=message.keys, outcomes=outcomes))
                self.round.tokens += len(message.trajectories.completion_ids)
                self.outstanding -= len(message.keys)
                self.end_of_round()
            case p.Returned(keys=()) | p.Goodbye():
                pass
            case _:
                raise RuntimeError(f"the generator sent {message}, which this benchmark does not expect")

    def welcome(self, identity: str) -> None:
        """Take the generator in, and build the broadcast group with it."""
        self.peer = identity
        limits = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 60.0, "max_message_bytes": LIMIT_BYTES}
        self.server.send(identity, p.Welcome(run_id="benchmark", policy_version=0, **limits))
        info = p.EpochInfo(epoch=1, backend="gloo", host=HOST, port=self.sender.port, rank=1, size=SIZE,
                           deadline_s=TIMEOUT_S)  # fmt: skip
        self.sending = self.pool.submit(self.sender.join, 1, SIZE, TIMEOUT_S)
        self.server.send(identity, p.JoinEpoch(info=info))

    def lease(self) -> None:
        """One for each slot that is free, as a coordinator does."""
        batch = [self.todo.pop() for _ in range(min(self.slots - self.outstanding, len(self.todo)))]
        if batch:
            self.outstanding += len(batch)
            self.server.send(self.peer, p.Leases.of(batch))

    def publish(self) -> None:
        """Publish if it is time and nothing is under way; what failed to be sent raises here."""
        if self.sending is not None and self.sending.done():
            self.sending.result()
            self.sending = None
        ended = len(self.leases) - len(self.todo) - self.outstanding
        if self.sending or self.loaded < self.version or not self.wanted or ended < self.wanted[-1]:
            return
        self.wanted.pop()
        self.version += 1
        manifest = self.buffers.manifest("benchmark", self.version)
        self.sending = self.pool.submit(self.sender.send, self.buffers, manifest, TIMEOUT_S)
        self.server.send(self.peer, p.Publish(epoch=1, manifest=manifest, deadline_s=TIMEOUT_S))

    def end_of_round(self) -> None:
        """Report when every member has come back and every publication is loaded."""
        if self.todo or self.outstanding:
            return
        self.round.seconds = self.round.seconds or time.perf_counter() - self.began
        if len(self.round.paused_s) == self.round.publications:
            self.pipe.send(self.round)


def serve(pipe: Any, leases: Sequence[p.Lease], slots: int, model: Path) -> None:
    """The process."""
    torch.set_num_threads(1)
    StandIn(pipe, leases, slots, model).serve()
