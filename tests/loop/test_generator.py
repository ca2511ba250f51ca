"""What a generator does when a message, a request or a learner goes wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from async_rl import protocol as p
from async_rl.config import ConfigError
from async_rl.engines.base import EngineError, LoadReport, Sample, SampleRequest
from async_rl.errors import InputError
from async_rl.generator import run_generator
from async_rl.transport import Client
from tests.loop.rig import Learner, Worker, fleet, make_config, manifest
from tests.loop.test_fleet import check_account


async def test_results_lost_on_the_way_are_sent_again(tmp_path: Path) -> None:
    """The connection breaks and is mended below us: some results are gone, and nobody noticed a silence."""
    learner = Learner(make_config(tmp_path, run={"steps": 8}, transport={"heartbeat_timeout_s": 1.0}))
    async with fleet(learner.config, learner.start(), "g0", "g1") as (worker, _):
        lost = lose_finished(worker.client, number=3)
        await learner.done()
    assert len(lost) >= 3
    check_account(learner)
    assert len(learner.batches) == 8


def lose_finished(client: Client, number: int) -> list[p.LeaseKey]:
    """Drop the first `number` results on their way; their keys."""
    lost: list[p.LeaseKey] = []
    send = client.send

    async def lossy(message: p.Message, timeout_s: float = 30.0) -> None:
        if isinstance(message, p.Finished) and len(lost) < number and not set(message.keys) & set(lost):
            lost.extend(message.keys)
            return
        await send(message, timeout_s)

    client.send = lossy  # type: ignore[method-assign]
    return lost


async def test_a_request_that_the_engine_refuses_fails_alone(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path))
    async with fleet(learner.config, learner.start(), "g0") as (worker,):
        sample = worker.engine.sample

        async def picky(request: SampleRequest) -> Sample:
            if "-5-" in request.request_id and request.request_id.startswith("train"):
                raise ValueError(f"request {request.request_id!r} is too long")
            return await sample(request)

        worker.engine.sample = picky  # type: ignore[method-assign]
        await learner.done()
        assert worker.generator.counts["failed"] > 0
    check_account(learner)
    assert learner.ledger.counts().dropped == {"failed_members": 1}
    assert "p5" not in learner.trained_problems()
    assert any("is too long" in note for note in learner.notes), learner.notes


def finished(number: int) -> dict[p.LeaseKey, p.Trajectory]:
    """A failed member, which needs no tokens."""
    empty = p.Trajectory(
        status="failed",
        completion_ids=np.zeros(0, np.int32),
        completion_mask=np.zeros(0, np.uint8),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=(),
        reward=None,
        error="none",
    )
    return {p.LeaseKey("train", number, 0, 1): empty}


def welcome(run_id: str, version: int) -> p.Welcome:
    return p.Welcome(
        run_id=run_id, policy_version=version, heartbeat_s=0.1, heartbeat_timeout_s=1.0, max_message_bytes=1 << 20
    )


class Wire:
    """Stands in for the client: keeps what was sent, and lets others run while it sends."""

    address = "here:1"

    def __init__(self) -> None:
        self.sent: list[p.Message] = []

    async def send(self, message: p.Message, timeout_s: float = 30.0) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)


def quiet_worker(tmp_path: Path) -> tuple[Worker, Wire]:
    """A generator whose `run` is never awaited, on a wire that leads nowhere."""
    config = make_config(tmp_path)
    worker = Worker(config, "127.0.0.1:9", "g0")
    worker.task.cancel()
    wire = Wire()
    worker.generator.client = wire  # type: ignore[assignment]
    return worker, wire


async def test_a_member_that_ends_while_others_are_sent_again_is_not_in_the_way(tmp_path: Path) -> None:
    worker, wire = quiet_worker(tmp_path)
    generator = worker.generator
    generator.run_id = "run-1"
    for number in range(3):
        generator.unacknowledged |= finished(number)

    async def one_more() -> None:
        generator.unacknowledged |= finished(9)

    task = asyncio.create_task(one_more())
    await generator._handle(welcome("run-1", 0))
    await task
    assert {key.ticket for m in wire.sent if isinstance(m, p.Finished) for key in m.keys} >= {0, 1, 2}
    await worker.close()


async def test_weights_of_a_learner_that_is_gone_are_not_reported_to_the_next(tmp_path: Path) -> None:
    """Loading takes long, the learner is restarted meanwhile: the new run must not believe that it is at version 7."""
    worker, wire = quiet_worker(tmp_path)
    generator = worker.generator
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow(version: int) -> None:
        began.set()
        await go_on.wait()

    worker.engine.relabel = slow  # type: ignore[method-assign]
    task = asyncio.create_task(generator._take_weights())
    await generator._handle(welcome("run-1", 6))
    await generator._handle(p.RelabelVersion(version=7))
    await began.wait()
    await generator._handle(p.RelabelVersion(version=8))
    await generator._handle(welcome("run-2", 0))
    await generator._handle(p.RelabelVersion(version=0))
    go_on.set()
    async with asyncio.timeout(150):
        while not any(isinstance(m, p.Loaded) and m.version == 0 for m in wire.sent):
            await asyncio.sleep(0.01)
    assert [m.version for m in wire.sent if isinstance(m, p.Loaded)] == [0]
    task.cancel()
    await worker.close()


async def test_a_downloaded_snapshot_is_removed_once_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, wire = quiet_worker(tmp_path)
    loaded: list[Path] = []

    def download(path: Path, url: str, manifest: p.Manifest, deadline_s: float, into: Path) -> Path:
        into.mkdir(parents=True)
        (into / "file").write_bytes(b"weights")
        return into / "file"

    async def load(path: Path, manifest: p.Manifest) -> LoadReport:
        assert path.read_bytes() == b"weights"
        loaded.append(path)
        return LoadReport(checksum="c", load_s=0.0, paused_s=0.0)

    monkeypatch.setattr("async_rl.weights.snapshot.fetch_snapshot", download)
    worker.engine.load_snapshot = load  # type: ignore[method-assign]
    await worker.generator._snapshot(
        p.LoadSnapshot(manifest=manifest("run-1", 3), path="/elsewhere/file", url="http://here", deadline_s=1.0)
    )
    assert [(m.version, m.source, m.error) for m in wire.sent if isinstance(m, p.Loaded)] == [(3, "snapshot", None)]
    assert loaded and not loaded[0].exists()
    await worker.close()


async def test_a_generator_leaves_although_the_learner_reads_nothing(tmp_path: Path) -> None:
    worker, wire = quiet_worker(tmp_path)
    generator = worker.generator
    generator._over = asyncio.get_running_loop().create_future()
    await generator._handle(welcome("run-1", 0))

    async def full(message: p.Message, timeout_s: float = 30.0) -> None:
        raise TimeoutError("the learner reads nothing")

    wire.send = full  # type: ignore[method-assign]
    async with asyncio.timeout(150):
        await generator.leave("asked to")
        assert await generator._over == "asked to"
    await worker.close()


async def test_a_refusal_says_whether_the_process_or_the_settings_are_at_fault(tmp_path: Path) -> None:
    """A supervisor starts a process again that ended with an engine's error, and not one whose settings are wrong."""
    worker, _ = quiet_worker(tmp_path)
    with pytest.raises(EngineError, match="refused this generator: evicted for good"):
        worker.generator._refused(p.Refused(reason="evicted for good", retry=False, restart=True))
    with pytest.raises(ConfigError, match="refused this generator: other protocol"):
        worker.generator._refused(p.Refused(reason="other protocol", retry=False))
    worker.generator.welcomed = True
    worker.generator._refused(p.Refused(reason="evicted", retry=True))
    assert not worker.generator.welcomed
    await worker.close()


async def test_while_nobody_answers_a_generator_tries_less_and_less_often(tmp_path: Path) -> None:
    """But often enough that the learner that comes does not take it for dead."""
    worker, _ = quiet_worker(tmp_path)
    generator = worker.generator
    generator.heartbeat_s, generator.heartbeat_timeout_s = 1.0, 15.0
    assert generator._pause_s(0) == 1.0
    pauses = [[generator._pause_s(tries) for _ in range(50)] for tries in (1, 2, 10, 10_000)]
    for at_once, longest in zip(pauses, (2.0, 4.0, 5.0, 5.0), strict=True):
        assert longest / 2 <= min(at_once) < max(at_once) <= longest
        assert len(set(at_once)) > 40, "a fleet does not come back all at once"
    await worker.close()


def test_a_malformed_address_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nohost' is not HOST:PORT"):
        run_generator(make_config(tmp_path, model={"path": "there is no model"}), "nohost", None)
