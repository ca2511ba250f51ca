"""A virtual clock: events in the order of their time, those of one instant together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """What happens when; `now` moves from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Run `event` at `time`, or now if that has passed; events of one instant run in the order of these calls."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run `event` so many seconds from now."""
        self.at(self.now + seconds, event)

    def run_instant(self) -> bool:
        """Go to the next instant and run everything that happens at it; False when nothing will happen any more."""
        if not self._events:
            return False
        self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            heapq.heappop(self._events)[2]()
        return True
