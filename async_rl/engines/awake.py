"""A deadline in time that this process was running: one that was stopped has missed nothing while it stood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

SLICE_S = 0.5
"""Longest wait that a stop (SIGSTOP, a frozen container) can use up."""


async def within(call: Awaitable[Any], timeout_s: float) -> Any:
    """The result of `call`; TimeoutError when it has not come after `timeout_s` of running.

    The answer to a call may lie in the socket when a stopped process goes on, and its peers may have been stopped with
    it. The wait is made of slices that count as what they were meant to last, so a stop costs at most one of them.
    """
    task = asyncio.ensure_future(call)
    left = timeout_s
    try:
        while left > 0:
            slice_s = min(left, SLICE_S)
            done, _ = await asyncio.wait((task,), timeout=slice_s)
            if done:
                return task.result()
            left -= slice_s
        raise TimeoutError
    finally:
        task.cancel()
