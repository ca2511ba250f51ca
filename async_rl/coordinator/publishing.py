"""Does what the publication's state machine decides: messages to members, and blocking work for the learner.

All methods run on the coordinator's thread. The learner's half (`Transfer`) is done elsewhere; its futures come back as
calls into this thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as TypingProtocol

from async_rl import protocol as p
from async_rl import publication as pub
from async_rl.membership import Member
from async_rl.metrics import Metrics

log = logging.getLogger(__name__)


class Transfer(TypingProtocol):
    """The blocking half of publication, done elsewhere; futures raise WeightsError."""

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the rendezvous store."""
        ...

    @property
    def backend(self) -> Any:
        """gloo or nccl."""
        ...

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        """Build the group of an epoch; gives seconds."""
        ...

    def send(self, manifest: p.Manifest, deadline_s: float) -> Future[float]:
        """Broadcast in the group that stands; gives seconds."""
        ...

    def abandon(self, epoch: int, reason: str) -> None:
        """Have the work for an epoch fail soon, whatever it waits for."""
        ...

    def snapshot(self, manifest: p.Manifest) -> Future[Path]:
        """Write a file of the version; gives its path."""
        ...


@dataclass(frozen=True)
class Surroundings:
    """What publishing needs of its coordinator."""

    send_to: Callable[[str, p.Message], bool]
    """Send to a member by name; False if it is gone."""
    lose: Callable[[Iterable[str]], None]
    """These members cannot be reached: they are out."""
    call: Callable[[Callable[[], None]], None]
    """Have something run by the coordinator's thread; safe from every thread."""
    evict: Callable[[pub.Evict], None]
    published: Callable[[int], None]
    """A version is with everyone."""
    snapshot_url: Callable[[int], str]
    clock: Callable[[], float]


