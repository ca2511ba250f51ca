"""What the ledger takes and gives: settings, member leases, groups, counts. Plain immutable data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import msgspec

from async_rl.config import Config, has_baseline
from async_rl.protocol import LeaseKey, Problem, Trajectory
from async_rl.staleness import Overdue, run_ahead
from async_rl.trajectories import TrajectoryBlock


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one ledger; raises ValueError for values that could never make progress."""

    batch_groups: int
    """B: groups of a full batch."""
    group_size: int
    """Members of a group that train."""
    max_staleness: int
    publish_every: int = 1
    """Steps between publications."""
    overdue: Overdue = "mask"
    reorder_window: int | None = None
    """W, with overdue='wait'; None: batch_groups."""
    max_attempts: int = 3
    """Failed results after which a member is settled as failed."""
    max_losses: int = 16
    """Dead owners after which a member is settled as failed: a problem that kills every engine must not stop a run."""
    total_steps: int | None = None
    """Steps of the run; tickets beyond what they consume are not issued. None: no limit."""
    min_group_members: int | None = None
    """Usable members that a group needs; None: 2 (1 in groups of one and with a baseline), else nothing to compare."""
    max_refills: int = 0
    """Complete groups with equal rewards that may be dropped (`zero_variance`) and refilled for each batch taken."""
    baseline: bool = False
    """Whether each ticket has one more member, the last: a greedy completion whose reward is the others' baseline."""

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_groups", 1),
            ("group_size", 1),
            ("max_staleness", 0),
            ("publish_every", 1),
            ("max_refills", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}, expected at least {least}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"reorder_window = {self.window}, expected at least 1")
        if not 1 <= self.min_members <= self.group_size:
            raise ValueError(f"min_group_members = {self.min_members}, expected 1 to group_size = {self.group_size}")
        if self.run_ahead < self.publish_every - 1:
            needed = self.max_staleness + self.publish_every - 1 - self.run_ahead
            raise ValueError(
                f"publish_every = {self.publish_every} with max_staleness = {self.max_staleness} and overdue = "
                f"{self.overdue!r} gives run_ahead = {self.run_ahead}: the learner would wait forever for its batch; "
                f"the smallest max_staleness that works is {needed}"
            )

    @classmethod
    def of(cls, config: Config) -> LedgerSettings:
        """The ledger's part of a run's settings."""
        return cls(
            batch_groups=config.learner.batch_groups,
            group_size=config.sampling.group_size,
            max_staleness=config.staleness.max_staleness,
            publish_every=config.staleness.publish_every,
            overdue=config.staleness.overdue,
            reorder_window=config.staleness.reorder_window,
            max_attempts=config.rewards.max_attempts,
            total_steps=config.run.steps,
            max_refills=math.ceil(config.sampling.max_refills * config.learner.batch_groups),
            baseline=has_baseline(config.algorithm),
        )

    @property
    def num_members(self) -> int:
        """Members of a ticket, its baseline member included."""
        return self.group_size + self.baseline

    def is_baseline(self, member: int) -> bool:
        """Whether a member is sampled greedily and never trained."""
        return self.baseline and member == self.group_size

    @property
    def window(self) -> int | None:
        """W in tickets; None: unlimited."""
        if self.overdue != "wait":
            return None
        return self.batch_groups if self.reorder_window is None else self.reorder_window

    @property
    def run_ahead(self) -> int:
        """Batches that may be issued beyond the version loaded in the generator that asks."""
        return run_ahead(self.max_staleness, self.overdue, self.window or 1, self.batch_groups)

    @property
    def min_members(self) -> int:
        """Usable members that a group needs."""
        if self.min_group_members is not None:
            return self.min_group_members
        return 1 if self.baseline else min(2, self.group_size)


class MemberLease(msgspec.Struct, frozen=True):
    """The right to work on one member of a ticket, as the ledger gives it."""

    ticket: int
    member: int
    attempt: int
    """Numbered from 1 for each member, deaths and returns included."""
    problem: Problem
    failures: int = 0
    """Failed results of this member so far: those alone have another completion sampled."""
    greedy: bool = False
    """A baseline member: its most likely tokens are sampled."""


class TrajectoryGroup(msgspec.Struct, frozen=True):
    """The usable trajectories of one problem, in member order; failed members are left out."""

    ticket: int
    problem: Problem
    members: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """The greedy completion of a group that has one: it is in no statistic of the members and never trains."""

    @property
    def sampled(self) -> tuple[Trajectory, ...]:
        """All trajectories, the baseline last."""
        return self.members if self.baseline is None else (*self.members, self.baseline)

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ, the baseline's included: in a group of equal ones every member is as good as it."""
        return any(member.reward != (self.baseline or self.members[0]).reward for member in self.members)


class PackedBatch(msgspec.Struct, frozen=True):
    """Groups as they travel: the arrays of all their trajectories one after the other."""

    tickets: tuple[int, ...]
    problems: tuple[Problem, ...]
    sizes: tuple[int, ...]
    """Members of each group."""
    baselines: tuple[bool, ...]
    """Whether a group has one; it follows its members."""
    trajectories: TrajectoryBlock

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> PackedBatch:
        """At least one group; arrays are copied."""
        return cls(
            tuple(group.ticket for group in groups),
            tuple(group.problem for group in groups),
            tuple(len(group.members) for group in groups),
            tuple(group.baseline is not None for group in groups),
            TrajectoryBlock.of([trajectory for group in groups for trajectory in group.sampled]),
        )

    def groups(self) -> tuple[TrajectoryGroup, ...]:
        """The groups, their arrays as views."""
        rest = iter(self.trajectories.split())
        return tuple(
            TrajectoryGroup(ticket, problem, tuple(islice(rest, size)), next(rest) if baseline else None)
            for ticket, problem, size, baseline in zip(
                self.tickets, self.problems, self.sizes, self.baselines, strict=True
            )
        )


class LedgerCounts(msgspec.Struct, frozen=True):
    """Where every ticket is: issued = leased + buffered + in_batch + trained + dropped."""

    issued: int
    leased: int
    """Tickets with members still open, held by a generator or waiting for one."""
    buffered: int
    in_batch: int
    trained: int
    dropped: dict[str, int]
    """Tickets by reason."""


class Reconciled(msgspec.Struct, frozen=True):
    """Differences between the leases a generator holds and those the ledger says it holds."""

    lost: tuple[LeaseKey, ...]
    """Given out, but never arrived; they are open again."""
    adopted: tuple[LeaseKey, ...]
    """Taken from the generator while it was silent, still open, and given back to it."""
    unwanted: tuple[LeaseKey, ...]
    """Held by the generator, but settled or unknown here; to be cancelled there."""
