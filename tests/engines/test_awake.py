"""A deadline that counts only time for which its process was running."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.engines.awake import SLICE_S, within


def stand_still(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The running loop's clock jumps: what a process sees that was stopped."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


async def answered_after(turns: int) -> str:
    """An answer that the loop reads some turns after it goes on."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return "answer"


async def test_an_answer_that_came_during_a_stop_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped() -> str:
        stand_still(monkeypatch, 3600.0)
        return await answered_after(turns=10)

    assert await within(stopped(), 60.0) == "answer"


async def test_no_answer_is_an_error_and_the_call_is_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.get_running_loop().create_future())
    with pytest.raises(TimeoutError):
        await within(task, 2.5 * SLICE_S)
    await asyncio.wait((task,), timeout=60.0)
    assert task.cancelled()


async def test_errors_and_cancellation_pass_through() -> None:
    async def failing() -> None:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        await within(failing(), 60.0)
    never = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(never, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert never.cancelled()
