"""Tasks end when they are told to, also those that miss it the first time."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from async_rl import tasks as module
from async_rl.tasks import end_tasks


async def started(work: asyncio.Task[None]) -> asyncio.Task[None]:
    await asyncio.sleep(0)
    return work


async def deaf(times: float) -> None:
    """Ignores its first cancellations, as `asyncio.wait_for` does with one that comes together with a result."""
    while times > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        times -= 1
    await asyncio.sleep(3600)


async def test_a_task_that_misses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    tasks = [await started(asyncio.create_task(deaf(times))) for times in (0, 1, 3)]
    await end_tasks(tasks, 60.0)
    assert all(task.cancelled() for task in tasks)


async def test_one_that_never_ends_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    task = await started(asyncio.create_task(deaf(5000), name="listens to nobody"))
    with caplog.at_level(logging.ERROR):
        await end_tasks([task], 0.05)
    assert not task.done() and "listens to nobody" in caplog.text
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_what_ended_before_is_not_asked_again() -> None:
    async def fails() -> None:
        raise RuntimeError("known already")

    task = await started(asyncio.create_task(fails()))
    await end_tasks([task], 1.0)
    assert isinstance(task.exception(), RuntimeError)
