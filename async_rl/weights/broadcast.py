"""Weights by broadcast, both ends: rank 0 sends bucket after bucket, every other rank receives into fresh memory.

A group lives for one membership epoch and stands outside any other process group of its process, so a
receiver may die without taking the learner along. Small facts travel through the group's store: who is here,
who has everything, who gave up. So a wait can end early, and an error can name the rank that did not answer.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import (
    BucketLayout,
    Checksum,
    Deadline,
    ReceivedWeights,
    SendBuffers,
    WeightsError,
    check_manifest,
)

Backend = Literal["gloo", "nccl"]
IN_FLIGHT = 2
"""Buckets under way at once: one is sent while the one before it is hashed."""
POLL_S = 0.001
"""Seconds between looks at a transfer."""
NEWS_S = 0.1
"""Seconds between looks into the store while a transfer runs."""
SETTLE_S = 1.0
"""Seconds that a failed sender waits for the others to say that they are alive."""
STORE_TIMEOUT_S = 10.0
"""Longest wait for one answer of the store."""
_GAVE_UP, _TROUBLE, _GO = "gave-up", "trouble", "go"


class _Group:
    """One end's place in the broadcast group of one epoch."""

    def __init__(
        self, store: TCPStore, backend: Backend, device: torch.device, epoch: int, rank: int, size: int
    ) -> None:
        self.epoch, self.rank, self.size, self.transfers = epoch, rank, size, 0
        self.store = PrefixStore(f"epoch-{epoch}", store)
        self._tcp, self._backend, self._device = store, backend, device
        self._group: ProcessGroup | None = None
        self._works: deque[tuple[int, Work]] = deque()

    def connect(self, deadline: Deadline) -> None:
        """Build the process group; every rank is here already, so what takes time now is broken."""
        if self.size == 1:
            return
        try:
            address = _local_address(self._tcp.host, self._tcp.port)
            self._group = _build_group(self._backend, self.store, self.rank, self.size, address, deadline)
            greeting = torch.full((1,), self.epoch % 256, dtype=torch.uint8, device=self._device)
            for _ in self.broadcast([greeting], deadline, lambda bucket: "greeting"):
                pass
        except RuntimeError as error:
            raise WeightsError(
                f"epoch {self.epoch}: rank {self.rank} of {self.size} could not connect: {error}"
            ) from error

    def broadcast(
        self, buckets: list[torch.Tensor], deadline: Deadline, where: Callable[[int], str]
    ) -> Iterator[torch.Tensor]:
        """Broadcast from rank 0, yielding each bucket as soon as it is through."""
        assert self._group is not None, "broadcast in a group without peers"
        for index, bucket in enumerate(buckets):
            self._works.append((index, self._group.broadcast(bucket, 0, timedelta(seconds=deadline.left() + 0.001))))
            if len(self._works) >= IN_FLIGHT:
                yield buckets[self._finish_oldest(deadline, where)]
        while self._works:
            yield buckets[self._finish_oldest(deadline, where)]

    def _finish_oldest(self, deadline: Deadline, where: Callable[[int], str]) -> int:
        """Wait for the oldest bucket under way; return its index."""
        index, work = self._works[0]
        news = Deadline(NEWS_S)
        while not work.is_completed():
            if deadline.passed():
                raise WeightsError(f"{where(index)}: no progress within {deadline.seconds:g} s")
            if news.passed():
                self.raise_news(where(index))
                news = Deadline(NEWS_S)
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightsError(f"{where(index)}: {str(error).splitlines()[0]}") from error
        self._works.popleft()
        return index

    def raise_news(self, where: str) -> None:
        """Raise what the other end has reported, if anything."""
        for key in (_GAVE_UP, _TROUBLE):
            if self.has(key):
                raise WeightsError(f"{where}: {self.read(key)}")

    def key(self, kind: str, rank: int) -> str:
        """Store key of one rank's report on the current transfer."""
        return f"{self.transfers}/{kind}/{rank}"

    def has(self, key: str) -> bool:
        return _store_call(lambda: self.store.check([key]), self.epoch)

    def read(self, key: str) -> str:
        return _store_call(lambda: self.store.get(key).decode(), self.epoch)

    def write(self, key: str, value: str) -> None:
        _store_call(lambda: self.store.set(key, value), self.epoch)

    def leave(self) -> None:
        """Drop the process group; work still under way is left to a thread until its own time is up.

        Destroying a Gloo group waits for its running operations while holding the interpreter lock.
        """
        group, works, self._group = self._group, [work for _, work in self._works], None
        self._works.clear()
        if group is None:
            return
        if self._backend == "nccl":
            group.abort()
        pending = [work for work in works if not work.is_completed()]
        if pending:
            name = f"weights-epoch-{self.epoch}-leftover"
            threading.Thread(target=_hold_until_done, args=(group, pending), name=name, daemon=True).start()


