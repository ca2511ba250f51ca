"""A broadcast group of one membership epoch, and the store through which its ranks tell each other how it goes.

The group stands outside any other process group of its process, so a receiver may die without taking the
learner along. Small facts travel through the store: who is here, who has everything, who gave up. So a wait
can end early, and an error can name the rank that did not answer.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from async_rl.errors import InputError
from async_rl.weights.base import Deadline
from async_rl.weights.errors import WeightsError

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")
IN_FLIGHT = 2
"""Buckets under way at once: one is sent while the one before it is hashed."""
POLL_S = 0.001
"""Seconds between looks at a transfer."""
NEWS_S = 0.1
"""Seconds between looks into the store while a transfer runs."""
STORE_TIMEOUT_S = 10.0
"""Longest wait for one answer of the store."""
SLACK_S = 1.0
"""Seconds by which Gloo's own timeouts come after the deadline, so that the error is ours."""
GAVE_UP, TROUBLE, GO = "gave-up", "trouble", "go"
"""Store keys: the sender gave up (why), a receiver failed (why), every rank is here."""


class Group:
    """One rank's place in the broadcast group of one epoch."""

    def __init__(
        self,
        store: TCPStore,
        backend: Backend,
        device: torch.device,
        epoch: int,
        rank: int,
        size: int,
        abandoned: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`abandoned` says why this epoch is to be given up, once it is: it is asked during every wait."""
        self.epoch, self.rank, self.size = epoch, rank, size
        self.abandoned = abandoned
        self.transfers = 0
        """Transfers completed; both ends count alike, so it names the reports on the current one."""
        self._store = PrefixStore(f"epoch-{epoch}", store)
        self._learner = (store.host, store.port)
        self._backend, self._device = backend, device
        self._group: Any = None
        self._works: deque[tuple[torch.Tensor, Work]] = deque()

    def connect(self, deadline: Deadline) -> None:
        """Build the process group. Every rank is here already, so what takes long now is broken."""
        if self.size == 1:
            return
        where = f"epoch {self.epoch}: rank {self.rank} of {self.size} connecting"
        try:
            self._group = self._build(deadline)
        except RuntimeError as error:
            raise WeightsError(f"{where}: {_first_line(error)}") from error
        greeting = torch.full((1,), self.epoch % 256, dtype=torch.uint8, device=self._device)
        for _ in self.broadcast([greeting], deadline, lambda _: where):
            pass

    def broadcast(
        self, buckets: Iterable[torch.Tensor], deadline: Deadline, where: Callable[[int], str]
    ) -> Iterator[torch.Tensor]:
        """Broadcast from rank 0; yield each bucket, in order, as soon as it is through.

        Raises WeightsError at the deadline, on a broken connection, and when another rank reports its failure.
        """
        done = 0
        for bucket in buckets:
            if len(self._works) == IN_FLIGHT:
                yield self._finish_oldest(deadline, where(done))
                done += 1
            timeout = timedelta(seconds=deadline.left() + SLACK_S)
            self._works.append((bucket, self._group.broadcast(bucket, 0, timeout)))
        while self._works:
            yield self._finish_oldest(deadline, where(done))
            done += 1

    def _finish_oldest(self, deadline: Deadline, where: str) -> torch.Tensor:
        """Wait for the oldest bucket under way."""
        bucket, work = self._works[0]
        while not self._wait(work, deadline, where):
            if deadline.passed():
                raise _late(deadline, where)
            self.raise_news(where)
        self._works.popleft()
        return bucket

    def _wait(self, work: Work, deadline: Deadline, where: str) -> bool:
        """Whether an operation ended before it is time to look for news; raises WeightsError if it failed."""
        seconds = min(NEWS_S, deadline.left())
        until = Deadline(seconds)
        try:
            if self._backend == "gloo" and seconds > POLL_S:
                work.wait(timedelta(seconds=seconds))
                return True
            while not work.is_completed():  # NCCL's wait only orders streams
                if until.passed():
                    return False
                time.sleep(POLL_S)
            work.wait()
            return True
        except RuntimeError as error:
            if not work.is_completed():
                return False
            self.raise_news(where)  # A reset connection is often the echo of what a rank has reported.
            if deadline.passed():  # On a busy machine gloo's own timeout, which comes later, may be seen first.
                raise _late(deadline, where) from error
            raise WeightsError(f"{where}: {_first_line(error)}") from error

    def raise_news(self, where: str) -> None:
        """Raise what another rank has reported, or why this epoch is given up, if anything."""
        if (reason := self.abandoned()) is not None:
            raise WeightsError(f"{where}: {reason}")
        for key in (GAVE_UP, TROUBLE):
            if self.has(key):
                raise WeightsError(f"{where}: {self.read(key)}")

    def key(self, kind: str, rank: int) -> str:
        """Store key of one rank's report on the current transfer."""
        return f"{self.transfers}/{kind}/{rank}"

    def forget_transfer(self, number: int) -> None:
        """Delete the reports on an earlier transfer: a store that only grows would slow down and fill up."""
        if number < 0:
            return
        for key in (f"{number}/{kind}/{rank}" for rank in range(1, self.size) for kind in ("done", "trouble")):
            self.ask(partial(self._store.delete_key, key))

    def has(self, key: str) -> bool:
        """Whether a fact is in the store."""
        return self.ask(lambda: self._store.check([key]))

    def read(self, key: str) -> str:
        """A fact that is in the store."""
        return self.ask(lambda: self._store.get(key)).decode()

    def write(self, key: str, value: str = "") -> None:
        """Put a fact into the store."""
        self.ask(lambda: self._store.set(key, value))

    def ask(self, question: Callable[[], T]) -> T:
        """Ask the store; its failures mean that the learner is gone."""
        return ask_store(question, f"epoch {self.epoch}")

    def leave(self) -> None:
        """Drop the process group.

        Destroying a Gloo group waits for its running operations while it holds the interpreter lock, so those are
        left to a thread until their own time is up.
        """
        group, pending, self._group = self._group, [work for _, work in self._works if not work.is_completed()], None
        self._works.clear()
        if group is None:
            return
        if self._backend == "nccl":
            group.abort()
        if pending:
            name = f"weights-epoch-{self.epoch}-leftover"
            threading.Thread(target=_hold_until_done, args=(group, pending), name=name, daemon=True).start()

    def _build(self, deadline: Deadline) -> Any:
        """A ProcessGroupGloo or ProcessGroupNCCL, registered nowhere."""
        if self._backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            # NCCL's watchdog ends the whole process at its timeout; our own deadlines come long before.
            nccl._timeout = timedelta(days=1)
            return ProcessGroupNCCL(self._store, self.rank, self.size, nccl)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_local_address(*self._learner))]
        options._timeout, options._threads = timedelta(seconds=deadline.left() + SLACK_S), IN_FLIGHT
        return ProcessGroupGloo(self._store, self.rank, self.size, options)


