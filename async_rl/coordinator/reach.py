"""Whether the members that a publication waits for are still connected.

A generator that was killed closes its connection, and nobody is told: the next message to it fails. While an answer is
awaited nothing else may be sent for a long time, so something is, every second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

PROBE_EVERY_S = 1.0
MAX_MISSES = 3
"""Failures in a row after which a member is gone. A connection that a router reset is back before: a client tries again
after 0.1 to 2 s (`transport.py`)."""


class Reach:
    """A pure state machine: it counts, the caller sends."""

    def __init__(self) -> None:
        self._misses: Counter[str] = Counter()
        self._looked_at: float | None = None

    def look(self, awaited: Iterable[str], probe: Callable[[str], bool], now: float) -> list[str]:
        """Probe those who are awaited, at most every PROBE_EVERY_S; returns the names of those who are gone."""
        if self._looked_at is not None and now - self._looked_at < PROBE_EVERY_S:
            return []
        self._looked_at = now
        failed = [name for name in sorted(awaited) if not probe(name)]
        self._misses = Counter({name: self._misses[name] + 1 for name in failed})
        return [name for name in failed if self._misses[name] >= MAX_MISSES]
