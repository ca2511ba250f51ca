"""Who gets which work: turns members of the ledger and of evaluations into leases and spreads them over free slots."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from async_rl import protocol as p
from async_rl.buffer import Ledger, MemberLease
from async_rl.config import Config
from async_rl.evaluation import Evaluations
from async_rl.membership import Member


def member_seed(run_seed: int, kind: Literal["train", "eval"], ticket: int, member: int, failures: int = 0) -> int:
    """Seed in [0, 2^31) of one member after so many failed results: its own, the same whenever the run is repeated.

    Not of the attempt: whoever crashes ends long completions and spares short ones, so that a lost lease must sample
    the same completion again. Another one in its place would be shorter on average.
    """
    text = f"{run_seed}/{kind}/{ticket}/{member}/{failures + 1}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def lease_timeout_s(config: Config) -> float:
    """Deadline of a lease: in time to save a run that nothing else would save from run.stall_timeout_s."""
    given = config.generator.lease_timeout_s
    return config.run.stall_timeout_s / 2 if given is None else given


class LeaseDeadlines:
    """Opens leases past their deadline to others, and finds members that give nothing back at all."""

    def __init__(self, timeout_s: float, ledger: Ledger, evaluations: Evaluations) -> None:
        self.timeout_s = timeout_s
        self._ledger, self._evaluations = ledger, evaluations
        self._look_at = -math.inf
        self._stuck_since: dict[str, float] = {}
        """When a lease of a member expired that has sent no result since."""

    def tick(self, members: Sequence[Member], now: float) -> tuple[int, list[tuple[str, str]]]:
        """(leases opened, (name, reason) of each member to evict); looks at them a few times in each timeout."""
        if now < self._look_at:
            return 0, []
        self._look_at = now + min(1.0, self.timeout_s / 4)
        expired = [*self._ledger.expire(self.timeout_s, now), *self._evaluations.expire(self.timeout_s, now)]
        for owner, _ in expired:
            self._stuck_since.setdefault(owner, now)
        last_results = {member.name: member.last_result for member in members}
        for name, since in list(self._stuck_since.items()):
            if name not in last_results or (last_results[name] or -math.inf) >= since:
                del self._stuck_since[name]
        reason = f"no result for {self.timeout_s:g} s after leases of its had expired (generator.lease_timeout_s)"
        hung = [name for name, since in self._stuck_since.items() if now - since >= self.timeout_s]
        return len(expired), [(name, reason) for name in hung]


class Leasing:
    """Spreads work: the member with most free slots first, a group's worth at a time, evaluation before training."""

    def __init__(self, config: Config, ledger: Ledger, evaluations: Evaluations, stop_ids: tuple[int, ...]) -> None:
        self.config = config
        self.ledger = ledger
        self.evaluations = evaluations
        self.stop_ids = stop_ids

    def free(self, member: Member) -> int:
        """Leases that a member takes now."""
        if not member.accepting:
            return 0
        held = self.ledger.outstanding(member.name) + self.evaluations.outstanding(member.name)
        return max(0, member.slots + member.prefetch - held)

    def has_work(self, members: Sequence[Member]) -> bool:
        """Whether `hand_out` could give one of these members anything; far cheaper than to ask for each."""
        newest = max(members, key=lambda member: member.version or 0, default=None)
        if newest is None:
            return False
        assert newest.version is not None, "only members with weights get leases"
        return self.evaluations.busy or self.ledger.has_work(newest.name, newest.version)

    def hand_out(self, members: Sequence[Member], now: float) -> Iterator[tuple[Member, list[p.Lease]]]:
        """(member, leases) until slots or work are used up."""
        granted: dict[str, list[p.Lease]] = defaultdict(list)
        chunk = self.ledger.settings.num_members
        queue = [(-free, m.order, m) for m in members if (free := self.free(m)) > 0]
        heapq.heapify(queue)
        while queue:
            free, order, member = heapq.heappop(queue)
            leases = self._grant(member, min(-free, chunk), now)
            if leases:
                granted[member.name].extend(leases)
                if free + len(leases) < 0:
                    heapq.heappush(queue, (free + len(leases), order, member))
        for member in members:
            if member.name in granted:
                yield member, granted[member.name]

    def _grant(self, member: Member, slots: int, now: float) -> list[p.Lease]:
        assert member.version is not None, "only members with weights get leases"
        evals = self.evaluations.lease(member.name, member.version, slots, member.slots, now)
        leases = [self._lease("eval", lease) for lease in evals]
        trains = self.ledger.lease(member.name, member.version, slots - len(leases), now) if slots > len(leases) else []
        return leases + [self._lease("train", lease) for lease in trains]

    def _lease(self, kind: Literal["train", "eval"], lease: MemberLease) -> p.Lease:
        sampling = self.config.sampling
        temperature = sampling.temperature if kind == "train" else self.config.evaluation.temperature
        if lease.greedy:
            temperature = 0.0
        return p.Lease(
            kind=kind,
            ticket=lease.ticket,
            member=lease.member,
            attempt=lease.attempt,
            problem=lease.problem,
            sampling=p.SamplingParams(
                max_tokens=sampling.max_completion_tokens,
                temperature=temperature,
                seed=member_seed(self.config.run.seed, kind, lease.ticket, lease.member, lease.failures),
                stop_ids=self.stop_ids,
            ),
        )
