"""What the learner's side does when a generator hangs, work is large, or the coordinator has ended."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from async_rl.buffer.leases import Holder
from async_rl.engines.base import EngineError, Sample, SampleRequest
from async_rl.protocol import VersionSpan
from async_rl.publication import PublicationSettings
from tests.loop.rig import Learner, fleet, make_config, manifest, problem
from tests.loop.test_fleet import check_account


async def test_a_generator_that_never_loads_is_evicted_before_the_learner_gives_up(tmp_path: Path) -> None:
    """It is alive and sends heartbeats; the learner's own wait must be longer than the round that evicts it."""
    learner = Learner(make_config(tmp_path, weights={"deadline_s": 1.0}, run={"steps": 4}))
    learner.coordinator.publications._settings = PublicationSettings(deadline_s=1.0, grace_s=1.0)
    async with fleet(learner.config, learner.start(), "good", "hung") as (_, hung):
        await learner.until(1)

        async def never(version: int) -> None:
            await asyncio.Event().wait()

        hung.engine.relabel = never  # type: ignore[method-assign]
        await learner.done()
    assert len(learner.batches) == 4
    assert any("hung left: evicted: did not load version" in note for note in learner.notes), learner.notes
    check_account(learner)


async def test_a_generator_killed_in_a_publication_is_out_before_any_deadline(tmp_path: Path) -> None:
    """Nothing but its connection says so: heartbeats and the publication may take ten minutes."""
    learner = Learner(
        make_config(
            tmp_path,
            weights={"deadline_s": 600.0},
            transport={"heartbeat_timeout_s": 600.0},
            run={"steps": 1_000_000, "stall_timeout_s": 600.0},
        )
    )
    async with fleet(learner.config, learner.start(), "good", "killed") as (_, killed):
        await learner.until(1)
        killed.engine.relabel = never  # type: ignore[method-assign]
        async with asyncio.timeout(120):
            while "loading: killed" not in learner.coordinator.status()["wait"]:
                await asyncio.sleep(0.01)
        await killed.kill()
        at = len(learner.batches)
        async with asyncio.timeout(120):
            while len(learner.batches) < at + 8:
                await asyncio.sleep(0.01)
    learner.coordinator.stop("test")
    assert any("killed left: its connection is gone" in note for note in learner.notes), learner.notes
    check_account(learner)


async def never(*_: object) -> None:
    """What a hung engine does."""
    await asyncio.Event().wait()


async def test_a_hung_engine_loses_its_leases_then_its_place_then_its_life(tmp_path: Path) -> None:
    """It heartbeats and loads weights, and no sample of it ever ends."""
    config = make_config(tmp_path, run={"steps": 1_000_000}, generator={"slots": 4, "lease_timeout_s": 1.0})
    learner = Learner(config)
    async with fleet(config, learner.start(), "good", "hung") as (_, hung):
        hung.engine.sample = never  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"evicted: no result for 1 s.*3 times in a row.*new process"):
            async with asyncio.timeout(150):
                await hung.task
        at = len(learner.batches)
        await learner.until(at + 3)
        status = learner.coordinator.status()
    learner.coordinator.stop("test")
    assert status["events"]["expired_leases"] >= 3
    assert [member["name"] for member in status["generators"]] == ["good"]
    assert any("leases without a result for 1 s" in note for note in learner.notes)
    assert sum("hung left: evicted" in note for note in learner.notes) == 3
    check_account(learner)


async def test_one_lost_request_is_sampled_by_another_generator(tmp_path: Path) -> None:
    """The engine is well but for one request; the window would keep the learner waiting for it."""
    config = make_config(
        tmp_path, run={"steps": 8}, generator={"lease_timeout_s": 3600.0}, staleness={"reorder_window": 4}
    )
    learner = Learner(config)
    async with fleet(config, learner.start(), "g0", "g1") as workers:
        for worker in workers:
            sample = worker.engine.sample

            async def lossy(request: SampleRequest, sample=sample) -> Sample:  # type: ignore[no-untyped-def]
                return await (never() if request.request_id.startswith("train-5-0-1-") else sample(request))

            worker.engine.sample = lossy  # type: ignore[method-assign]
        async with asyncio.timeout(150):
            while not (holders := lost_holders(learner)):
                await asyncio.sleep(0.01)
        holders[0].since -= 3600.0  # Its deadline passes, and no other lease's, however slow the machine is.
        await learner.done()
        async with asyncio.timeout(150):
            while any(worker.generator.work for worker in workers):
                await asyncio.sleep(0.01)
    assert len(learner.batches) == 8
    assert learner.ledger.events["expired_leases"] == 1
    assert learner.coordinator.members.num_evicted == 0
    check_account(learner)


