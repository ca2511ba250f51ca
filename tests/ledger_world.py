"""A small world around a ledger: generators that lag, die, fail and repeat themselves, a learner, a dataset.

Each operation draws what it needs from `rng`, so a history is a seed (or a hypothesis source). The world checks what
the ledger promises from the outside, with numbers of its own: `Ledger.check` is called besides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_rl.buffer import Ledger, LedgerSettings, MemberLease, TrajectoryGroup
from async_rl.buffer.state import LedgerState
from async_rl.protocol import LeaseKey, Problem, Trajectory, TrajectoryStatus, VersionSpan, decode_value, encode_value
from async_rl.staleness import trajectory_staleness
from tests.reference.window import literal_batch

IDS, MASK, LOGPROBS = np.zeros(2, np.int32), np.ones(2, np.uint8), np.zeros(2, np.float32)
NO_IDS, NO_MASK, NO_LOGPROBS = IDS[:0], MASK[:0], LOGPROBS[:0]


def make_problem(index: int) -> Problem:
    return Problem(id=str(index), prompt="p", prompt_ids=np.array([index], np.int32))


def make_trajectory(
    first: int, last: int | None = None, status: TrajectoryStatus = "complete", reward: float = 1.0
) -> Trajectory:
    """Two tokens, sampled by versions `first` and `last`; none if it failed."""
    if status == "failed":
        return Trajectory(
            status=status,
            completion_ids=NO_IDS,
            completion_mask=NO_MASK,
            behavior_logprobs=NO_LOGPROBS,
            versions=(),
            reward=None,
            error="reward raised",
        )
    last = first if last is None else last
    spans = (VersionSpan(first, 0, 2),) if first == last else (VersionSpan(first, 0, 1), VersionSpan(last, 1, 2))
    return Trajectory(
        status=status,
        completion_ids=IDS,
        completion_mask=MASK,
        behavior_logprobs=LOGPROBS,
        versions=spans,
        reward=reward,
    )


def key_of(lease: MemberLease) -> LeaseKey:
    return LeaseKey(kind="train", ticket=lease.ticket, member=lease.member, attempt=lease.attempt)


class Twins:
    """A ledger and one restored from its state: whatever is asked of both, they must answer alike."""

    def __init__(self, original: Ledger, restored: Ledger) -> None:
        self._original, self._restored = original, restored

    def __getattr__(self, name: str) -> Any:
        first, second = getattr(self._original, name), getattr(self._restored, name)
        if name in ("state", "describe_wait") or name.startswith("_"):
            return first
        if not callable(first):
            assert first == second, f"{name}: {first} against {second} after a restore"
            return first

        def both(*args: Any) -> Any:
            one, other = first(*args), second(*args)
            assert encode_value(one) == encode_value(other), f"{name}: {one} against {other} after a restore"
            return one

        return both


@dataclass
class Generator:
    name: str
    version: int
    slots: int
    work: dict[LeaseKey, int] = field(default_factory=dict)
    """Lease -> version at its first token."""
    sent: list[tuple[LeaseKey, Trajectory]] = field(default_factory=list)


class World:
    """Ledger, fleet, learner and dataset; every public method is one operation."""

    WORK = ("lease", "lease", "finish", "finish", "finish", "take", "train", "load")
    TROUBLE = (
        "join", "die", "come_back", "fail", "resend", "lose_message", "heartbeat", "give_back", "drop", "leave",
        "restart", "save", "crash", "expire",
    )  # fmt: skip

    def __init__(self, settings: LedgerSettings, num_problems: int | None, rng: random.Random) -> None:
        self.settings, self.num_problems, self.rng = settings, num_problems, rng
        self.now = 0.0
        self.fleet: dict[str, Generator] = {}
        self.dead: list[Generator] = []
        self.published = 0
        self.batch: tuple[TrajectoryGroup, ...] | None = None
        self.trained: list[int] = []
        self.position_at_issue: dict[int, int] = {}
        self.num_names = 0
        self.asking = 0
        self.dropped_in_batch = 0
        self.answered: set[tuple[str, LeaseKey]] = set()
        self.worst_staleness = 0
        self.refills = 0
        """Groups dropped for equal rewards since the last batch was taken."""
        self.ledger: Any = self._new_ledger()
        self.saved = self._remember()
        self.join()

    def weather(self) -> list[str]:
        """Operations of one history: work, and a few kinds of trouble, so that each is met in depth by some history."""
        trouble = self.rng.sample(self.TROUBLE, self.rng.randint(0, 6))
        return [*self.WORK * self.rng.randint(1, 3), "join", *trouble]

    # --- operations -----------------------------------------------------------------------------

    def join(self) -> None:
        """A generator joins with the published version."""
        if len(self.fleet) < 4:
            self.num_names += 1
            name = f"g{self.num_names}"
            self.fleet[name] = Generator(name, self.published, self.rng.randint(1, 5))

    def lease(self) -> None:
        """A generator asks for work with the version it has, which may lag behind."""
        if generator := self._any_generator():
            self._ask(generator)

    def lose_message(self) -> None:
        """Leases are given out, but never arrive."""
        if generator := self._any_generator():
            before = dict(generator.work)
            self._ask(generator)
            generator.work = before

    def finish(self) -> None:
        """A generator sends one result; weights may have changed while it sampled."""
        if held := self._any_work():
            self._send(*held, "complete")

    def fail(self) -> None:
        """A reward raises."""
        if held := self._any_work():
            self._send(*held, "failed")

    def resend(self) -> None:
        """A generator repeats a result that was acknowledged long ago or just now."""
        generator = self._any_generator()
        if generator is None or not generator.sent:
            return
        self._finish(generator.name, *self.rng.choice(generator.sent))

    def load(self) -> None:
        """A generator loads the published version; running work goes on under it."""
        if generator := self._any_generator():
            generator.version = max(generator.version, self.published)

    def die(self) -> None:
        """A generator falls silent and its leases are released; it may only be cut off."""
        if generator := self._any_generator():
            del self.fleet[generator.name]
            self.dead.append(generator)
            self.ledger.release(generator.name, self.now)
            assert self.ledger.outstanding(generator.name) == 0

    def come_back(self) -> None:
        """One that was cut off reports what it holds: still open members are its again."""
        if not self.dead or len(self.fleet) >= 4:
            return
        generator = self.dead.pop(self.rng.randrange(len(self.dead)))
        self.fleet[generator.name] = generator
        self._leave_lost_future(generator)
        self._reconcile(generator)

    def heartbeat(self) -> None:
        """Leases that a generator does not report are open again."""
        if generator := self._any_generator():
            self._reconcile(generator)
            assert self.ledger.outstanding(generator.name) == len(generator.work)

    def expire(self) -> None:
        """All leases pass their deadline: others may have the members, and those who work on them go on."""
        held = {generator.name: self.ledger.outstanding(generator.name) for generator in self.fleet.values()}
        expired = self.ledger.expire(0.0, self.now)
        if self.settings.max_losses > 3:
            slots = {name: self.ledger.outstanding(name) for name in held}
            assert all(slots[name] <= held[name] for name in held), "an overdue lease fills its slot once"
        assert len(set(expired)) == len(expired)
        self.ledger.check()

    def give_back(self) -> None:
        """Some leases are returned unfinished."""
        generator = self._any_generator()
        if generator is not None and generator.work:
            keys = self.rng.sample(sorted(generator.work), self.rng.randint(1, len(generator.work)))
            self.ledger.return_leases(generator.name, [*keys, *keys], self.now)
            for key in keys:
                del generator.work[key]

    def leave(self) -> None:
        """A generator leaves cleanly."""
        if generator := self._any_generator():
            del self.fleet[generator.name]
            self.ledger.return_leases(generator.name, list(generator.work), self.now)
            self.ledger.release(generator.name, self.now)

    def drop(self) -> None:
        """A live ticket is dropped, wherever it is."""
        in_batch = [group.ticket for group in self.batch or () if group.ticket in (self.ledger._batch or {})]
        live = [*self.ledger._tickets, *(group.ticket for group in self.ledger._buffer.groups()), *in_batch]
        if live and self.rng.random() < 0.3:
            ticket = self.rng.choice(live)
            self.dropped_in_batch += ticket in in_batch
            self.ledger.drop(ticket, "by_hand")

    def take(self) -> None:
        """The learner takes a batch, if there is one."""
        if self.batch is not None:
            return
        settings = self.settings
        complete = {group.ticket for group in self.ledger._buffer.groups()}
        expected = literal_batch(set(self.ledger._tickets), complete, settings.batch_groups, settings.window)
        if self.ledger.steps == settings.total_steps:
            expected = None
        assert self.ledger.ready() == (expected is not None), self.ledger.describe_wait(self.now)
        self.batch = self.ledger.take_batch(self.now)
        assert (None if self.batch is None else [group.ticket for group in self.batch]) == expected
        for group in self.batch or ():
            self.refills = 0
            self._check_group(group)

    def train(self) -> None:
        """The step is done; every publish_every steps its version is published."""
        if self.batch is None:
            return
        trained = [g.ticket for g in self.batch if g.ticket in (self.ledger._batch or {})]
        self.ledger.trained(self.batch)
        self.batch = None
        self.trained += trained
        steps = self.ledger.steps
        if steps % self.settings.publish_every == 0 or steps == self.settings.total_steps:
            self.published = steps

    def save(self) -> None:
        """A checkpoint is written between two steps."""
        if self.batch is None:
            self.saved = self._remember()

    def restart(self) -> None:
        """The learner dies and resumes from a checkpoint of this moment: nothing may differ from then on."""
        if isinstance(self.ledger, Twins):
            return
        before = self.ledger
        if self.batch is not None:
            return self._resume(self._remember())
        restored = self._new_ledger()
        restored.restore(before.state())
        restored.check()
        self.ledger = Twins(before, restored)

    def crash(self) -> None:
        """The learner dies and resumes from its last checkpoint; generators still hold work of the lost future."""
        self._resume(self.saved)

    # --- the end --------------------------------------------------------------------------------

    def run_to_the_end(self) -> None:
        """From here on everyone does its part in turn: the run must come to its end."""
        self.join()
        rounds = 0
        limit = 60 + 20 * ((self.settings.total_steps or 0) + (self.num_problems or 0))
        while not self.ledger.finished:
            for generator in list(self.fleet.values()):
                generator.version = max(generator.version, self.published)
                self._reconcile(generator)
                self._ask(generator)
                while generator.work:
                    self._send(generator, next(iter(generator.work)), "complete")
                self.ledger.check()
            self.take()
            self.train()
            self.ledger.check()
            rounds += 1
            assert rounds < limit, f"no progress: {self.ledger.describe_wait(self.now)}, {self.ledger.counts()}"
        counts = self.ledger.counts()
        assert counts.trained == len(self.trained) == len(set(self.trained))
        assert (counts.leased, counts.buffered, counts.in_batch) == (0, 0, 0)
        if self.settings.total_steps is None:
            assert counts.issued == self.num_problems

    def resume_with_more_problems(self) -> None:
        """The run is at its end and resumed with more epochs; without a step that is left it stays there."""
        if self.num_problems is not None:
            self.num_problems += self.rng.randint(0, 9)
        has_more = self.num_problems is None or self.ledger.issued < self.num_problems
        self._resume(self._remember())
        assert self.ledger.finished == (self.ledger.steps == self.settings.total_steps or not has_more)

    def check(self) -> None:
        """After every operation."""
        self.ledger.check()
        counts = self.ledger.counts()
        assert counts.trained == len(self.trained), "groups trained twice or lost"
        assert len(set(self.trained)) == len(self.trained), "a problem was trained twice"
        if not self.dropped_in_batch:
            assert self.ledger.position == counts.issued - sum(counts.dropped.values())
        for owner, key in self.ledger.take_cancelled():
            for generator in [*self.fleet.values(), *self.dead]:
                if generator.name == owner and self.rng.random() < 0.7:
                    generator.work.pop(key, None)
        self.now += 1.0

    # --- parts ----------------------------------------------------------------------------------

    def _new_ledger(self) -> Ledger:
        """A ledger with a dataset cursor of its own; a restored one goes on after what its state had issued."""

        def draw() -> Problem | None:
            index = ledger.issued
            if self.num_problems is not None and index >= self.num_problems:
                return None
            self._check_admission(ledger)
            return make_problem(index)

        ledger = Ledger(self.settings, draw)
        return ledger

    def _check_admission(self, ledger: Ledger) -> None:
        counts, settings = ledger.counts(), self.settings
        live_count = counts.issued - sum(counts.dropped.values()) + self.dropped_in_batch
        assert live_count // settings.batch_groups <= self.asking + settings.run_ahead, "admission was closed"
        self.position_at_issue[counts.issued] = live_count

    def _any_generator(self) -> Generator | None:
        return self.rng.choice(list(self.fleet.values())) if self.fleet else None

    def _any_work(self) -> tuple[Generator, LeaseKey] | None:
        """Any lease in work, also of a generator that is thought dead."""
        busy = [generator for generator in [*self.fleet.values(), *self.dead] if generator.work]
        if not busy:
            return None
        generator = self.rng.choice(busy)
        return generator, self.rng.choice(list(generator.work))

    def _ask(self, generator: Generator) -> None:
        self.asking = generator.version
        free = generator.slots - self.ledger.outstanding(generator.name)
        leases = self.ledger.lease(generator.name, generator.version, free, self.now)
        assert len(leases) <= max(free, 0)
        assert len({key_of(lease) for lease in leases}) == len(leases)
        for lease in leases:
            position = self.position_at_issue[lease.ticket]
            limit = self.settings.batch_groups * (generator.version + self.settings.run_ahead + 1)
            assert position < limit, f"version {generator.version} is too old for position {position}"
            assert lease.problem.id == str(lease.ticket)
            assert lease.greedy == (self.settings.baseline and lease.member == self.settings.group_size)
            generator.work[key_of(lease)] = generator.version

    def _send(self, generator: Generator, key: LeaseKey, status: TrajectoryStatus) -> None:
        first = generator.work.pop(key)
        last, reward = self.rng.randint(first, max(first, generator.version)), float(self.rng.random() < 0.3)
        trajectory = make_trajectory(first, last, status, reward)
        generator.sent = [*generator.sent[-5:], (key, trajectory)]
        self._finish(generator.name, key, trajectory)

    def _finish(self, owner: str, key: LeaseKey, trajectory: Trajectory) -> str:
        before, failures = self.ledger.counts(), self.ledger.events["failed_attempts"]
        refilled = before.dropped.get("zero_variance", 0)
        answer = self.ledger.finish(owner, key.ticket, key.member, key.attempt, trajectory, self.now)
        if answer != "stored":
            assert self.ledger.counts() == before, f"a {answer} result changed an account"
            assert self.ledger.events["failed_attempts"] == failures, f"a {answer} result used up an attempt"
        if self.ledger.counts().dropped.get("zero_variance", 0) > refilled:
            self.refills += 1
            assert self.refills <= self.settings.max_refills, "more groups refilled than allowed for a batch"
        if (owner, key) in self.answered:
            assert answer == "duplicate", f"a repeated result was {answer}"
        elif answer == "stored":
            self.answered.add((owner, key))
        return answer

    def _reconcile(self, generator: Generator) -> None:
        self.now += 1.0
        found = self.ledger.reconcile(generator.name, tuple(generator.work), self.now, self.now)
        for key in found.unwanted:
            del generator.work[key]

    def _leave_lost_future(self, generator: Generator) -> None:
        """A generator that meets a learner which went back loads its version and throws away what is newer."""
        if generator.version > self.published:
            generator.version = self.published
            generator.work = {key: first for key, first in generator.work.items() if first <= self.published}

    def _check_group(self, group: TrajectoryGroup) -> None:
        settings, step = self.settings, self.ledger.steps + 1
        assert settings.min_members <= len(group.members) <= settings.group_size
        assert (group.baseline is not None) == settings.baseline
        assert group.baseline is None or group.baseline.status != "failed"
        assert all(member.status != "failed" for member in group.members)
        assert group.problem.id == str(group.ticket)
        ages = [trajectory_staleness(step, member.versions) for member in group.sampled]
        assert min(ages) >= 0, "a token of a version that the learner has not made"
        self.worst_staleness = max(self.worst_staleness, *ages)
        if settings.overdue == "wait":
            bound = settings.run_ahead + -(-((settings.window or 1) - 1) // settings.batch_groups)
            assert max(ages) <= bound <= settings.max_staleness, f"staleness {max(ages)} above the bound {bound}"

    def _remember(self) -> tuple[bytes, list[int], dict[int, int], int, int]:
        where = (list(self.trained), dict(self.position_at_issue), self.dropped_in_batch, self.refills)
        return self.ledger.state(), *where

    def _resume(self, saved: tuple[bytes, list[int], dict[int, int], int, int]) -> None:
        data, trained, positions, dropped_in_batch, self.refills = saved
        self.trained, self.position_at_issue = list(trained), dict(positions)
        self.dropped_in_batch = dropped_in_batch
        self.asking = decode_value(data, LedgerState).steps
        self.ledger = self._new_ledger()
        self.ledger.restore(data)
        self.batch, self.published = None, self.ledger.steps
        self.saved = saved
        self.answered.clear()
        for generator in list(self.fleet.values()):
            if self.rng.random() < 0.4:
                self.dead.append(self.fleet.pop(generator.name))
            else:
                self._leave_lost_future(generator)
        for owner in self.ledger.owners():
            if owner not in self.fleet:
                self.ledger.release(owner, self.now)
        for generator in self.fleet.values():
            self._reconcile(generator)


def random_settings(rng: random.Random) -> LedgerSettings:
    """Settings that can make progress, small enough that everything happens often."""
    while True:
        try:
            return LedgerSettings(
                batch_groups=rng.randint(1, 4),
                group_size=rng.randint(1, 3),
                max_staleness=rng.randint(0, 3),
                publish_every=rng.randint(1, 3),
                overdue=rng.choice(("mask", "wait", "wait", "keep")),
                reorder_window=rng.choice((None, 1, 2, 3, 5, 9)),
                max_refills=rng.choice((0, 0, 1, 2, 6)),
                max_attempts=rng.randint(1, 3),
                max_losses=rng.choice((2, 16)),
                total_steps=rng.choice((None, 4, 12)),
                baseline=rng.random() < 0.3,
            )
        except ValueError:
            continue


def random_world(rng: random.Random) -> World:
    settings = random_settings(rng)
    num_problems = rng.randint(0, 40) if settings.total_steps is None or rng.random() < 0.3 else None
    return World(settings, num_problems, rng)