class Sender:
    """Rank 0 of every epoch, and owner of the store. Blocking: meant for one worker thread; waits release the GIL."""

    def __init__(self, host: str, backend: Backend, device: torch.device | str = "cpu", port: int = 0) -> None:
        self.host, self.backend, self.device = host, backend, torch.device(device)
        _check_backend(backend, self.device)
        self._store = _serve_store(host, port)
        self.port: int = self._store.port
        self._group: _Group | None = None

    @property
    def epoch(self) -> int | None:
        """Epoch of the group that stands; None: none."""
        return self._group.epoch if self._group else None

    def join(self, epoch: int, size: int, deadline_s: float) -> None:
        """Build the group of an epoch with `size` ranks, this one included, leaving any earlier group.

        Raises WeightsError whose `ranks` are those that did not come within the deadline.
        """
        self.leave()
        deadline = Deadline(deadline_s)
        group = _Group(self._store, self.backend, self.device, epoch, 0, size)
        missing = list(range(1, size))
        while missing := [rank for rank in missing if not group.has(f"here/{rank}")]:
            if deadline.passed():
                reason = f"epoch {epoch}: {_ranks(missing)} of {size} did not join within {deadline_s:g} s"
                group.write(_GAVE_UP, reason)
                raise WeightsError(reason, missing)
            time.sleep(POLL_S * 10)
        group.write(_GO, "")
        try:
            group.connect(deadline)
        except WeightsError as error:
            raise _give_up(group, error) from error
        self._group = group

    def send(self, buffers: SendBuffers, manifest: Manifest, deadline_s: float) -> None:
        """Send all bytes and wait until every rank has them.

        Raises WeightsError within the deadline (and a second for the answers of the others); `ranks` are those that
        did not answer. The group is left then: the next publication needs a new epoch.
        """
        group = self._group
        if group is None:
            raise WeightsError(f"version {manifest.version}: no group stands; join an epoch first")
        deadline = Deadline(deadline_s)
        try:
            self._send(group, buffers, manifest, deadline)
        except WeightsError as error:
            self._group = None
            raise _give_up(group, error) from error
        group.transfers += 1

    def _send(self, group: _Group, buffers: SendBuffers, manifest: Manifest, deadline: Deadline) -> None:
        buckets = buffers.buckets
        if group.size > 1:
            for _ in group.broadcast(buckets, deadline, _namer("sending", group, manifest, len(buckets))):
                pass
        waiting = list(range(1, group.size))
        while waiting := [rank for rank in waiting if not group.has(group.key("done", rank))]:
            where = f"epoch {group.epoch}: waiting for {_ranks(waiting)} to have version {manifest.version}"
            if deadline.passed():
                raise WeightsError(f"{where}: nothing within {deadline.seconds:g} s")
            group.raise_news(where)
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Leave the group that stands, if any."""
        if self._group:
            self._group.leave()
        self._group = None

    def close(self) -> None:
        """Leave the group and stop the store; callable more than once."""
        self.leave()
        self._store = None


class Receiver:
    """One rank that receives. Blocking: meant for a background thread; waits release the GIL."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._group: _Group | None = None
        self._shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def epoch(self) -> int | None:
        """Epoch of the group that stands; None: none."""
        return self._group.epoch if self._group else None

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse, before any byte, publications whose names or shapes are not these."""
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def join(self, info: EpochInfo, rank_offset: int = 0) -> None:
        """Stand in the group of an epoch, leaving any earlier one; raises WeightsError."""
        self.leave()
        _check_backend(info.backend, self.device)
        deadline, rank = Deadline(info.deadline_s), info.rank + rank_offset
        if not 0 < rank < info.size:
            raise WeightsError(f"epoch {info.epoch}: rank {rank} is not in 1..{info.size - 1}")
        group = _Group(self._connect(info, deadline), info.backend, self.device, info.epoch, rank, info.size)
        group.write(f"here/{rank}", "")
        while not group.has(_GO):
            where = f"epoch {info.epoch}: rank {rank} waiting for {info.size} ranks"
            group.raise_news(where)
            if deadline.passed():
                raise WeightsError(f"{where}: not together within {info.deadline_s:g} s")
            time.sleep(POLL_S * 10)
        try:
            group.connect(deadline)
        except WeightsError:
            group.leave()
            raise
        self._group = group

    def receive(self, manifest: Manifest, deadline_s: float) -> ReceivedWeights:
        """Receive one publication into fresh buckets and verify its checksum.

        Raises WeightsError; the group is left then, and the sender told why.
        """
        group = self._group
        if group is None:
            raise WeightsError(f"version {manifest.version}: this receiver stands in no group; join an epoch first")
        try:
            received = self._receive(group, manifest, Deadline(deadline_s))
            group.write(group.key("done", group.rank), received.checksum)
        except WeightsError as error:
            self._group = None
            _report_trouble(group, error)
            group.leave()
            raise
        group.transfers += 1
        return received

    def _receive(self, group: _Group, manifest: Manifest, deadline: Deadline) -> ReceivedWeights:
        check_manifest(manifest, self._shapes)
        layout = BucketLayout.of(manifest.tensors, manifest.bucket_bytes)
        received = ReceivedWeights(manifest, layout.allocate(self.device), manifest.checksum)
        views, checksum = (view for _, view in received.tensors()), Checksum()
        where = _namer("receiving", group, manifest, len(layout.sizes))
        counts = [0] * len(layout.sizes)
        for bucket, _ in layout.places:
            counts[bucket] += 1
        for index, _ in enumerate(group.broadcast(received.buckets, deadline, where)):
            for _ in range(counts[index]):
                checksum.update(next(views))
        if checksum.hexdigest() != manifest.checksum:
            raise WeightsError(
                f"epoch {group.epoch}: rank {group.rank} received other bytes than were sent for version "
                f"{manifest.version}: checksum {checksum.hexdigest()}, announced {manifest.checksum}"
            )
        return received

    def _connect(self, info: EpochInfo, deadline: Deadline) -> TCPStore:
        """The learner's store; kept as long as its address stays."""
        address = (info.host, info.port)
        if self._store is None or self._address != address:
            timeout = timedelta(seconds=max(0.1, min(STORE_TIMEOUT_S, deadline.left())))
            self._store = _store_call(
                lambda: TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout), info.epoch
            )
            self._address = address
        return self._store

    def leave(self) -> None:
        """Leave the group that stands, if any."""
        if self._group:
            self._group.leave()
        self._group = None

    def close(self) -> None:
        """Leave the group and the store; callable more than once."""
        self.leave()
        self._store = self._address = None


