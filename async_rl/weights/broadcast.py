"""Weights by broadcast, both ends: rank 0 sends bucket after bucket, every other rank receives into fresh memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch.distributed import TCPStore

from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import BucketLayout, Checksum, Deadline, ReceivedWeights, SendBuffers, check_manifest
from async_rl.weights.errors import WeightsError
from async_rl.weights.group import (
    GAVE_UP,
    GO,
    POLL_S,
    TROUBLE,
    Backend,
    Group,
    check_backend,
    connect_store,
    forget_epochs,
    serve_store,
)

GATHER_POLL_S = 0.01
"""Seconds between looks at who is here."""
EPOCHS_KEPT = TRANSFERS_KEPT = 2
"""How many of the last ones stay in the store, for a rank that is late to read why they failed."""
SETTLE_S = 1.0
"""Seconds that a failed sender waits for the others to say that they are alive."""


class Sender:
    """Rank 0 of every epoch, and owner of the store.

    Blocking: meant for one worker thread; the interpreter lock is free while it waits.
    """

    def __init__(self, host: str, backend: Backend, device: torch.device | str = "cpu", port: int = 0) -> None:
        self.host, self.backend, self.device = host, backend, torch.device(device)
        check_backend(backend, self.device)
        self._store: TCPStore | None = serve_store(host, port)
        self.port: int = self._store.port
        self._group: Group | None = None
        self._abandoned: tuple[int, str] | None = None
        """The newest epoch to give up, and why."""

    @property
    def epoch(self) -> int | None:
        """Epoch of the group that stands; None: none."""
        return self._group.epoch if self._group else None

    def abandon(self, epoch: int, reason: str) -> None:
        """Have the work for an epoch, under way or to come, end soon with WeightsError; safe from every thread."""
        self._abandoned = (epoch, reason)

    def join(self, epoch: int, size: int, deadline_s: float) -> None:
        """Build the group of an epoch with `size` ranks, this one included, leaving any earlier group.

        Raises WeightsError whose `ranks` are those that did not come within the deadline, or until it was abandoned.
        """
        self.leave()
        assert self._store is not None, "join after close"
        forget_epochs(self._store, epoch - EPOCHS_KEPT)
        deadline = Deadline(deadline_s)
        group = Group(self._store, self.backend, self.device, epoch, 0, size, lambda: self._why_abandoned(epoch))
        missing = list(range(1, size))
        while missing := [rank for rank in missing if not group.has(f"here/{rank}")]:
            why = group.abandoned() or (f"not within {deadline_s:g} s" if deadline.passed() else None)
            if why is not None:
                reason = f"epoch {epoch}: {_ranks(missing)} of {size} did not join: {why}"
                group.write(GAVE_UP, reason)
                raise WeightsError(reason, missing)
            time.sleep(GATHER_POLL_S)
        group.write(GO)
        try:
            group.connect(deadline)
        except WeightsError as error:
            raise _give_up(group, error) from error
        self._group = group

    def send(self, buffers: SendBuffers, manifest: Manifest, deadline_s: float) -> None:
        """Send all bytes and wait until every rank has them.

        Raises WeightsError within the deadline (and a second for the answers of the others); its `ranks` are those
        that did not answer. The group is left then: the next send needs a new epoch.
        """
        group = self._group
        if group is None:
            raise WeightsError(f"version {manifest.version}: no group stands; join an epoch first")
        try:
            self._send(group, buffers.buckets, manifest, Deadline(deadline_s))
        except WeightsError as error:
            self._group = None
            raise _give_up(group, error) from error
        group.transfers += 1
        group.forget_transfer(group.transfers - TRANSFERS_KEPT)

    def _send(self, group: Group, buckets: list[torch.Tensor], manifest: Manifest, deadline: Deadline) -> None:
        if group.size == 1:
            return
        staged = (bucket.to(self.device) for bucket in buckets)
        for _ in group.broadcast(staged, deadline, _namer("sending", group, manifest, len(buckets))):
            pass
        waiting = list(range(1, group.size))
        while waiting := [rank for rank in waiting if not group.has(group.key("done", rank))]:
            where = f"epoch {group.epoch}: waiting for {_ranks(waiting)} to have version {manifest.version}"
            if deadline.passed():
                raise WeightsError(f"{where}: not within {deadline.seconds:g} s")
            group.raise_news(where)
            time.sleep(POLL_S)

    def _why_abandoned(self, epoch: int) -> str | None:
        abandoned = self._abandoned
        return abandoned[1] if abandoned is not None and abandoned[0] == epoch else None

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
    """One rank that receives.

    Blocking: meant for a background thread; the interpreter lock is free while it waits.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._store: TCPStore | None = None
        self._address: tuple[str, int] | None = None
        self._group: Group | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._spare: list[torch.Tensor] = []

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
        check_backend(info.backend, self.device)
        deadline, rank = Deadline(info.deadline_s), info.rank + rank_offset
        where = f"epoch {info.epoch}: rank {rank} waiting for {info.size} ranks"
        if not 0 < rank < info.size:
            raise WeightsError(f"{where}: a receiver's rank is 1..{info.size - 1}")
        group = Group(self._connect(info, deadline, where), info.backend, self.device, info.epoch, rank, info.size)
        group.write(f"here/{rank}")
        while not group.has(GO):
            group.raise_news(where)
            if deadline.passed():
                raise WeightsError(f"{where}: not together within {info.deadline_s:g} s")
            time.sleep(GATHER_POLL_S)
        try:
            group.connect(deadline)
        except WeightsError as error:
            _report_trouble(group, error)
            raise
        self._group = group

    def receive(self, manifest: Manifest, deadline_s: float) -> ReceivedWeights:
        """Receive one publication into memory of its own and verify its checksum.

        Raises WeightsError; the sender is told why, and the group is left.
        """
        group = self._group
        if group is None:
            raise WeightsError(f"version {manifest.version}: this receiver stands in no group; join an epoch first")
        try:
            received = self._receive(group, manifest, Deadline(deadline_s))
            group.write(group.key("done", group.rank))
        except WeightsError as error:
            self._group = None
            _report_trouble(group, error)
            raise
        group.transfers += 1
        return received

    def _receive(self, group: Group, manifest: Manifest, deadline: Deadline) -> ReceivedWeights:
        check_manifest(manifest, self._shapes)
        layout = BucketLayout.of(manifest.tensors, manifest.bucket_bytes)
        received = ReceivedWeights(manifest, self._take_buckets(layout), manifest.checksum)
        tensors_in = Counter(bucket for bucket, _ in layout.places)
        views, checksum = received.tensors(), Checksum()
        where = _namer("receiving", group, manifest, len(layout.sizes))
        for index, _ in enumerate(group.broadcast(received.buckets, deadline, where)):
            for _ in range(tensors_in[index]):
                checksum.update(next(views)[1])
        if checksum.hexdigest() != manifest.checksum:
            raise WeightsError(
                f"epoch {group.epoch}: rank {group.rank} received other bytes than were announced for version "
                f"{manifest.version}: checksum {checksum.hexdigest()}, announced {manifest.checksum}"
            )
        return received

    def recycle(self, weights: ReceivedWeights) -> None:
        """Let the next `receive` fill the memory of weights that nobody reads any more.

        Memory that was in use is filled at the speed of the wire; the first touch of fresh memory can take longer
        than the broadcast.
        """
        self._spare = weights.buckets

    def _take_buckets(self, layout: BucketLayout) -> list[torch.Tensor]:
        """Recycled buckets if they fit, else fresh ones; not offered twice, as a broken transfer may write late."""
        spare, self._spare = self._spare, []
        fits = [(bucket.numel(), bucket.device) for bucket in spare] == [(size, self.device) for size in layout.sizes]
        return spare if fits else layout.allocate(self.device)

    def _connect(self, info: EpochInfo, deadline: Deadline, where: str) -> TCPStore:
        """The learner's store; the connection is kept as long as its address stays and it answers."""
        address = (info.host, info.port)
        if self._store is None or self._address != address or not _answers(self._store):
            self._store, self._address = connect_store(*address, deadline, where), address
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
        self._spare = []


