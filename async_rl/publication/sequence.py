"""The sequence of rounds: one after the other, and the joiners in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_rl.membership import Epochs, Member
from async_rl.publication.actions import (
    Action,
    Done,
    Evict,
    PublicationSettings,
    Report,
    SendRelabel,
    SendSnapshot,
    WriteSnapshot,
)
from async_rl.publication.round import Publication


@dataclass(frozen=True)
class _Joiner:
    """A member outside of rounds that needs the last published version."""

    name: str
    receivers: int
    failures: int = 0


@dataclass(frozen=True)
class _SnapshotLoad:
    """A joiner that was told to load it, or will be when the file is there."""

    joiner: _Joiner
    version: int
    checksum: str
    deadline: float
    """Of the learner until the file is written, of the joiner from then on."""
    told: bool


class Publications:
    """One round after the other, and the joiners in between: they load a snapshot, then enter the next round."""

    def __init__(self, settings: PublicationSettings, epochs: Epochs) -> None:
        self._settings, self._epochs = settings, epochs
        self.round: Publication | None = None
        """The round in flight."""
        self.published: int | None = None
        """Version of the last round that is over; None before the first."""
        self.events: Counter[str] = Counter()
        self._checksum = ""
        self._loads: dict[str, _SnapshotLoad] = {}
        self._waiting: dict[str, _Joiner] = {}
        """Those that wait for the end of the round in flight."""

    def start(self, version: int, checksum: str, members: Sequence[Member], now: float) -> list[Action]:
        """Begin a round with the active members; one at a time, versions rising."""
        assert self.round is None, f"version {self.round and self.round.version} is still being published"
        assert self.published is None or version > self.published, f"version {version} after {self.published}"
        for member in members:
            self._waiting.pop(member.name, None)
            if (load := self._loads.get(member.name)) is not None and not load.told:
                del self._loads[member.name]  # Told after the round, it would go back to the version before.
        self.round = Publication(self._settings, self._epochs, version, checksum, now)
        return self._handle(self.round.start(members, now), now)

    def joiner(self, name: str, receivers: int, now: float) -> list[Action]:
        """A member without weights of this run: it loads the last published version, after the round in flight."""
        return self._load(_Joiner(name, receivers), now)

    def epoch_joined(self, name: str, epoch: int, error: str | None, now: float) -> list[Action]:
        """See `Publication.epoch_joined`."""
        return self._handle(self.round.epoch_joined(name, epoch, error, now) if self.round else [], now)

    def received(self, name: str, epoch: int, checksum: str | None, error: str | None, now: float) -> list[Action]:
        """See `Publication.received`."""
        return self._handle(self.round.received(name, epoch, checksum, error, now) if self.round else [], now)

    def sender_joined(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """See `Publication.sender_joined`."""
        return self._handle(self.round.sender_joined(epoch, error, now) if self.round else [], now)

    def sender_sent(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """See `Publication.sender_sent`."""
        return self._handle(self.round.sender_sent(epoch, error, now) if self.round else [], now)

    def snapshot_written(self, name: str, version: int, error: str | None, now: float) -> list[Action]:
        """The file that a joiner waits for is there, or could not be written; its time to load begins now."""
        load = self._loads.get(name)
        if load is None or load.version != version or load.told:
            return []
        if error is not None:
            del self._loads[name]
            return self._handle(self._failed(load.joiner, f"the learner could not write it: {error}", now), now)
        self._loads[name] = replace(load, told=True, deadline=now + self._settings.patience_s)
        return [SendSnapshot(name, version, self._settings.deadline_s)]

    def loaded(self, name: str, version: int, checksum: str | None, error: str | None, now: float) -> list[Action]:
        """A member loaded a version, by broadcast, snapshot or label, or could not."""
        if self.round is not None and version == self.round.version:
            return self._handle(self.round.loaded(name, checksum, error, now), now)
        load = self._loads.get(name)
        if load is None or load.version != version:
            return []
        del self._loads[name]
        if error is not None:
            return self._handle(self._failed(load.joiner, error, now), now)
        if load.joiner.receivers and checksum != load.checksum:
            reason = f"loaded checksum {checksum} of version {version}, the learner wrote {load.checksum}"
            return self._handle([Evict(name, reason, alarm=True)], now)
        catches_up = name in self.round if self.round is not None else version == self.published
        return [] if catches_up else self._load(_Joiner(name, load.joiner.receivers), now)

    def member_gone(self, name: str, reason: str, now: float) -> list[Action]:
        """A member left, fell silent, was replaced or evicted."""
        self._loads.pop(name, None)
        self._waiting.pop(name, None)
        return self._handle(self.round.member_gone(name, reason, now) if self.round else [], now)

    def tick(self, now: float) -> list[Action]:
        """Time passes."""
        actions = self._handle(self.round.tick(now) if self.round else [], now)
        for name in [name for name, load in self._loads.items() if now >= load.deadline]:
            actions += self._handle([Evict(name, self._overdue(self._loads.pop(name)))], now)
        return actions

    def awaited(self) -> set[str]:
        """Members whose answer is waited for: to the round in flight, or to a snapshot."""
        return set(self._loads) | (self.round.awaited() if self.round else set())

    def describe(self, now: float) -> str:
        """One sentence: what is waited for."""
        text = self.round.describe(now) if self.round else "no publication is under way"
        for told, what in ((False, "waiting for the file of a snapshot"), (True, "loading a snapshot")):
            if names := sorted(name for name, load in self._loads.items() if load.told is told):
                text += f"; {what}: {', '.join(names)}"
        return text

    def longest_wait_s(self, num_members: int) -> float:
        """Seconds within which a round with so many members ends, and the file for those who joined is written."""
        return self._settings.longest_round_s(num_members) + self._settings.write_patience_s

    # --- parts ----------------------------------------------------------------------------------

    def _load(self, joiner: _Joiner, now: float) -> list[Action]:
        if self.round is not None or self.published is None:
            self._waiting[joiner.name] = joiner
            return []
        settings, is_label = self._settings, not joiner.receivers
        deadline = now + (settings.patience_s if is_label else settings.write_patience_s)
        self._loads[joiner.name] = _SnapshotLoad(joiner, self.published, self._checksum, deadline, told=is_label)
        if is_label:
            return [SendRelabel(self.published, (joiner.name,))]
        return [WriteSnapshot(joiner.name, self.published)]

    def _overdue(self, load: _SnapshotLoad) -> str:
        settings, what = self._settings, f"the snapshot of version {load.version}"
        if load.told:
            return f"did not load {what} within {settings.patience_s:g} s"
        return f"the learner did not write {what} within {settings.write_patience_s:g} s; see weights.deadline_s"

    def _failed(self, joiner: _Joiner, error: str, now: float) -> list[Action]:
        """A live member could not load its snapshot: again with the newest, or out."""
        failures = joiner.failures + 1
        if failures > self._settings.max_retries:
            return [Evict(joiner.name, f"could not load a snapshot {failures} times, last: {error}")]
        return self._load(replace(joiner, failures=failures), now)

    def _handle(self, actions: list[Action], now: float) -> list[Action]:
        """Count, forget the evicted, and begin what waited for the end of a round."""
        handled: list[Action] = []
        while actions:
            action = actions.pop(0)
            handled.append(action)
            if isinstance(action, Evict):
                actions.extend(self._forget(action, now))
            elif isinstance(action, Done):
                actions.extend(self._end_round(action.report, now))
        return handled

    def _forget(self, evicted: Evict, now: float) -> list[Action]:
        self.events["evicted"] += 1
        self.events["alarms"] += evicted.alarm
        self._loads.pop(evicted.name, None)
        self._waiting.pop(evicted.name, None)
        return self.round.member_gone(evicted.name, evicted.reason, now) if self.round else []

    def _end_round(self, report: Report, now: float) -> list[Action]:
        assert self.round is not None, "a round that is over was in flight"
        self.events["rounds"] += 1
        self.events["retries"] += max(report.tries - 1, 0)
        self.published, self._checksum, self.round = self.round.version, self.round.checksum, None
        waiting, self._waiting = self._waiting, {}
        return [action for joiner in waiting.values() for action in self._load(joiner, now)]
