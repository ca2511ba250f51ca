"""The replay buffer: complete groups between generators and learner, and the window that orders them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from async_rl.buffer.records import TrajectoryGroup


class ReplayBuffer:
    """Complete groups, taken oldest first within the window.

    Let the frontier be the oldest ticket that is still open. Everything complete below it is taken before anything
    above it, and from then on it is the head that the window counts from. So "ticket < head + W", applied to one group
    after the other, is the same as ticket < frontier + W for all of them, and one counter of such groups is enough.
    """

    def __init__(self, window: int | None, frontier: int = 0) -> None:
        self._window = window
        self._frontier = frontier
        self._groups: dict[int, TrajectoryGroup] = {}
        self._order: list[int] = []
        self._eligible = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._groups

    @property
    def frontier(self) -> int:
        """Oldest ticket that is still open, or the next one to be issued."""
        return self._frontier

    @property
    def eligible(self) -> int:
        """Groups that may be taken now."""
        return len(self._groups) if self._window is None else self._eligible

    def groups(self) -> list[TrajectoryGroup]:
        """Everything held, oldest first."""
        return [self._groups[ticket] for ticket in sorted(self._groups)]

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Hold complete groups."""
        for group in groups:
            assert group.ticket not in self._groups, f"ticket {group.ticket} is buffered already"
            self._groups[group.ticket] = group
            heapq.heappush(self._order, group.ticket)
            self._eligible += self._inside(group.ticket)

    def advance(self, is_open: Callable[[int], bool], issued: int) -> None:
        """Move the frontier past tickets that are no longer open; amortised O(1) for each ticket of the run."""
        start = self._frontier
        while self._frontier < issued and not is_open(self._frontier):
            self._frontier += 1
        if self._window is not None:
            entered = range(start + self._window, self._frontier + self._window)
            self._eligible += sum(ticket in self._groups for ticket in entered)

    def remove(self, ticket: int) -> TrajectoryGroup:
        """Take one group out of turn, to drop it."""
        self._eligible -= self._inside(ticket)
        return self._groups.pop(ticket)

    def take(self, num: int) -> tuple[TrajectoryGroup, ...]:
        """The `num` oldest groups, which must be eligible."""
        assert num <= self.eligible, f"{num} groups asked for, {self.eligible} are eligible"
        taken: list[TrajectoryGroup] = []
        while len(taken) < num:
            ticket = heapq.heappop(self._order)
            if ticket in self._groups:
                taken.append(self.remove(ticket))
        return tuple(taken)

    def _inside(self, ticket: int) -> bool:
        return self._window is not None and ticket < self._frontier + self._window

    def check(self) -> None:
        """Assert the counter and the order against their definitions."""
        if self._window is not None:
            limit = self._frontier + self._window
            inside = sum(ticket < limit for ticket in self._groups)
            assert self._eligible == inside, f"{self._eligible} groups counted as eligible, {inside} are"
        assert self._groups.keys() <= set(self._order), "a buffered group is missing in the order"
