"""Members that wait for a generator, oldest ticket first, among those that the generator's version may sample."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from async_rl.buffer.leases import Place


class WaitingMembers:
    """A queue of (ticket, member) for each required version; one operation costs O(log n + number of versions).

    The required versions of live tickets span at most a few batches, so their number is small. An entry is not
    removed when its member stops waiting: `is_waiting` tells, and it is skipped when it comes up.
    """

    def __init__(self, is_waiting: Callable[[Place], bool]) -> None:
        self._is_waiting = is_waiting
        self._queues: dict[int, list[Place]] = {}
        self._queued: set[Place] = set()

    def __len__(self) -> int:
        """Entries held, those to be skipped included."""
        return len(self._queued)

    def __contains__(self, place: Place) -> bool:
        return place in self._queued

    def add(self, place: Place, required: int) -> None:
        """A member waits for a generator with at least version `required`; adding it twice does nothing."""
        if place not in self._queued:
            self._queued.add(place)
            heapq.heappush(self._queues.setdefault(required, []), place)

    def pop(self, version: int) -> Place | None:
        """The first waiting member that a generator with `version` may sample; None: there is none."""
        first = self._first(version)
        return None if first is None else self._pop(first)

    def has(self, version: int) -> bool:
        """Whether `pop` would give a member."""
        return self._first(version) is not None

    def _first(self, version: int) -> int | None:
        """The queue with the oldest of these members."""
        first, source = None, None
        for required in tuple(self._queues):
            if required <= version and self._trim(required):
                head = self._head(required)
                if first is None or head < first:
                    first, source = head, required
        return source

    def _head(self, required: int) -> Place:
        return self._queues[required][0]

    def _pop(self, required: int) -> Place:
        place = heapq.heappop(self._queues[required])
        self._queued.remove(place)
        if not self._queues[required]:
            del self._queues[required]
        return place

    def _trim(self, required: int) -> bool:
        """Skip entries that no longer wait; whether any is left."""
        while required in self._queues and not self._is_waiting(self._head(required)):
            self._pop(required)
        return required in self._queues
