"""Held-out evaluation on the generators that also train: rounds of problems x samples, leased like members.

A pure state machine; `now` is passed in, in seconds. Rounds overlap the next steps, and each other. An evaluation
lease goes before a training lease, but evaluation holds at most half of a generator's slots: it neither starves
training nor waits forever. A round that is not complete at its deadline is closed with what it has, and says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from async_rl.buffer import Answer, MemberLease, Reconciled
from async_rl.buffer.leases import LeaseBook, Outcome
from async_rl.buffer.waiting import WaitingMembers
from async_rl.config import Config
from async_rl.errors import InputError
from async_rl.protocol import LeaseKey, Problem, ProtocolError, Trajectory


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of all rounds of a run."""

    samples: int
    """Completions per problem."""
    deadline_s: float
    """Seconds after which a round is closed with what it has."""
    max_attempts: int = 3
    """Failed results after which a sample counts as failed."""
    max_losses: int = 16
    """Dead owners after which a sample counts as failed."""

    @classmethod
    def of(cls, config: Config) -> EvaluationSettings:
        """The part of a run's settings."""
        return cls(
            samples=config.evaluation.samples,
            deadline_s=config.run.stall_timeout_s,
            max_attempts=config.rewards.max_attempts,
        )


@dataclass(frozen=True)
class EvaluationResult:
    """What a round found. scored + failed + missing = problems x samples."""

    version: int
    """Version that the round was started for: no older one sampled."""
    accuracy: float | None
    """Mean reward of the scored samples; None without any."""
    stderr: float | None
    """Standard error of `accuracy`, samples of one problem taken as correlated; None below two problems."""
    scored: int
    failed: int
    missing: int
    """Not back at the deadline."""
    version_min: int | None
    """Oldest and newest version that sampled a token; None without any."""
    version_max: int | None
    seconds: float
    """From start to close."""
    samples: tuple[tuple[Problem, tuple[Trajectory, ...]], ...]
    """The scored samples of each problem, in order."""


@dataclass
class _Round:
    """A round that is open."""

    first_ticket: int
    version: int
    problems: tuple[Problem, ...]
    began: float
    results: dict[int, dict[int, Trajectory]] = field(default_factory=dict)
    """Problem index -> sample index -> trajectory."""
    num_open: int = 0
    failed: int = 0


def is_due(every: int, version: int, evaluated: int) -> bool:
    """Whether a multiple of `every` lies after the last evaluated version, up to this one; 0 is never."""
    return every > 0 and version // every != evaluated // every


