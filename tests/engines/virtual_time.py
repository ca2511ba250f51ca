"""A clock whose sleepers wake in order without waiting."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class VirtualTime:
    """`now` and `sleep` for the engine, `run_until` for the test."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def run_until(self, end: float) -> None:
        """Wake everybody who is due by `end`, one after the other."""
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._now = end


async def _settle() -> None:
    """Let every task run until it sleeps."""
    for _ in range(20):
        await asyncio.sleep(0)
