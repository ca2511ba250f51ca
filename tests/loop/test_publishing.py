"""What is sent, and when, for what the publication wants done: with a transfer whose jobs the test ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from async_rl import protocol as p
from async_rl import publication as pub
from async_rl.coordinator.publishing import Publishing, Surroundings
from async_rl.membership import Epochs
from async_rl.protocol import Manifest
from async_rl.weights.errors import WeightsError
from tests.loop.rig import NoTransfer, manifest


class SlowDisk(NoTransfer):
    """Files are written when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Future[Path]] = []

    def snapshot(self, manifest: Manifest) -> Future[Path]:
        self.jobs.append(Future())
        return self.jobs[-1]


class World:
    """Publishing with nothing around it; version 0 is published, to nobody."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[tuple[str, p.Message]] = []
        self.evicted: list[pub.Evict] = []
        self.disk = SlowDisk()
        settings = pub.PublicationSettings(deadline_s=10.0, grace_s=1.0)
        self.publishing = Publishing(
            pub.Publications(settings, Epochs()),
            self.disk,
            Surroundings(
                send_to=lambda name, message: self.sent.append((name, message)) is None,
                lose=lambda names: None,
                call=self.call,
                evict=self.evicted.append,
                published=lambda version: None,
                snapshot_url=lambda version: f"http://here/{version}",
                clock=lambda: self.now,
            ),
        )
        self.publishing.start(manifest("run-1", 0), [])

    def call(self, action: Callable[[], None]) -> None:
        action()

    def join(self, name: str) -> None:
        self.publishing.act(self.publishing.publications.joiner(name, 1, self.now))

    def tick(self, now: float) -> None:
        self.now = now
        self.publishing.act(self.publishing.publications.tick(now))


def test_a_joiner_is_told_when_the_file_is_written_and_has_its_whole_deadline_from_then() -> None:
    world = World()
    world.join("g")
    world.tick(30.0)
    assert world.sent == [] and not world.publishing.idle
    assert world.publishing.describe(30.0).endswith("the learner still writes 1 snapshots")
    world.disk.jobs[0].set_result(Path("/file"))
    ((name, load),) = world.sent
    assert name == "g" and isinstance(load, p.LoadSnapshot)
    assert (load.manifest.version, load.path, load.url, load.deadline_s) == (0, "/file", "http://here/0", 10.0)
    assert world.publishing.idle and world.publishing.snapshot(0) == Path("/file")
    assert world.publishing.snapshot(1) is None
    world.tick(40.9)
    assert world.evicted == []
    world.tick(41.0)
    assert [action.reason for action in world.evicted] == ["did not load the snapshot of version 0 within 11 s"]


def test_a_file_that_is_written_during_the_next_round_is_told_as_what_it_is() -> None:
    world = World()
    world.join("g")
    world.publishing.start(manifest("run-1", 1), [])
    world.disk.jobs[0].set_result(Path("/file"))
    ((_, load),) = world.sent
    assert isinstance(load, p.LoadSnapshot) and load.manifest.version == 0


def test_who_was_put_out_before_the_file_was_written_is_told_nothing() -> None:
    world = World()
    world.join("g")
    world.tick(41.0)
    assert "the learner did not write the snapshot" in world.evicted[0].reason
    world.disk.jobs[0].set_result(Path("/file"))
    assert world.sent == [] and world.publishing.idle


def test_a_file_that_cannot_be_written_is_asked_for_again() -> None:
    world = World()
    world.join("g")
    world.disk.jobs[0].set_exception(WeightsError("disk full"))
    world.disk.jobs[1].set_result(Path("/file"))
    assert [name for name, _ in world.sent] == ["g"] and world.evicted == []
