"""The coordinator's clock: it passes over time in which the coordinator itself stood still.

A process that was stopped, frozen or blocked has read nothing meanwhile: heartbeats and results lie in its socket, and
nobody was silent. Deadlines that went on would put out the whole fleet at the first look. Such times are compared with
none of another clock: what is sent to others is a number of seconds.
"""

from __future__ import annotations

from collections.abc import Callable


class ObservedClock:
    """Seconds, never falling, of which two readings in a row are at most `max_gap_s` apart; for one thread.

    Whoever reads it at least that often loses nothing; of a longer gap `max_gap_s` count.
    """

    def __init__(self, clock: Callable[[], float], max_gap_s: float) -> None:
        self._clock, self._max_gap_s = clock, max_gap_s
        self._read_at = self._now = clock()
        self._longest_gap_s = 0.0

    def __call__(self) -> float:
        """The time now."""
        read_at = self._clock()
        gap = max(0.0, read_at - self._read_at)
        self._read_at = read_at
        self._now += min(gap, self._max_gap_s)
        self._longest_gap_s = max(self._longest_gap_s, gap)
        return self._now

    def take_longest_gap(self) -> float:
        """Seconds, by the clock below, between the two readings furthest apart since the last call."""
        taken, self._longest_gap_s = self._longest_gap_s, 0.0
        return taken