class Publishing:
    """One publication at a time, and snapshots of the last one for those who join."""

    def __init__(self, publications: pub.Publications, transfer: Transfer, around: Surroundings) -> None:
        self.publications = publications
        self.transfer = transfer
        self._snapshot: tuple[p.Manifest, Path] | None = None
        """The file written last, and what is in it."""
        self._around = around
        self._manifest: p.Manifest | None = None
        self._snapshot_jobs = 0
        self._metrics = Metrics()
        self._loads: list[p.Loaded] = []

    @property
    def idle(self) -> bool:
        """Whether nothing needs the send buffers."""
        return self.publications.round is None and self._snapshot_jobs == 0

    def take_metrics(self) -> Metrics:
        """What publications cost since the last call."""
        taken, self._metrics = self._metrics, Metrics()
        return taken

    def snapshot(self, version: int) -> Path | None:
        """The file of a version, if there is one; safe from every thread."""
        written = self._snapshot
        return written[1] if written is not None and written[0].version == version else None

    def describe(self, now: float) -> str:
        """One sentence: what is waited for, also of the learner."""
        text = self.publications.describe(now)
        return f"{text}; the learner still writes {self._snapshot_jobs} snapshots" if self._snapshot_jobs else text

    def start(self, manifest: p.Manifest, members: Sequence[Member]) -> None:
        """Publish what is in the send buffers to the active members."""
        self._manifest = manifest
        self._loads = []
        self.act(self.publications.start(manifest.version, manifest.checksum, members, self._around.clock()))

    def loaded(self, name: str, message: p.Loaded, now: float) -> None:
        """A member has loaded a version, or could not."""
        if message.error is None:
            self._loads.append(message)
        self.act(self.publications.loaded(name, message.version, message.checksum, message.error, now))

    def act(self, actions: Sequence[pub.Action]) -> None:
        """Do what the state machine wants done."""
        for action in actions:
            match action:
                case pub.JoinGroup():
                    self._join_group(action)
                case pub.SendWeights():
                    self._send_weights(action)
                case pub.SendRelabel():
                    relabel = p.RelabelVersion(version=action.version)
                    self._around.lose([name for name in action.names if not self._around.send_to(name, relabel)])
                case pub.WriteSnapshot():
                    self._write_snapshot(action)
                case pub.SendSnapshot():
                    self._send_snapshot(action)
                case pub.Abandon():
                    self.transfer.abandon(action.epoch, action.reason)
                case pub.Evict():
                    self._around.evict(action)
                case pub.Done():
                    self._done(action.report)

    def _join_group(self, action: pub.JoinGroup) -> None:
        host, port = self.transfer.store
        plan, lost = action.plan, []
        for name, rank in plan.ranks.items():
            info = p.EpochInfo(
                epoch=plan.epoch,
                backend=self.transfer.backend,
                host=host,
                port=port,
                rank=rank,
                size=plan.size,
                deadline_s=action.deadline_s,
            )
            if not self._around.send_to(name, p.JoinEpoch(info=info)):
                lost.append(name)
        job = self.transfer.join(plan.epoch, plan.size, action.deadline_s)
        self.when_done(job, lambda error: self.publications.sender_joined(plan.epoch, error, self._around.clock()))
        self._around.lose(lost)

    def _send_weights(self, action: pub.SendWeights) -> None:
        manifest = self._manifest
        assert manifest is not None and manifest.version == action.version, "the buffers hold what is published"
        publish = p.Publish(epoch=action.epoch, manifest=manifest, deadline_s=action.deadline_s)
        lost = [name for name in action.names if not self._around.send_to(name, publish)]
        job = self.transfer.send(manifest, action.deadline_s)
        self.when_done(job, lambda error: self.publications.sender_sent(action.epoch, error, self._around.clock()))
        self._around.lose(lost)

    def when_done(self, job: Future[float], event: Callable[[str | None], Sequence[pub.Action]]) -> None:
        """Feed the outcome of a blocking job into the publication, on this thread."""

        def done(future: Future[float]) -> None:
            if future.cancelled():
                return  # The publisher is closed, and with it the run.
            error = future.exception()
            self._around.call(lambda: self.act(event(None if error is None else str(error))))

        job.add_done_callback(done)

    def _write_snapshot(self, action: pub.WriteSnapshot) -> None:
        manifest = self._manifest
        assert manifest is not None and manifest.version == action.version, "snapshots are of the last publication"
        self._snapshot_jobs += 1

        def written(future: Future[Path]) -> None:
            if future.cancelled():
                return
            self._around.call(lambda: self._snapshot_written(action.name, manifest, future))

        self.transfer.snapshot(manifest).add_done_callback(written)

    def _snapshot_written(self, name: str, manifest: p.Manifest, future: Future[Path]) -> None:
        self._snapshot_jobs -= 1
        error = future.exception()
        if error is None:
            self._snapshot = manifest, future.result()
        else:
            log.error("the snapshot of version %d could not be written: %s", manifest.version, error)
        text, now = None if error is None else str(error), self._around.clock()
        self.act(self.publications.snapshot_written(name, manifest.version, text, now))

    def _send_snapshot(self, action: pub.SendSnapshot) -> None:
        assert self._snapshot is not None, "a file is written before it is loaded"
        manifest, path = self._snapshot
        assert manifest.version == action.version, "the file written last is the one that is told"
        url = self._around.snapshot_url(manifest.version)
        load = p.LoadSnapshot(manifest=manifest, path=str(path.resolve()), url=url, deadline_s=action.deadline_s)
        if not self._around.send_to(action.name, load):
            self._around.lose([action.name])

    def _done(self, report: pub.Report) -> None:
        metrics = self._metrics
        metrics.last("time/publication_s", report.total_s)
        if report.tries:
            metrics.last("time/wire_s", report.transfer_s)
        for loaded in self._loads:
            if loaded.version == report.version and loaded.source == "broadcast":
                metrics.max("time/load_s", loaded.load_s)
                metrics.max("time/pause_s", loaded.paused_s)
        self._around.published(report.version)
