"""The ledger: exact account of every problem from draw to gradient, and the admission rule that bounds staleness.

A pure state machine: no sockets, no clock (`now` is passed in, in seconds), no torch. Its laws, which `check` asserts:
issued = leased + buffered + in_batch + trained + dropped, and position < B x (version + run_ahead + 1) at every issue.
Definition, rule and proof: docs/staleness.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from async_rl.buffer.explain import describe_admission, describe_ticket
from async_rl.buffer.leases import LeaseBook, Outcome, Place
from async_rl.buffer.records import LedgerCounts, LedgerSettings, MemberLease, Reconciled, TrajectoryGroup
from async_rl.buffer.replay import ReplayBuffer
from async_rl.buffer.state import LedgerState, OpenPlace, Ticket, check_same_settings
from async_rl.buffer.waiting import WaitingMembers
from async_rl.protocol import LeaseKey, Problem, ProtocolError, Trajectory, decode_value, encode_value
from async_rl.staleness import required_version

Answer = Literal["stored", "duplicate", "unknown"]


class Ledger:
    """Tickets, leases, groups and batches of one run."""

    def __init__(self, settings: LedgerSettings, draw: Callable[[], Problem | None]) -> None:
        """`draw` gives the next problem of the dataset, None at its end."""
        self.settings = settings
        self._draw = draw
        self._tickets: dict[int, Ticket] = {}
        self._leases = LeaseBook("train", settings.max_attempts, settings.max_losses)
        self._waiting = WaitingMembers(self._leases.is_waiting)
        self._buffer = ReplayBuffer(settings.window)
        self._batch: dict[int, TrajectoryGroup] | None = None
        self._issued = self._trained = self._steps = 0
        self._dropped: Counter[str] = Counter()
        self._refills = 0
        """Groups dropped for equal rewards since the last batch was taken."""
        self.dropped_tokens = 0
        """Sampled tokens of dropped tickets, since this ledger was made or restored."""
        self._exhausted = False
        self._versions: dict[str, int] = {}

    # --- reading --------------------------------------------------------------------------------

    @property
    def issued(self) -> int:
        """Tickets issued so far: also the number of problems drawn, which is the dataset's cursor."""
        return self._issued

    @property
    def steps(self) -> int:
        """Batches trained: the version that the learner has made."""
        return self._steps

    @property
    def events(self) -> Counter[str]:
        """What happened to leases and results, by name (failed_attempts, late, duplicate, lost_leases, ...)."""
        return self._leases.events

    @property
    def position(self) -> int:
        """Place of the next ticket in the order of training: what taken batches consume, and all that waits before it.

        While every batch is full this is the m of the proof (tickets issued minus dropped); counted this way the
        bound also holds when groups are dropped from a batch after it was taken.
        """
        taken = self._steps + (self._batch is not None)
        return taken * self.settings.batch_groups + len(self._tickets) + len(self._buffer)

    @property
    def finished(self) -> bool:
        """Whether no batch will come any more: all steps done, or the dataset at its end and everything resolved."""
        if self._batch is not None:
            return False
        return self._steps == self.settings.total_steps or (self._exhausted and not self._tickets and not self._buffer)

    def counts(self) -> LedgerCounts:
        """Where every ticket is now."""
        return LedgerCounts(
            issued=self._issued,
            leased=len(self._tickets),
            buffered=len(self._buffer),
            in_batch=len(self._batch or ()),
            trained=self._trained,
            dropped=dict(self._dropped),
        )

    def outstanding(self, owner: str) -> int:
        """Leases that `owner` holds."""
        return self._leases.outstanding(owner)

    def owners(self) -> tuple[str, ...]:
        """Everyone who holds a lease; after a restore also those that have not come back yet."""
        return self._leases.owners()

    def describe_wait(self, now: float) -> str:
        """One sentence: what the learner is waiting for, who holds it, since when."""
        step, need, total = self._steps + 1, self.settings.batch_groups, self.settings.total_steps
        if self._batch is not None:
            return f"step {step} is in training"
        if self.finished:
            return f"nothing: the run is at its end after {self._steps} steps"
        if self.ready():
            return f"nothing: the batch of step {step} is ready"
        text = f"step {step} waits for {need - self._buffer.eligible} of {need} groups"
        oldest = self._tickets.get(self._buffer.frontier)
        if oldest is not None:
            text += f"; the oldest is {describe_ticket(self._buffer.frontier, oldest, self._leases, now)}"
        if self._exhausted:
            return f"{text}; the dataset is at its end"
        if total is not None and self.position >= total * need:
            return f"{text}; all tickets of the run's {total} steps are issued"
        num_live = len(self._tickets) + len(self._buffer)
        return f"{text}; {describe_admission(self._required(), need, num_live, self._versions)}"

    def take_cancelled(self) -> list[tuple[str, LeaseKey]]:
        """(owner, lease) pairs whose result is no longer wanted, since the last call; tell the owners."""
        return self._leases.take_cancelled()

    # --- generators -----------------------------------------------------------------------------

    def lease(self, owner: str, version: int, slots: int, now: float) -> list[MemberLease]:
        """Up to `slots` members for a generator that has `version` loaded: waiting ones first, then new tickets."""
        self._versions[owner] = version
        leases: list[MemberLease] = []
        while len(leases) < slots:
            place = self._waiting.pop(version)
            if place is None:
                if not (self.admits(version) and self._issue(now)):
                    break
                continue
            problem, greedy = self._tickets[place[0]].problem, self.settings.is_baseline(place[1])
            leases.append(self._leases.grant(place, problem, owner, version, now, greedy))
        return [lease for lease in leases if lease.ticket in self._tickets]

    def has_work(self, owner: str, version: int) -> bool:
        """Whether `lease` would give a generator with `version` anything, or one with an older version."""
        self._versions[owner] = version
        return self._waiting.has(version) or self.admits(version)

    def admits(self, version: int) -> bool:
        """The admission rule for a generator with `version`: floor(position / B) <= version + run_ahead."""
        if self._exhausted or self._required() > version:
            return False
        total = self.settings.total_steps
        return total is None or self.position < total * self.settings.batch_groups

    def finish(self, owner: str, ticket: int, member: int, attempt: int, trajectory: Trajectory, now: float) -> Answer:
        """Take a result, however late or often it comes; "unknown" when it belongs to no attempt of this ledger.

        Raises ProtocolError when its tokens are older than the version that the owner had when it took the lease.
        """
        place = (ticket, member)
        key = LeaseKey(kind="train", ticket=ticket, member=member, attempt=attempt)
        if not (0 <= ticket < self._issued and 0 <= member < self.settings.num_members):
            outcome = Outcome.UNKNOWN
        elif self._leases.get(place) is None:
            outcome = Outcome.DUPLICATE
        elif self._from_lost_future(trajectory):
            outcome = Outcome.UNKNOWN
        else:
            outcome = self._finish(owner, key, trajectory, now)
        if outcome in (Outcome.UNKNOWN, Outcome.DUPLICATE):
            self.events[outcome.value] += 1
            return "duplicate" if outcome is Outcome.DUPLICATE else "unknown"
        if outcome is Outcome.STORED:
            self._tickets[ticket].results[member] = trajectory
            self._settle(ticket, member, failed=False)
        else:
            self._after(place, outcome)
        return "stored"

    def _finish(self, owner: str, key: LeaseKey, trajectory: Trajectory, now: float) -> Outcome:
        """A result that cannot be is one of the failures that its member is allowed: else it would be tried forever."""
        try:
            return self._leases.finish(owner, key, trajectory, now)
        except ProtocolError:
            self._after((key.ticket, key.member), self._leases.fail(key, now))
            raise

    def expire(self, timeout_s: float, now: float) -> list[tuple[str, LeaseKey]]:
        """Take back leases held for `timeout_s` (doubled for each earlier loss); late results still count.

        Returns (owner, lease) pairs.
        """
        ended = self._leases.expire(timeout_s, now)
        self._reopen([(key, outcome) for _, key, outcome in ended])
        return [(owner, key) for owner, key, _ in ended]

    def overdue(self, owner: str) -> int:
        """Leases that `owner` still works on although they were taken back at their deadline."""
        return self._leases.overdue(owner)

    def release(self, owner: str, now: float) -> list[LeaseKey]:
        """Take all leases of a dead owner back; members that it has delivered stay."""
        self._versions.pop(owner, None)
        return self._reopen(self._leases.release(owner, now))

    def return_leases(self, owner: str, keys: Iterable[LeaseKey], now: float) -> list[LeaseKey]:
        """Take back leases that a living owner returns unfinished; keys that it does not hold are ignored."""
        return self._reopen(self._leases.give_back(owner, keys, now))

    def reconcile(self, owner: str, holding: Iterable[LeaseKey], sent_before: float, now: float) -> Reconciled:
        """Settle differences with what `owner` says it holds: lost leases are open again, still open ones adopted.

        Leases given out after `sent_before` may be on their way and are not missed. `unwanted` should be cancelled.
        """
        found = self._leases.reconcile(owner, holding, sent_before)
        self._reopen(self._leases.give_back(owner, found.lost, now))
        return found

    # --- learner --------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether `take_batch` would give a batch."""
        if self._batch is not None or self._steps == self.settings.total_steps:
            return False
        return self._buffer.eligible >= self.settings.batch_groups

    def take_batch(self, now: float) -> tuple[TrajectoryGroup, ...] | None:
        """The next batch, oldest eligible groups first; None while there are too few, or at the end of the data.

        A batch is always full: what a dataset leaves over at its end is dropped with reason "tail".
        """
        assert self._batch is None, f"the batch of step {self._steps + 1} is still in training"
        if not self.ready():
            return None
        groups = self._buffer.take(self.settings.batch_groups)
        self._batch = {group.ticket: group for group in groups}
        self._refills = 0
        self._drop_tail()
        return groups

    def trained(self, batch: Sequence[TrajectoryGroup]) -> None:
        """The step is done: its groups are trained, except those dropped since they were taken."""
        assert self._batch is not None, "trained without a batch in flight"
        tickets = {group.ticket for group in batch}
        assert tickets >= self._batch.keys(), f"not in the trained batch: {sorted(self._batch.keys() - tickets)}"
        self._trained += len(self._batch)
        self._steps += 1
        self._batch = None

    def drop(self, ticket: int, reason: str) -> None:
        """Take a live ticket out of the run, counted under `reason`; its running attempts are cancelled."""
        self._drop(ticket, reason)
        self._advance()
        self._drop_tail()

    # --- parts ----------------------------------------------------------------------------------

    def _required(self) -> int:
        return required_version(self.position, self.settings.batch_groups, self.settings.run_ahead)

    def _issue(self, now: float) -> bool:
        """Draw the next problem and open its members; False at the end of the dataset."""
        problem = self._draw()
        if problem is None:
            self._exhausted = True
            self._drop_tail()
            return False
        ticket, size, required = self._issued, self.settings.num_members, self._required()
        self._tickets[ticket] = Ticket(problem, required, [None] * size, open=size)
        self._issued += 1
        for member in range(size):
            self._leases.open((ticket, member), now)
            self._waiting.add((ticket, member), required)
        return True

    def _from_lost_future(self, trajectory: Trajectory) -> bool:
        """Whether a version that this learner has not made sampled it: a learner that died since then did."""
        newest = max((span.version for span in trajectory.versions), default=0)
        lost = newest > self._steps + (self._batch is not None)
        self.events["from_lost_future"] += lost
        return lost

    def _reopen(self, ended: list[tuple[LeaseKey, Outcome]]) -> list[LeaseKey]:
        for key, outcome in ended:
            self._after((key.ticket, key.member), outcome)
        return [key for key, _ in ended]

    def _after(self, place: Place, outcome: Outcome) -> None:
        """An attempt ended without a usable result."""
        record = self._tickets.get(place[0])
        if record is None:
            return
        if outcome is Outcome.REOPENED:
            self._waiting.add(place, record.required)
        elif outcome is Outcome.FAILED:
            self._settle(*place, failed=True)

    def _settle(self, ticket: int, member: int, failed: bool) -> None:
        """One more member of a ticket is settled."""
        record, settings = self._tickets[ticket], self.settings
        record.open -= 1
        record.failed += failed
        if failed and settings.is_baseline(member):
            self.drop(ticket, "failed_baseline")
        elif settings.group_size - record.failed < settings.min_members:
            self.drop(ticket, "failed_members")
        elif record.open == 0:
            members = tuple(result for result in record.results[: settings.group_size] if result is not None)
            baseline = record.results[-1] if settings.baseline else None
            self._complete(TrajectoryGroup(ticket, record.problem, members, baseline))

    def _complete(self, group: TrajectoryGroup) -> None:
        """Buffer a group, or drop it when its rewards are equal and a refill is left for the batch being collected."""
        if self._refills < self.settings.max_refills and not group.has_signal:
            self._refills += 1
            self.drop(group.ticket, "zero_variance")
            return
        del self._tickets[group.ticket]
        self._buffer.add([group])
        self._advance()

    def _drop(self, ticket: int, reason: str) -> None:
        members: Iterable[Trajectory | None]
        if ticket in self._tickets:
            for member in range(self.settings.num_members):
                self._leases.close((ticket, member))
            members = self._tickets.pop(ticket).results
        elif ticket in self._buffer:
            members = self._buffer.remove(ticket).sampled
        else:
            assert self._batch is not None and ticket in self._batch, f"ticket {ticket} is not live: cannot drop it"
            members = self._batch.pop(ticket).sampled
        self._dropped[reason] += 1
        self.dropped_tokens += sum(len(member.completion_ids) for member in members if member is not None)

    def _advance(self) -> None:
        self._buffer.advance(self._tickets.__contains__, self._issued)

    def _drop_tail(self) -> None:
        """At the end of the dataset fewer groups than a batch can be left over: nothing will fill it up."""
        if not self._exhausted or len(self._tickets) + len(self._buffer) >= self.settings.batch_groups:
            return
        for ticket in [*self._tickets, *(group.ticket for group in self._buffer.groups())]:
            self._drop(ticket, "tail")
        self._advance()

    def check(self) -> None:
        """Assert the conservation law and that all parts agree; O(live tickets)."""
        counts = self.counts()
        located = counts.leased + counts.buffered + counts.in_batch + counts.trained + sum(counts.dropped.values())
        assert counts.issued == located, f"{counts.issued} tickets issued, but {located} accounted for: {counts}"
        for number, ticket in self._tickets.items():
            places = [(number, member) for member in range(self.settings.num_members)]
            num_open = sum(self._leases.get(place) is not None for place in places)
            stored = sum(result is not None for result in ticket.results)
            assert num_open == ticket.open > 0, f"ticket {number}: {num_open} members open, {ticket.open} counted"
            assert stored + ticket.open + ticket.failed == len(places), f"ticket {number}: members do not add up"
            assert number not in self._buffer, f"ticket {number} is both open and buffered"
            assert all(place in self._waiting for place in places if self._leases.is_waiting(place)), "not queued"
        oldest = min(self._tickets, default=self._issued)
        assert self._buffer.frontier == oldest, f"frontier {self._buffer.frontier}, the oldest open ticket is {oldest}"
        self._leases.check()
        self._buffer.check()

    # --- checkpoints ----------------------------------------------------------------------------

    def state(self) -> bytes:
        """Everything needed to go on in another process; a batch in flight counts as not yet taken."""
        buffered = [*(self._batch or {}).values(), *self._buffer.groups()]
        members = [
            OpenPlace(ticket, member, state)
            for ticket in self._tickets
            for member in range(self.settings.num_members)
            if (state := self._leases.get((ticket, member))) is not None
        ]
        return encode_value(
            LedgerState(
                settings=self.settings,
                issued=self._issued,
                trained=self._trained,
                steps=self._steps,
                exhausted=self._exhausted,
                refills=self._refills,
                dropped=dict(self._dropped),
                events=dict(self.events),
                tickets=self._tickets,
                members=members,
                buffered=buffered,
            )
        )

    def restore(self, data: bytes) -> None:
        """Continue from `state`, in a new ledger whose `draw` continues after `issued` problems.

        Leases stay with their owners: reconcile those that come back, release those that do not. A dataset that was at
        its end is asked again, as it may have been given more epochs. Raises InputError when the settings differ in
        what the bound depends on.
        """
        assert self._issued == 0, "restore into a ledger that has issued tickets"
        state: LedgerState = decode_value(data, LedgerState)
        check_same_settings(state.settings, self.settings)
        self._issued, self._trained, self._steps = state.issued, state.trained, state.steps
        self._refills = state.refills
        self._dropped, self._leases.events = Counter(state.dropped), Counter(state.events)
        self._tickets = state.tickets
        for place in state.members:
            place.state.forget_clock()
            self._leases.open((place.ticket, place.member), 0.0, place.state)
            if not place.state.live:
                self._waiting.add((place.ticket, place.member), self._tickets[place.ticket].required)
        self._buffer = ReplayBuffer(self.settings.window, min(self._tickets, default=self._issued))
        self._buffer.add(state.buffered)
        # A problem drawn just to find out would be missing from the next state: it becomes a ticket at once.
        if state.exhausted and self.admits(self._steps):
            self._issue(0.0)
