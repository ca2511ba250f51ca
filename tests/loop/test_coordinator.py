"""What the learner's side does when a generator hangs, work is large, or the coordinator has ended."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from async_rl.publication import PublicationSettings
from tests.loop.rig import Learner, fleet, make_config, manifest, problem
from tests.loop.test_fleet import check_account


async def test_a_generator_that_never_loads_is_evicted_before_the_learner_gives_up(tmp_path: Path) -> None:
    """It is alive and sends heartbeats; the learner's own wait must be longer than the round that evicts it."""
    learner = Learner(make_config(tmp_path, weights={"deadline_s": 0.2}, run={"steps": 4}))
    learner.coordinator.publications._settings = PublicationSettings(deadline_s=0.2, grace_s=0.4)
    async with fleet(learner.config, learner.start(), "good", "hung") as (_, hung):
        await learner.until(1)

        async def never(version: int) -> None:
            await asyncio.Event().wait()

        hung.engine.relabel = never  # type: ignore[method-assign]
        await learner.done()
    assert len(learner.batches) == 4
    assert any("hung left: evicted: did not load version" in note for note in learner.notes), learner.notes
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


async def test_after_its_end_calls_say_so_and_late_jobs_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The publisher's thread and HTTP requests may still report when the coordinator has ended."""
    learner = Learner(make_config(tmp_path))
    coordinator = learner.coordinator
    coordinator.start()
    jobs: list[Future[float]] = [Future(), Future()]
    for job in jobs:
        coordinator._when_done(job, lambda error: [])
    coordinator.publish(manifest("run-1", 0), evaluate=False)
    await asyncio.to_thread(coordinator.stop, "test")
    with caplog.at_level(logging.ERROR):
        jobs[0].set_result(0.0)
        jobs[1].cancel()
    assert caplog.text == ""
    with pytest.raises(RuntimeError, match="the coordinator has stopped: test"):
        coordinator.status()
