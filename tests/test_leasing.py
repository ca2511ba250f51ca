"""Seeds of members: whoever dies, the same completions are trained, so that no length is favoured."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl import protocol as p
from async_rl.buffer import Ledger, LedgerSettings, MemberLease
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.leasing import Leasing, member_seed
from async_rl.membership import Member
from tests.ledger_world import make_problem, make_trajectory
from tests.simulate.settings import make_config

STEPS, LIFE_S = 20, 60.0
"""Batches of a run, and the mean life of a generator: an eighth of the completions take longer."""


def length_of(seed: int) -> int:
    """Tokens, and seconds, of the completion that a seed samples: lognormal, median 20."""
    return max(1, round(20 * math.exp(np.random.default_rng(seed).standard_normal())))


class Fleet:
    """Two generators under a virtual clock that sample a token a second; each death ends what they work on."""

    def __init__(self, ledger: Ledger, leasing: Leasing, rng: random.Random | None, failing: Mapping[int, int]) -> None:
        self.ledger, self.leasing, self.rng, self.failing = ledger, leasing, rng, failing
        self.now, self.deaths = 0.0, 0
        self.members = [self._join(order) for order in range(2)]
        self.dies_at = {member.name: self._life() for member in self.members}
        self.ends: list[tuple[float, p.LeaseKey, int, str]] = []
        self.failed: dict[int, int] = {}
        """Failed results by ticket."""
        self.lengths: dict[tuple[int, int], int] = {}
        """(ticket, member) -> tokens of the result that was stored."""

    def _join(self, order: int) -> Member:
        name = f"g{order}-{self.deaths}"
        return Member(name, "", 8, 0, "simulated", "", 0, self.now, order, self.now, version=self.ledger.steps)

    def _life(self) -> float:
        return math.inf if self.rng is None else self.now + self.rng.expovariate(1 / LIFE_S)

    def work(self) -> None:
        """Until a batch is ready."""
        while not self.ledger.ready():
            for member, leases in self.leasing.hand_out(self.members, self.now):
                for lease in leases:
                    key = p.LeaseKey(lease.kind, lease.ticket, lease.member, lease.attempt)
                    length = length_of(lease.sampling.seed)
                    heapq.heappush(self.ends, (self.now + length, key, length, member.name))
            name = min(self.dies_at, key=self.dies_at.__getitem__)
            if self.dies_at[name] < self.ends[0][0]:
                self._die(name)
            else:
                self._finish(*heapq.heappop(self.ends))

    def _die(self, name: str) -> None:
        self.now = self.dies_at.pop(name)
        self.deaths += 1
        self.ledger.release(name, self.now)
        self.ends = [end for end in self.ends if end[3] != name]
        heapq.heapify(self.ends)
        place = next(i for i, member in enumerate(self.members) if member.name == name)
        self.members[place] = self._join(place)
        self.dies_at[self.members[place].name] = self._life()

    def _finish(self, now: float, key: p.LeaseKey, length: int, name: str) -> None:
        self.now = now
        fails = key.member == 0 and self.failed.get(key.ticket, 0) < self.failing.get(key.ticket, 0)
        self.failed[key.ticket] = self.failed.get(key.ticket, 0) + fails
        if not fails:
            self.lengths[key.ticket, key.member] = length
        trajectory = make_trajectory(self.ledger.steps, status="failed" if fails else "complete")
        assert self.ledger.finish(name, key.ticket, key.member, key.attempt, trajectory, now) == "stored"


def trained_lengths(
    rng: random.Random | None, failing: Mapping[int, int] | None = None
) -> tuple[dict[tuple[int, int], int], int]:
    """({(ticket, member): tokens} of what was trained, deaths); without `rng` nobody dies."""
    config = make_config("staleness.max_staleness=0")
    problems = (make_problem(number) for number in range(10**6))
    # Death must not drop a member here: that is counted, and is another law.
    ledger = Ledger(
        LedgerSettings(batch_groups=4, group_size=2, max_staleness=0, max_losses=10**6), lambda: next(problems)
    )
    leasing = Leasing(config, ledger, Evaluations(EvaluationSettings(samples=1, deadline_s=1e9)), ())
    fleet = Fleet(ledger, leasing, rng, failing or {})
    for version in range(1, STEPS + 1):
        fleet.work()
        batch = ledger.take_batch(fleet.now)
        assert batch is not None
        ledger.trained(batch)
        for member in fleet.members:
            member.version = version
    return fleet.lengths, fleet.deaths


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.dictionaries(st.integers(0, 4 * STEPS - 1), st.integers(1, 2), max_size=20))
def test_deaths_change_no_completion_that_is_trained(seed: int, failing: dict[int, int]) -> None:
    """Not a statistic: ticket by ticket and member by member the same lengths, as if nobody had died."""
    undisturbed, none = trained_lengths(None, failing)
    disturbed, deaths = trained_lengths(random.Random(seed), failing)
    assert none == 0 and deaths > 0
    assert disturbed == undisturbed
    assert len(disturbed) == 4 * STEPS * 2


def test_another_completion_after_each_death_would_be_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the seed may not depend on the attempt: this is what the test above would meet."""
    whole = [length for lengths, _ in [trained_lengths(None)] for length in lengths.values()]
    again = iter(range(10**9))
    monkeypatch.setattr("async_rl.leasing.member_seed", lambda *_: next(again))
    short = [length for seed in range(5) for length in trained_lengths(random.Random(seed))[0].values()]
    assert np.mean(short) < 0.8 * np.mean(whole)


def test_every_member_has_its_own_seed_and_a_failed_one_another() -> None:
    seeds = [
        member_seed(run, kind, ticket, member, failures)
        for run in (0, 1)
        for kind in ("train", "eval")
        for ticket in range(20)
        for member in range(8)
        for failures in range(3)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)


def test_a_failed_result_is_sampled_anew_and_a_lost_lease_is_not() -> None:
    problems = iter([make_problem(0)])
    settings_ = LedgerSettings(batch_groups=1, group_size=1, max_staleness=0, max_attempts=9)
    ledger = Ledger(settings_, lambda: next(problems, None))

    def lease(owner: str) -> MemberLease:
        (found,) = ledger.lease(owner, 0, 1, 0.0)
        return found

    first = lease("g0")
    ledger.release("g0", 0.0)
    second = lease("g1")
    assert (second.attempt, second.failures) == (2, 0)
    ledger.finish("g1", 0, 0, second.attempt, make_trajectory(0, status="failed"), 0.0)
    third = lease("g1")
    assert (third.attempt, third.failures) == (3, 1)
    ledger.expire(0.0, 0.0)
    restored = Ledger(settings_, lambda: None)
    restored.restore(ledger.state())
    (fourth,) = restored.lease("g2", 0, 1, 0.0)
    assert (fourth.attempt, fourth.failures) == (4, 1), "also across a checkpoint"
    assert first.failures == 0
