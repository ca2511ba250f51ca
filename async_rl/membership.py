"""Who is in the run: generators that join, leave, restart and fall silent, and the broadcast epoch that they form.

A pure state machine; `now` is passed in, in seconds. A generator has a name, kept across its restarts, and an
incarnation, new for every process. The newest incarnation of a name is the member; the ones before it are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from async_rl.protocol import GeneratorStats, Heartbeat, Hello

MemberState = Literal["joining", "loading", "active", "gone"]
"""joining: said hello; loading: takes its first weights; active: has weights of this run, may lease; gone: left."""
GONE_KEPT = 64
"""Members remembered after they went, for people."""
REPLACED_KEPT = 1024
"""Incarnations remembered as replaced, so that a process cut off for long cannot take its name back."""
MAX_EVICTIONS = 3
"""Evictions without a result in between after which a process is not taken back: it hangs, and would come forever."""


@dataclass
class Member:
    """One generator process."""

    name: str
    incarnation: str
    slots: int
    receivers: int
    engine: str
    host: str
    pid: int
    joined: float
    """Time of the first hello of this incarnation."""
    order: int
    """Place in the order of joining; it decides ranks."""
    last_seen: float
    state: MemberState = "joining"
    version: int | None = None
    """Version loaded; None until the first load in this run."""
    accepting: bool = True
    prefetch: int = 0
    """Leases that it takes beyond its slots."""
    last_result: float | None = None
    """When it last sent a finished member."""
    stats: GeneratorStats = field(default_factory=GeneratorStats)
    gone_reason: str | None = None


@dataclass(frozen=True)
class Joined:
    """Answer to a hello that was accepted."""

    member: Member
    replaced: Member | None
    """The member of the same name that this one takes over from; its leases are to be released."""
    reconnected: bool
    """The same process as before: its weights, leases and place in the epoch stand."""


@dataclass(frozen=True)
class EpochPlan:
    """A broadcast group: the learner at rank 0, then `receivers` ranks for each member in order of joining."""

    epoch: int
    ranks: dict[str, int]
    """First rank of each member."""
    size: int


class Epochs:
    """Numbers broadcast groups and knows which one stands, if any."""

    def __init__(self) -> None:
        self._last = 0
        self.current: EpochPlan | None = None
        """The group that stands; None: there is none, or it is broken."""

    def needs_new(self, names: Iterable[str]) -> bool:
        """Whether these receivers are not exactly the group that stands."""
        return self.current is None or self.current.ranks.keys() != set(names)

    def assign_ranks(self, members: Sequence[tuple[str, int]]) -> EpochPlan:
        """The plan of the next epoch for (name, receivers) in order of joining; it is current from now on."""
        assert all(receivers > 0 for _, receivers in members), f"a member that receives nothing has no rank: {members}"
        self._last += 1
        ranks, size = {}, 1
        for name, receivers in members:
            ranks[name] = size
            size += receivers
        self.current = EpochPlan(self._last, ranks, size)
        return self.current

    def lost(self, name: str) -> None:
        """A member went: a group that it stands in is broken."""
        if self.current is not None and name in self.current.ranks:
            self.current = None

    def broken(self) -> None:
        """The group that stands cannot be used again."""
        self.current = None


class Membership:
    """All members, by name."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.epochs = Epochs()
        self.gone: deque[Member] = deque(maxlen=GONE_KEPT)
        self._members: dict[str, Member] = {}
        self._latest: dict[str, str] = {}
        self._replaced: dict[tuple[str, str], None] = {}
        self._evictions: dict[tuple[str, str], int] = {}
        self._num_joined = 0
        self.num_evicted = 0

    # --- reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str) -> Member | None:
        """The member of that name, if there is one."""
        return self._members.get(name)

    def members(self) -> list[Member]:
        """Everyone present, in order of joining."""
        return list(self._members.values())  # Whoever joins, also again, comes last.

    def active(self) -> list[Member]:
        """Those that have weights of this run, in order of joining."""
        return [member for member in self._members.values() if member.state == "active"]

    def is_current(self, name: str, incarnation: str) -> bool:
        """Whether messages of this process count: it is present and nobody took its name over."""
        member = self._members.get(name)
        return member is not None and member.incarnation == incarnation

    def expired(self, now: float) -> list[str]:
        """Names of members silent for longer than the heartbeat timeout."""
        return [m.name for m in self._members.values() if now - m.last_seen > self.heartbeat_timeout_s]

    def needs_new_epoch(self) -> bool:
        """Whether the active receivers are not exactly the broadcast group that stands."""
        return self.epochs.needs_new(m.name for m in self.active() if m.receivers)

    # --- changes --------------------------------------------------------------------------------

    def hello(self, hello: Hello, now: float) -> Joined | str:
        """A process introduces itself, first or again; a string is the reason why it is refused.

        A new incarnation takes its name over at once, even from a member that was heard a moment ago: a generator
        that crashed and was restarted must not wait for its own timeout. The process it replaced is refused from
        then on, so two that share a name do not take it from each other forever.
        """
        if (hello.name, hello.incarnation) in self._replaced:
            return f"the name {hello.name!r} was taken over by a newer process; give each generator its own --name"
        before = self._members.get(hello.name)
        if before is not None and before.incarnation == hello.incarnation:
            before.last_seen, before.slots, before.prefetch = now, hello.slots, hello.prefetch
            return Joined(before, replaced=None, reconnected=True)
        self._remember(hello.name, hello.incarnation)
        if before is not None:
            self.leave(before.name, f"replaced by process {hello.pid} on {hello.host}")
        member = Member(
            name=hello.name,
            incarnation=hello.incarnation,
            slots=hello.slots,
            prefetch=hello.prefetch,
            receivers=hello.receivers,
            engine=hello.engine,
            host=hello.host,
            pid=hello.pid,
            joined=now,
            order=self._num_joined,
            last_seen=now,
        )
        self._num_joined += 1
        self._members[hello.name] = member
        return Joined(member, replaced=before, reconnected=False)

    def heartbeat(self, name: str, heartbeat: Heartbeat, now: float) -> bool:
        """A sign of life with news; False: no such member, it should say hello."""
        member = self._members.get(name)
        if member is None:
            return False
        member.last_seen, member.accepting, member.stats = now, heartbeat.accepting, heartbeat.stats
        return True

    def leaving(self, name: str) -> None:
        """The member gives its leases back and wants no other until a heartbeat says so."""
        self._members[name].accepting = False

    def seen(self, name: str, now: float) -> bool:
        """Any other message is a sign of life too; False: no such member."""
        member = self._members.get(name)
        if member is None:
            return False
        member.last_seen = now
        return True

    def loading(self, name: str) -> None:
        """The member was told to load its first weights."""
        member = self._members[name]
        if member.state == "joining":
            member.state = "loading"

    def loaded(self, name: str, version: int) -> None:
        """The member samples with `version` from now on."""
        member = self._members[name]
        member.version, member.state = version, "active"

    def leave(self, name: str, reason: str) -> Member | None:
        """A member is gone (left, silent, evicted, replaced): it gets no lease and its broadcast group is broken."""
        member = self._members.pop(name, None)
        if member is None:
            return None
        member.state, member.gone_reason = "gone", reason
        self.epochs.lost(name)
        self.gone.append(member)
        return member

    def delivered(self, name: str, now: float) -> None:
        """The member sent a finished result: it works."""
        member = self._members[name]
        member.last_result = now
        self._evictions.pop((name, member.incarnation), None)

    def evict(self, name: str, reason: str) -> Member | None:
        """A member is put out; it may come back, unless it is `worn_out`."""
        member = self.leave(name, f"evicted: {reason}")
        if member is not None:
            self.num_evicted += 1
            key = (name, member.incarnation)
            self._evictions[key] = self._evictions.pop(key, 0) + 1
            while len(self._evictions) > REPLACED_KEPT:
                del self._evictions[next(iter(self._evictions))]
        return member

    def worn_out(self, name: str, incarnation: str) -> str | None:
        """Why a process is not taken back; None: it may come. A new process of that name may always."""
        if self._evictions.get((name, incarnation), 0) < MAX_EVICTIONS:
            return None
        return f"it was evicted {MAX_EVICTIONS} times in a row without a result in between; a new process is welcome"

    def _remember(self, name: str, incarnation: str) -> None:
        """The newest process of a name replaces the one before it, even if that one had left by then."""
        before = self._latest.pop(name, incarnation)
        self._latest[name] = incarnation
        if before != incarnation:
            self._replaced[name, before] = None
        while len(self._replaced) > REPLACED_KEPT:
            del self._replaced[next(iter(self._replaced))]
        while len(self._latest) > max(REPLACED_KEPT, len(self._members) + 1):
            del self._latest[next(iter(self._latest))]
