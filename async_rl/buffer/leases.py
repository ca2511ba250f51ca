"""Who works on which member: attempts, retries and idempotent results, for training and evaluation alike.

A member is open until it is settled, by a usable trajectory or by too many failures. It may have several attempts
at once (a generator thought dead comes back); the first usable result settles it and the other attempts are cancelled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Literal

import msgspec

from async_rl.buffer.records import MemberLease, Reconciled
from async_rl.protocol import LeaseKey, Problem, ProtocolError, Trajectory

Place = tuple[int, int]
"""(ticket, member)."""


class Outcome(Enum):
    """What an event did to its member."""

    STORED = "stored"
    """A usable result settled it."""
    FAILED = "failed"
    """It is settled without a result."""
    REOPENED = "reopened"
    """It waits for a generator again."""
    RUNNING = "running"
    """Still open, and nothing changed for others: another attempt is running, or it waits already."""
    DUPLICATE = "duplicate"
    """This result was dealt with before."""
    UNKNOWN = "unknown"
    """No such attempt."""


class Holder(msgspec.Struct):
    """One attempt's owner."""

    owner: str
    version: int
    """Version loaded by the owner when it took the lease; its tokens cannot be older."""
    since: float
    overdue: bool = False
    """Taken back at its deadline while its owner still works on it: the slot that it fills is not free."""


class OpenMember(msgspec.Struct):
    """A member without a result yet."""

    attempts: int = 0
    failures: int = 0
    losses: int = 0
    live: dict[int, Holder] = {}
    """Attempt -> who works on it."""
    lost: dict[int, Holder] = {}
    """Attempts taken back from their owner; a late result still counts."""
    waiting_since: float = 0.0

    def forget_clock(self) -> None:
        """After a restart earlier times mean nothing: everything began before any time of the new clock."""
        self.waiting_since = -math.inf
        for holder in (*self.live.values(), *self.lost.values()):
            holder.since = -math.inf