def _give_up(group: Group, error: WeightsError) -> WeightsError:
    """Tell the receivers, leave, and find out who is silent; return the error with their ranks."""
    group.write(GAVE_UP, str(error))
    group.leave()
    silent, settle = list(range(1, group.size)), Deadline(SETTLE_S)
    while silent and not settle.passed():
        silent = [r for r in silent if not (group.has(group.key("done", r)) or group.has(group.key("trouble", r)))]
        time.sleep(GATHER_POLL_S)
    suffix = f"; {_ranks(silent)} of {group.size} did not answer" if silent else ""
    return WeightsError(f"{error}{suffix}", silent)


def _report_trouble(group: Group, error: WeightsError) -> None:
    """Tell the sender, if it can still be told, and leave."""
    try:
        if not group.has(GAVE_UP):
            group.write(TROUBLE, f"rank {group.rank} reports: {error}")
        group.write(group.key("trouble", group.rank))
    except WeightsError:
        pass  # The store is gone too; the caller raises what happened first.
    group.leave()


def _answers(store: TCPStore) -> bool:
    """Whether a kept connection is still alive."""
    try:
        store.check(["alive"])
        return True
    except RuntimeError:
        return False


def _namer(verb: str, group: Group, manifest: Manifest, buckets: int) -> Callable[[int], str]:
    """What an error calls the wait for a bucket."""
    prefix = f"epoch {group.epoch}: rank {group.rank} {verb} version {manifest.version}"
    return lambda index: f"{prefix}, bucket {index + 1} of {buckets}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