def lost_holders(learner: Learner) -> list[Holder]:
    """Who has the member that nobody ever finishes."""
    member = learner.ledger._leases.get((5, 0))
    return [] if member is None else list(member.live.values())


@pytest.mark.slow
async def test_an_engine_that_hangs_in_every_load_ends_its_process(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"steps": 1_000_000}, weights={"deadline_s": 1.0})
    learner = Learner(config)
    learner.coordinator.publications._settings = PublicationSettings(deadline_s=1.0, grace_s=0.5)
    async with fleet(config, learner.start(), "good") as _:
        await learner.until(2)
        async with fleet(config, learner.coordinator.addresses["learner"], "hung") as (hung,):
            hung.engine.relabel = never  # type: ignore[method-assign]
            with pytest.raises(EngineError, match=r"evicted: did not load the snapshot.*3 times in a row"):
                async with asyncio.timeout(150):
                    await hung.task
        at = len(learner.batches)
        await learner.until(at + 3)
    learner.coordinator.stop("test")
    assert sum("hung left: evicted" in note for note in learner.notes) == 3
    check_account(learner)


async def test_a_stale_engine_is_an_alarm_and_is_put_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its label says a newer version than it samples with: no such token is trained, and the run goes on without it."""
    learner = Learner(make_config(tmp_path, run={"steps": 1_000_000}))
    async with fleet(learner.config, learner.start(), "good", "stale") as (_, stale):
        await learner.until(2)
        sample = stale.engine.sample

        async def old(request: SampleRequest) -> Sample:
            result = await sample(request)
            return replace(result, versions=(VersionSpan(0, 0, len(result.completion_ids)),))

        stale.engine.sample = old  # type: ignore[method-assign]
        with pytest.raises(
            EngineError, match=r"evicted: generator 'stale' returned ticket .* with tokens of version 0"
        ):
            async with asyncio.timeout(150):
                await stale.task
        at = len(learner.batches)
        await learner.until(at + 3)
    learner.coordinator.stop("test")
    refused = learner.coordinator.server.refused["impossible_versions"]
    used_up = [book.events["failed_attempts"] for book in (learner.ledger, learner.coordinator.evaluations)]
    assert 3 <= refused == sum(used_up), used_up
    assert caplog.text.count("ALARM: generator stale has wrong weights") == 3
    assert min(min(v.version for v in m.versions) for b in learner.batches[6:] for g in b for m in g.members) > 0
    check_account(learner)


async def test_leases_of_many_slots_with_long_rows_travel_in_several_messages(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        run={"steps": 2},
        sampling={"group_size": 2},
        learner={"batch_groups": 100},
        generator={"slots": 200},
        transport={"max_message_bytes": 1 << 20},
    )
    numbers = iter(range(1000))
    learner = Learner(config, lambda: msgspec.structs.replace(problem(next(numbers)), metadata={"text": "x" * 10_000}))
    async with fleet(config, learner.start(), "g0"):
        await learner.done()
    assert len(learner.batches) == 2
    check_account(learner)


async def test_leases_of_rows_of_which_a_message_holds_three_travel_all_the_same(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        run={"steps": 3},
        sampling={"group_size": 2},
        generator={"slots": 32},
        transport={"max_message_bytes": 1 << 20},
    )
    numbers = iter(range(1000))
    long = {"tests": "x" * 300_000}
    learner = Learner(config, lambda: msgspec.structs.replace(problem(next(numbers)), metadata=long))
    async with fleet(config, learner.start(), "g0"):
        await learner.done()
    assert len(learner.batches) == 3
    check_account(learner)


async def test_after_its_end_calls_say_so_and_late_jobs_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher's thread and HTTP requests may still report when the coordinator has ended."""
    learner = Learner(make_config(tmp_path))
    coordinator = learner.coordinator
    coordinator.start()
    jobs: list[Future[float]] = [Future(), Future()]
    for job in jobs:
        coordinator.publishing.when_done(job, lambda error: [])
    coordinator.publish(manifest("run-1", 0), evaluate=False)
    await asyncio.to_thread(coordinator.stop, "test")
    with caplog.at_level(logging.ERROR):
        jobs[0].set_result(0.0)
        jobs[1].cancel()
    assert caplog.text == ""
    with pytest.raises(RuntimeError, match="the coordinator has stopped: test"):
        coordinator.status()