class LeaseBook:
    """All open members and their attempts. It does not decide what is leased next, and it holds no results."""

    def __init__(self, kind: Literal["train", "eval"], max_attempts: int, max_losses: int) -> None:
        self.kind: Literal["train", "eval"] = kind
        self._max_attempts, self._max_losses = max_attempts, max_losses
        self._open: dict[Place, OpenMember] = {}
        self._owners: dict[str, dict[LeaseKey, None]] = {}
        self._overdue: dict[str, dict[LeaseKey, None]] = {}
        self._cancelled: list[tuple[str, LeaseKey]] = []
        self.events: Counter[str] = Counter()

    # --- reading --------------------------------------------------------------------------------

    def outstanding(self, owner: str) -> int:
        """Leases that fill slots of `owner`: those that it holds, and those it still works on past their deadline."""
        return len(self._owners.get(owner, ())) + self.overdue(owner)

    def overdue(self, owner: str) -> int:
        """Leases that `owner` still works on past their deadline; others have them too."""
        return len(self._overdue.get(owner, ()))

    def owners(self) -> tuple[str, ...]:
        """Everyone who holds a lease."""
        return tuple(self._owners)

    def held(self, owner: str) -> tuple[LeaseKey, ...]:
        """The leases of `owner`, oldest ticket first."""
        return tuple(sorted(self._owners.get(owner, ())))

    def get(self, place: Place) -> OpenMember | None:
        """The open member at a place; None once it is settled."""
        return self._open.get(place)

    def is_waiting(self, place: Place) -> bool:
        """Whether a member is open and nobody works on it."""
        member = self._open.get(place)
        return member is not None and not member.live

    def take_cancelled(self) -> list[tuple[str, LeaseKey]]:
        """(owner, lease) pairs whose result is no longer wanted, since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    # --- changes --------------------------------------------------------------------------------

    def open(self, place: Place, now: float, member: OpenMember | None = None) -> None:
        """Open a member, or (`member` given) put it back as it was in a checkpoint."""
        assert place not in self._open, f"member {place} is open already"
        member = OpenMember(waiting_since=now) if member is None else member
        self._open[place] = member
        for attempt, holder in member.live.items():
            self._hold(holder.owner, self._key(place, attempt))
        for attempt, holder in member.lost.items():
            if holder.overdue:
                self._overdue.setdefault(holder.owner, {})[self._key(place, attempt)] = None

    def grant(
        self, place: Place, problem: Problem, owner: str, version: int, now: float, greedy: bool = False
    ) -> MemberLease:
        """Give a waiting member to `owner`."""
        member = self._open[place]
        assert not member.live, f"member {place} is given to {owner} while others hold it"
        member.attempts += 1
        member.live[member.attempts] = Holder(owner, version, now)
        self._hold(owner, self._key(place, member.attempts))
        return MemberLease(*place, member.attempts, problem, member.failures, greedy)

    def finish(self, owner: str, key: LeaseKey, trajectory: Trajectory, now: float) -> Outcome:
        """Take a result of an open member; when STORED the caller keeps the trajectory.

        Raises ProtocolError when its tokens are older than the version that the owner had at the lease; `fail` it then.
        """
        place = (key.ticket, key.member)
        member = self._open[place]
        holder = member.live.get(key.attempt) or member.lost.get(key.attempt)
        if holder is None:
            return Outcome.DUPLICATE if 1 <= key.attempt <= member.attempts else Outcome.UNKNOWN
        if holder.owner != owner:
            return Outcome.UNKNOWN
        _check_versions(owner, key, trajectory, holder.version)
        self.events["late"] += key.attempt in member.lost
        if trajectory.status != "failed":
            self.close(place, answered=key.attempt)
            return Outcome.STORED
        return self.fail(key, now)

    def fail(self, key: LeaseKey, now: float) -> Outcome:
        """An attempt of an open member gave nothing usable: one of the failures that a member is allowed."""
        self._open[key.ticket, key.member].failures += 1
        self.events["failed_attempts"] += 1
        return self._end_attempt((key.ticket, key.member), key.attempt, now)

    def expire(self, timeout_s: float, now: float) -> list[tuple[str, LeaseKey, Outcome]]:
        """Open again what was held for `timeout_s`, doubled for each earlier loss of its member; (owner, lease, ...).

        Its owner may go on: a late result still counts. Leases of before a restart begin anew at the first look.
        """
        ended = []
        for place, member in list(self._open.items()):
            for attempt, holder in list(member.live.items()):
                holder.since = now if holder.since == -math.inf else holder.since
                if now - holder.since >= timeout_s * 2**member.losses:
                    ended.append((holder.owner, self._key(place, attempt), self._expire(place, attempt, now)))
        return ended

    def _expire(self, place: Place, attempt: int, now: float) -> Outcome:
        member, key = self._open[place], self._key(place, attempt)
        holder = member.live[attempt]
        member.losses += 1
        self.events["expired_leases"] += 1
        outcome = self._take_back(key, now)
        if outcome is Outcome.FAILED:
            self._cancel(holder.owner, key)
        else:
            holder.overdue = True
            self._overdue.setdefault(holder.owner, {})[key] = None
        return outcome

    def release(self, owner: str, now: float) -> list[tuple[LeaseKey, Outcome]]:
        """Take every lease of a dead owner back; its results may still come."""
        self._not_overdue(owner, tuple(self._overdue.get(owner, ())))
        ended = []
        for key in self.held(owner):
            self._open[key.ticket, key.member].losses += 1
            self.events["lost_leases"] += 1
            ended.append((key, self._take_back(key, now)))
        return ended

    def give_back(self, owner: str, keys: Iterable[LeaseKey], now: float) -> list[tuple[LeaseKey, Outcome]]:
        """Take back leases that a living owner returns or never received; keys that it does not hold are ignored."""
        mine = self._owners.get(owner, {})
        keys = dict.fromkeys(keys)
        self._not_overdue(owner, keys)
        held = [key for key in keys if key in mine]
        self.events["returned_leases"] += len(held)
        return [(key, self._take_back(key, now)) for key in held]

    def reconcile(self, owner: str, holding: Iterable[LeaseKey], sent_before: float) -> Reconciled:
        """Compare with what `owner` says it holds; adopts at once, leaves `lost` to the caller's `give_back`.

        A lease given out after `sent_before` may still be on its way and is not missed.
        """
        reported = {key for key in holding if key.kind == self.kind}
        overdue = self._overdue.get(owner, {})
        self._not_overdue(owner, [key for key in overdue if key not in reported])
        adopted: list[LeaseKey] = []
        unwanted: list[LeaseKey] = []
        for key in sorted(reported.difference(self._owners.get(owner, ()), overdue)):
            (adopted if self._adopt(owner, key) else unwanted).append(key)
        lost = [key for key in self.held(owner) if key not in reported and self._holder(key).since < sent_before]
        self.events["adopted_leases"] += len(adopted)
        self.events["undelivered_leases"] += len(lost)
        return Reconciled(lost=tuple(lost), adopted=tuple(adopted), unwanted=tuple(unwanted))

    def close(self, place: Place, answered: int | None = None) -> None:
        """Settle a member: every attempt but the answered one is cancelled. Closing twice does nothing."""
        member = self._open.pop(place, None)
        if member is None:
            return
        for attempt, holder in member.live.items():
            key = self._key(place, attempt)
            self._let_go(holder.owner, key)
            if attempt != answered:
                self._cancel(holder.owner, key)
        for attempt, holder in member.lost.items():
            if holder.overdue:
                key = self._key(place, attempt)
                self._drop_overdue(holder, key)
                if attempt != answered:
                    self._cancel(holder.owner, key)

    # --- parts ----------------------------------------------------------------------------------

    def _key(self, place: Place, attempt: int) -> LeaseKey:
        return LeaseKey(kind=self.kind, ticket=place[0], member=place[1], attempt=attempt)

    def _holder(self, key: LeaseKey) -> Holder:
        return self._open[key.ticket, key.member].live[key.attempt]

    def _hold(self, owner: str, key: LeaseKey) -> None:
        self._owners.setdefault(owner, {})[key] = None

    def _let_go(self, owner: str, key: LeaseKey) -> None:
        mine = self._owners[owner]
        del mine[key]
        if not mine:
            del self._owners[owner]

    def _cancel(self, owner: str, key: LeaseKey) -> None:
        self._cancelled.append((owner, key))
        self.events["cancelled_leases"] += 1

    def _not_overdue(self, owner: str, keys: Iterable[LeaseKey]) -> None:
        """The owner does not work on these any more; keys that are not overdue are ignored."""
        for key in [key for key in keys if key in self._overdue.get(owner, ())]:
            self._drop_overdue(self._open[key.ticket, key.member].lost[key.attempt], key)

    def _drop_overdue(self, holder: Holder, key: LeaseKey) -> None:
        holder.overdue = False
        mine = self._overdue[holder.owner]
        del mine[key]
        if not mine:
            del self._overdue[holder.owner]

    def _take_back(self, key: LeaseKey, now: float) -> Outcome:
        member, holder = self._open[key.ticket, key.member], self._holder(key)
        outcome = self._end_attempt((key.ticket, key.member), key.attempt, now)
        if outcome is not Outcome.FAILED:
            member.lost[key.attempt] = holder
        return outcome

    def _end_attempt(self, place: Place, attempt: int, now: float) -> Outcome:
        """An attempt ended without a usable result; the member waits again, or is settled as failed."""
        member = self._open[place]
        late = member.lost.pop(attempt, None)
        if late is not None and late.overdue:
            self._drop_overdue(late, self._key(place, attempt))
        holder = member.live.pop(attempt, None)
        if holder is not None:
            self._let_go(holder.owner, self._key(place, attempt))
        if member.live:
            return Outcome.RUNNING
        if member.failures >= self._max_attempts or member.losses >= self._max_losses:
            self.events["failed_members"] += 1
            self.close(place)
            return Outcome.FAILED
        if holder is None:
            return Outcome.RUNNING
        member.waiting_since = now
        return Outcome.REOPENED

    def _adopt(self, owner: str, key: LeaseKey) -> bool:
        """Give a lost attempt back to its owner, if its member is still open."""
        member = self._open.get((key.ticket, key.member))
        holder = None if member is None else member.lost.get(key.attempt)
        if member is None or holder is None or holder.owner != owner:
            return False
        member.live[key.attempt] = member.lost.pop(key.attempt)
        self._hold(owner, key)
        return True

    def check(self) -> None:
        """Assert that the index of owners and the open members say the same."""
        indexed = {(owner, key) for owner, keys in self._owners.items() for key in keys}
        listed = {(h.owner, self._key(p, a)) for p, m in self._open.items() for a, h in m.live.items()}
        assert indexed == listed, f"leases differ: {indexed ^ listed}"
        assert all(self._owners.values()), "an owner without leases is listed"
        overdue = {(owner, key) for owner, keys in self._overdue.items() for key in keys}
        late = {(h.owner, self._key(p, a)) for p, m in self._open.items() for a, h in m.lost.items() if h.overdue}
        assert overdue == late, f"overdue leases differ: {overdue ^ late}"
        for place, member in self._open.items():
            assert member.live.keys().isdisjoint(member.lost), f"member {place}: an attempt is both held and lost"
            assert all(1 <= a <= member.attempts for a in (*member.live, *member.lost)), f"member {place}: attempts"


def _check_versions(owner: str, key: LeaseKey, trajectory: Trajectory, leased_at: int) -> None:
    """The owner had `leased_at` loaded when it took the lease, so older tokens mean that its engine was stale."""
    oldest = min((span.version for span in trajectory.versions), default=leased_at)
    if oldest < leased_at:
        raise ProtocolError(
            f"generator {owner!r} returned ticket {key.ticket} member {key.member} with tokens of version {oldest}, "
            f"but it had version {leased_at} loaded when it took the lease; restart it"
        )