def _build_group(
    backend: Backend, store: PrefixStore, rank: int, size: int, address: str, deadline: Deadline
) -> ProcessGroup:
    """A process group of its own, not registered anywhere."""
    timeout = timedelta(seconds=deadline.left() + 0.001)
    if backend == "gloo":
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout, options._threads = timeout, IN_FLIGHT
        return ProcessGroupGloo(store, rank, size, options)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # NCCL's watchdog ends the process at its timeout; our own deadlines come long before.
    options._timeout = timedelta(days=1)
    return ProcessGroupNCCL(store, rank, size, options)


def _check_backend(backend: Backend, device: torch.device) -> None:
    needed = {"gloo": "cpu", "nccl": "cuda"}[backend]
    if device.type != needed:
        raise ValueError(f"weights.backend={backend!r} moves {needed} memory, this end has {device.type}")


def _serve_store(host: str, port: int) -> TCPStore:
    """A store that listens on `host` only (by itself it would listen on every address)."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ValueError(f"weights.port={port} on {host}: {error.strerror}; 0 takes any free port") from error
        listener.listen(1024)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )


def _local_address(host: str, port: int) -> str:
    """The address of this machine that the learner's network sees: loopback for a loopback learner."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _store_call(call, epoch: int):
    """A question to the store; its failures are the learner's absence."""
    try:
        return call()
    except RuntimeError as error:
        raise WeightsError(
            f"epoch {epoch}: the learner's store does not answer: {str(error).splitlines()[0]}"
        ) from error


def _give_up(group: _Group, error: WeightsError) -> WeightsError:
    """Tell the receivers, leave, and find out who is silent; return the error with their ranks."""
    group.write(_GAVE_UP, str(error))
    group.leave()
    silent, settle = list(range(1, group.size)), Deadline(SETTLE_S)
    while silent and not settle.passed():
        silent = [r for r in silent if not (group.has(group.key("done", r)) or group.has(group.key("trouble", r)))]
        time.sleep(POLL_S * 10)
    suffix = f"; {_ranks(silent)} of {group.size} did not answer" if silent else ""
    return WeightsError(f"{error}{suffix}", silent)


def _report_trouble(group: _Group, error: WeightsError) -> None:
    """Tell the sender, if it can still be told."""
    try:
        group.write(group.key("trouble", group.rank), "")
        if not group.has(_GAVE_UP):
            group.write(_TROUBLE, f"rank {group.rank} reports: {error}")
    except WeightsError:
        pass  # the store is gone, and the caller raises the error anyway


def _hold_until_done(group: ProcessGroup, works: list[Work]) -> None:
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)


def _namer(verb: str, group: _Group, manifest: Manifest, buckets: int) -> Callable[[int], str]:
    """What an error calls the wait for a bucket."""
    return lambda index: (
        f"epoch {group.epoch}: rank {group.rank} {verb} version {manifest.version}, bucket {index + 1} of {buckets}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
