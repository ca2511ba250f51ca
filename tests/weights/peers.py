"""Receivers in processes of their own, driven over a pipe, so that tests can kill and stop them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import SendBuffers, host_bytes
from async_rl.weights.broadcast import Receiver, Sender
from async_rl.weights.errors import WeightsError

ANSWER_S = 180.0


class Peer:
    """One receiver process. `call` asks for a method and waits; `tell` only asks, `answer` waits."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def tell(self, method: str, *args: object) -> None:
        self._pipe.send((method, args))

    def answer(self) -> object:
        """The method's result; WeightsError is raised here as it was there."""
        assert self._pipe.poll(ANSWER_S), "no answer of the receiver process"
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, method: str, *args: object) -> object:
        self.tell(method, *args)
        return self.answer()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.join(ANSWER_S)


def _serve(pipe: Connection) -> None:
    """The process: obey until the pipe closes."""
    torch.set_num_threads(1)
    receiver = Receiver()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(receiver, method)(*args)
            if method == "receive":
                result = (result.checksum, {name: bytes(host_bytes(tensor)) for name, tensor in result.tensors()})
            pipe.send(result)
        except WeightsError as error:
            pipe.send(error)
        except Exception:
            pipe.send(RuntimeError(traceback.format_exc()))


@contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    """Receiver processes that are gone afterwards, whatever happened to them."""
    started = [Peer() for _ in range(count)]
    try:
        for peer in started:
            peer.call("leave")
        yield started
    finally:
        for peer in started:
            peer.end()


def epoch_info(sender: Sender, epoch: int, rank: int, size: int, deadline_s: float = 120.0) -> EpochInfo:
    return EpochInfo(
        epoch=epoch, backend=sender.backend, host=sender.host, port=sender.port, rank=rank, size=size,
        deadline_s=deadline_s,
    )  # fmt: skip


def join_all(sender: Sender, members: list[Peer], epoch: int) -> None:
    """Build the group of an epoch with all of `members`."""
    size = len(members) + 1
    for rank, peer in enumerate(members, start=1):
        peer.tell("join", epoch_info(sender, epoch, rank, size))
    sender.join(epoch, size, 120.0)
    for peer in members:
        peer.answer()


def filled(seed: int, bucket_bytes: int = 1 << 16, scale: int = 1) -> tuple[SendBuffers, Manifest]:
    """Buffers with float32 and bfloat16 tensors of odd sizes, one larger than a bucket, and their manifest."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (301, 97), "norm": (33,), "bias": (7,), "scalar": (), "empty": (0, 4), "head": (64 * scale, 129)}
    tensors = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    tensors += [(f"{name}.half", tensor.bfloat16()) for name, tensor in tensors]
    buffers = SendBuffers(bucket_bytes)
    buffers.fill(tensors)
    return buffers, buffers.manifest("run-a", seed)


def bytes_of(buffers: SendBuffers) -> dict[str, bytes]:
    return {name: bytes(host_bytes(tensor)) for name, tensor in buffers.tensors()}