def clustered_stderr(rewards: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of all rewards, given by problem.

    sqrt(P / (P - 1) x sum_p (sum_j (r_pj - mean))^2) / N for P problems with N rewards: the cluster-robust variance
    of a mean (Liang and Zeger 1986). With one reward per problem it is the sample deviation over sqrt(N).
    """
    clusters = [rs for rs in rewards if rs]
    num = sum(len(rs) for rs in clusters)
    if len(clusters) < 2:
        return None
    mean = sum(sum(rs) for rs in clusters) / num
    spread = sum(sum(r - mean for r in rs) ** 2 for rs in clusters)
    return math.sqrt(len(clusters) / (len(clusters) - 1) * spread) / num


class Evaluations:
    """All rounds of a run. Tickets number (round, problem) through the run, members number the samples."""

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings
        self._leases = LeaseBook("eval", settings.max_attempts, settings.max_losses)
        self._waiting = WaitingMembers(self._leases.is_waiting)
        self._rounds: dict[int, _Round] = {}
        self._round_of: dict[int, _Round] = {}
        self._next_ticket = 0

    # --- reading --------------------------------------------------------------------------------

    @property
    def events(self) -> Counter[str]:
        """What happened to leases and results, by name."""
        return self._leases.events

    @property
    def busy(self) -> bool:
        """Whether a round is open."""
        return bool(self._rounds)

    def outstanding(self, owner: str) -> int:
        """Leases that `owner` holds."""
        return self._leases.outstanding(owner)

    def take_cancelled(self) -> list[tuple[str, LeaseKey]]:
        """(owner, lease) pairs whose result is no longer wanted, since the last call; tell the owners."""
        return self._leases.take_cancelled()

    def describe(self, now: float) -> str:
        """One sentence: what the open rounds wait for."""
        if not self._rounds:
            return "no evaluation is under way"
        parts = [
            f"version {r.version}: {r.num_open} of {len(r.problems) * self.settings.samples} samples missing "
            f"after {now - r.began:.1f} s"
            for r in self._rounds.values()
        ]
        return f"evaluation waits for {'; '.join(parts)}"

    # --- changes --------------------------------------------------------------------------------

    def start(self, version: int, problems: Sequence[Problem], now: float) -> None:
        """Open a round: every problem is sampled by generators that have `version` or newer."""
        if not problems:
            raise InputError(
                "an evaluation needs at least one held-out problem; set data.eval_problems or data.eval_path"
            )
        # Numbered by version, so that a result of a learner that died cannot pass for one of another version.
        first_ticket = max(self._next_ticket, version * len(problems))
        round_ = _Round(first_ticket, version, tuple(problems), now)
        round_.num_open = len(problems) * self.settings.samples
        self._rounds[round_.first_ticket] = round_
        for index in range(len(problems)):
            self._round_of[round_.first_ticket + index] = round_
            for sample in range(self.settings.samples):
                self._leases.open((round_.first_ticket + index, sample), now)
                self._waiting.add((round_.first_ticket + index, sample), version)
        self._next_ticket = first_ticket + len(problems)

    def lease(self, owner: str, version: int, free: int, slots: int, now: float) -> list[MemberLease]:
        """Samples for a generator with `free` of its `slots` free: at most half of `slots` (one of one) in all."""
        share = min(free, max(slots // 2, 1) - self.outstanding(owner))
        leases: list[MemberLease] = []
        while len(leases) < share and (place := self._waiting.pop(version)) is not None:
            round_ = self._round_of[place[0]]
            problem = round_.problems[place[0] - round_.first_ticket]
            leases.append(self._leases.grant(place, problem, owner, version, now))
        return leases

    def finish(self, owner: str, ticket: int, member: int, attempt: int, trajectory: Trajectory, now: float) -> Answer:
        """Take a result; same meaning as `Ledger.finish`, a round that is closed counts as dealt with."""
        outcome = self._finish(owner, ticket, member, attempt, trajectory, now)
        if outcome in (Outcome.UNKNOWN, Outcome.DUPLICATE):
            self.events[outcome.value] += 1
            return "duplicate" if outcome is Outcome.DUPLICATE else "unknown"
        self._after((ticket, member), outcome)
        return "stored"

    def expire(self, timeout_s: float, now: float) -> list[tuple[str, LeaseKey]]:
        """See `Ledger.expire`."""
        ended = self._leases.expire(timeout_s, now)
        self._reopen([(key, outcome) for _, key, outcome in ended])
        return [(owner, key) for owner, key, _ in ended]

    def overdue(self, owner: str) -> int:
        """See `Ledger.overdue`."""
        return self._leases.overdue(owner)

    def release(self, owner: str, now: float) -> list[LeaseKey]:
        """Take all leases of a dead owner back."""
        return self._reopen(self._leases.release(owner, now))

    def return_leases(self, owner: str, keys: Iterable[LeaseKey], now: float) -> list[LeaseKey]:
        """Take back leases that a living owner returns unfinished."""
        return self._reopen(self._leases.give_back(owner, keys, now))

    def reconcile(self, owner: str, holding: Iterable[LeaseKey], sent_before: float, now: float) -> Reconciled:
        """See `Ledger.reconcile`."""
        found = self._leases.reconcile(owner, holding, sent_before)
        self._reopen(self._leases.give_back(owner, found.lost, now))
        return found

    def close_all(self, now: float) -> list[EvaluationResult]:
        """Close every round with what it has (the run ends)."""
        return [self._close(round_, now) for round_ in list(self._rounds.values())]

    def tick(self, now: float) -> list[EvaluationResult]:
        """Close the rounds that are complete or past their deadline, oldest first."""
        limit = self.settings.deadline_s
        over = [r for r in self._rounds.values() if not r.num_open or now >= r.began + limit]
        return [self._close(round_, now) for round_ in over]

    # --- parts ----------------------------------------------------------------------------------

    def _finish(
        self, owner: str, ticket: int, member: int, attempt: int, trajectory: Trajectory, now: float
    ) -> Outcome:
        if not (0 <= ticket < self._next_ticket and 0 <= member < self.settings.samples):
            return Outcome.UNKNOWN
        if self._leases.get((ticket, member)) is None:
            return Outcome.DUPLICATE
        key = LeaseKey(kind="eval", ticket=ticket, member=member, attempt=attempt)
        try:
            outcome = self._leases.finish(owner, key, trajectory, now)
        except ProtocolError:
            self._after((ticket, member), self._leases.fail(key, now))
            raise
        if outcome is Outcome.STORED:
            round_ = self._round_of[ticket]
            round_.results.setdefault(ticket - round_.first_ticket, {})[member] = trajectory
        return outcome

    def _after(self, place: tuple[int, int], outcome: Outcome) -> None:
        round_ = self._round_of[place[0]]
        if outcome is Outcome.REOPENED:
            self._waiting.add(place, round_.version)
        elif outcome in (Outcome.STORED, Outcome.FAILED):
            round_.num_open -= 1
            round_.failed += outcome is Outcome.FAILED

    def _reopen(self, ended: list[tuple[LeaseKey, Outcome]]) -> list[LeaseKey]:
        for key, outcome in ended:
            self._after((key.ticket, key.member), outcome)
        return [key for key, _ in ended]

    def _close(self, round_: _Round, now: float) -> EvaluationResult:
        """Cancel what still runs and sum up."""
        del self._rounds[round_.first_ticket]
        for index in range(len(round_.problems)):
            del self._round_of[round_.first_ticket + index]
            for sample in range(self.settings.samples):
                self._leases.close((round_.first_ticket + index, sample))
        return _sum_up(round_, now)


def _sum_up(round_: _Round, now: float) -> EvaluationResult:
    by_problem = [tuple(t for _, t in sorted(round_.results.get(i, {}).items())) for i in range(len(round_.problems))]
    rewards = [[t.reward for t in trajectories if t.reward is not None] for trajectories in by_problem]
    scored = sum(map(len, rewards))
    versions = [span.version for trajectories in by_problem for t in trajectories for span in t.versions]
    return EvaluationResult(
        version=round_.version,
        accuracy=sum(map(sum, rewards)) / scored if scored else None,
        stderr=clustered_stderr(rewards),
        scored=scored,
        failed=round_.failed,
        missing=round_.num_open,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        seconds=now - round_.began,
        samples=tuple(zip(round_.problems, by_problem, strict=True)),
    )