def check_backend(backend: Backend, device: torch.device) -> None:
    """Raise InputError for a backend that cannot move this device's memory."""
    needed = {"gloo": "cpu", "nccl": "cuda"}[backend]
    if device.type != needed:
        raise InputError(f"weights.backend={backend!r} moves {needed} memory, this end has {device.type}")


def serve_store(host: str, port: int) -> TCPStore:
    """A store that listens on `host` only (left to itself it listens on every address)."""
    if host in ("", "*", "0.0.0.0", "::"):
        raise InputError(
            f"transport.host={host!r} is no address that generators can connect to for weights; "
            "set it to this machine's address in their network"
        )
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InputError(f"weights.port={port} on {host}: {error.strerror}; 0 takes any free port") from error
        listener.listen(1024)
        bound = listener.getsockname()[1]
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        return TCPStore(host, bound, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def forget_epochs(store: TCPStore, newest: int) -> None:
    """Delete what epochs up to `newest` left in the store, the addresses of their process groups included."""
    for key in store.list_keys():
        prefix, _, _ = key.partition("/")
        number = prefix.removeprefix("epoch-")
        if prefix != number and number.isdigit() and int(number) <= newest:
            store.delete_key(key)


def connect_store(host: str, port: int, deadline: Deadline, where: str) -> TCPStore:
    """The learner's store; raises WeightsError when it does not answer."""
    timeout = timedelta(seconds=max(POLL_S, min(STORE_TIMEOUT_S, deadline.left())))
    return ask_store(lambda: TCPStore(host, port, None, False, timeout, wait_for_workers=False), where)


def ask_store(question: Callable[[], T], where: str) -> T:
    """Ask a store; its failures mean that the learner is gone."""
    try:
        return question()
    except RuntimeError as error:
        raise WeightsError(f"{where}: the learner's store does not answer: {_first_line(error)}") from error


def _local_address(host: str, port: int) -> str:
    """The address of this machine on the way to the learner: loopback for a loopback learner."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _hold_until_done(group: Any, works: list[Work]) -> None:
    """Keep a group alive until its last operation has ended."""
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)


def _late(deadline: Deadline, where: str) -> WeightsError:
    return WeightsError(f"{where}: no progress within {deadline.seconds:g} s")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
