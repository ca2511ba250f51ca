"""An engine under a virtual clock: requests share it evenly, wait for slots, stand still while weights load."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from async_rl.protocol import LeaseKey, VersionSpan

_EPSILON = 1e-6
"""Tokens; progress is a sum of floats, and a whole token may come out this much short."""


class Request:
    """One member under way; `start` is the engine's progress when it began."""

    __slots__ = ("cancelled", "key", "length", "start")

    def __init__(self, key: LeaseKey, length: int) -> None:
        self.key, self.length = key, length
        self.start = 0.0
        self.cancelled = False


class VirtualEngine:
    """All running requests get the same rate, so one number, `progress` in tokens, says where each of them is.

    A request that began at progress p ends at p + length, and a version that was loaded at progress x samples its
    tokens from x - p on: an event costs O(log slots), however often the rate changes.
    """

    def __init__(self, slots: int, rate: Callable[[int], float], version: int, now: float) -> None:
        self.slots, self._rates = slots, [0.0, *(rate(n) for n in range(1, slots + 1))]
        self.version = version
        self.generation = 0
        """Changes whenever the next end may: an event planned under another one is stale."""
        self.busy_slot_s = 0.0
        """Slot-seconds in which a request held a slot, pauses included."""
        self._progress, self._now = 0.0, now
        self._ends: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._requests: dict[LeaseKey, Request] = {}
        self._queue: deque[Request] = deque()
        self._running = 0
        self._open = True
        """Whether queued requests may begin."""
        self._moving = True
        self._loaded_at, self._versions = [0.0], [version]

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return self._running == 0

    def __len__(self) -> int:
        """Requests here, queued ones included."""
        return len(self._requests)

    def advance(self, now: float) -> None:
        """Let time pass up to `now`."""
        elapsed = now - self._now
        self.busy_slot_s += min(len(self._requests), self.slots) * elapsed
        if self._moving:
            self._progress += elapsed * self._rates[self._running]
        self._now = now

    def begin(self, key: LeaseKey, length: int) -> None:
        """Take a request; it runs as soon as a slot is free."""
        request = self._requests[key] = Request(key, length)
        self._queue.append(request)

    def cancel(self, key: LeaseKey) -> None:
        """Stop a request; one that is not here is ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        request.cancelled = True
        if request in self._queue:
            self._queue.remove(request)
        else:
            self._running -= 1

    def fill(self) -> None:
        """Start queued requests in free slots."""
        while self._open and self._queue and self._running < self.slots:
            request = self._queue.popleft()
            request.start = self._progress
            heapq.heappush(self._ends, (self._progress + request.length, next(self._order), request))
            self._running += 1

    def next_end(self) -> float | None:
        """When the next running request ends if nothing changes; None: none runs, or weights load."""
        self.generation += 1
        while self._ends and self._ends[0][2].cancelled:
            heapq.heappop(self._ends)
        if not self._ends or not self._moving:
            return None
        left = max(0.0, self._ends[0][0] - self._progress)
        return self._now + left / self._rates[self._running]

    def take_ended(self) -> list[Request]:
        """Requests whose last token exists now."""
        ended = []
        while self._ends and (self._ends[0][2].cancelled or self._ends[0][0] <= self._progress + _EPSILON):
            request = heapq.heappop(self._ends)[2]
            if not request.cancelled:
                del self._requests[request.key]
                self._running -= 1
                ended.append(request)
        return ended

    def spans(self, request: Request) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens of a request that has ended."""
        start, length = request.start, request.length
        last = len(self._versions) - 1
        index = max(0, bisect_right(self._loaded_at, start) - 1)
        spans, first = [], 0
        while first < length:
            end = length
            if index < last:
                end = min(length, max(first, math.floor(self._loaded_at[index + 1] - start + _EPSILON)))
            if end > first:
                spans.append(VersionSpan(self._versions[index], first, end))
            first, index = end, index + 1
        return tuple(spans)

    def running_tokens(self) -> int:
        """Tokens that exist of requests under way."""
        running = (request for _, _, request in self._ends if not request.cancelled)
        return sum(math.floor(self._progress - request.start + _EPSILON) for request in running)

    def hold(self) -> None:
        """Start no further request."""
        self._open = False

    def pause(self) -> None:
        """Stand still to load weights."""
        self._open = self._moving = False
        self.generation += 1

    def load(self, version: int) -> None:
        """Go on under another version."""
        self._open = self._moving = True
        self.version = version
        self._loaded_at.append(self._progress)
        self._versions.append(version)
