"""One round of publication: a version reaches every member, or the member is evicted with a reason.

Events come in as method calls with `now` in seconds, actions go out as data. A round moves its receivers through join
(build the broadcast group) and transfer (send the bytes); each that has received loads by itself. A stage ends when
everyone in it has answered or its deadline has passed. Who was silent is evicted; if anything went wrong, those without
the bytes try again in a group of their own under a new epoch number, while the others load.

Every stage has a deadline, and a repeated one either has fewer members or uses up a retry of each: a round of n members
ends within (n + max_retries + 1) x 2 + 1 stages of at most deadline_s + grace_s, whatever comes or fails to come
(`PublicationSettings.longest_round_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from async_rl.membership import EpochPlan, Epochs, Member
from async_rl.publication.actions import (
    Abandon,
    Action,
    Done,
    Evict,
    JoinGroup,
    PublicationSettings,
    Report,
    SendRelabel,
    SendWeights,
)


@dataclass
class _Target:
    """A member's way through the round."""

    name: str
    receivers: int
    state: Literal["pending", "loading", "loaded"] = "pending"
    failures: int = 0
    load_by: float = 0.0


@dataclass
class _Stage:
    """One stage of one try."""

    kind: Literal["join", "transfer"]
    plan: EpochPlan
    began: float
    waiting: set[str]
    sender_waits: bool = True
    errors: dict[str, str] = field(default_factory=dict)
    sender_error: str | None = None
    abandoned: bool = False

    @property
    def epoch(self) -> int:
        return self.plan.epoch


class Publication:
    """One version on its way to the members of the moment."""

    def __init__(self, settings: PublicationSettings, epochs: Epochs, version: int, checksum: str, now: float) -> None:
        self.version = version
        self.checksum = checksum
        self._settings, self._epochs = settings, epochs
        self._targets: dict[str, _Target] = {}
        self._stage: _Stage | None = None
        self._loaded: list[str] = []
        self._evicted: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._seconds = {"join": 0.0, "transfer": 0.0}
        self._tries = 0
        self._sender_error: str | None = None
        self._began = self._transferred = now
        self._actions: list[Action] = []
        self.report: Report | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def start(self, members: Sequence[Member], now: float) -> list[Action]:
        """Begin with these members, in order of joining."""
        self._targets = {m.name: _Target(m.name, m.receivers) for m in members}
        labels = [target for target in self._targets.values() if not target.receivers]
        for target in labels:
            self._begin_load(target, now)
        if labels:
            self._actions.append(SendRelabel(self.version, tuple(target.name for target in labels)))
        self._try(now)
        return self._flush(now)

    # --- events ---------------------------------------------------------------------------------

    def epoch_joined(self, name: str, epoch: int, error: str | None, now: float) -> list[Action]:
        """A member stands in the group, or could not join it."""
        return self._answer("join", name, epoch, error, now)

    def received(self, name: str, epoch: int, checksum: str | None, error: str | None, now: float) -> list[Action]:
        """A member has all bytes, or could not get them."""
        target = self._targets.get(name)
        if not self._expects("transfer", name, epoch) or target is None:
            return []
        if error is None and checksum != self.checksum:
            self._evict(name, f"received checksum {checksum}, the learner sent {self.checksum}", alarm=True)
        elif error is None:
            self._begin_load(target, now)
        return self._answer("transfer", name, epoch, error, now)

    def sender_joined(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """The learner's sender stands in the group, or could not join it."""
        return self._sender_answer("join", epoch, error, now)

    def sender_sent(self, epoch: int, error: str | None, now: float) -> list[Action]:
        """The learner's sender has sent everything, or could not."""
        return self._sender_answer("transfer", epoch, error, now)

    def loaded(self, name: str, checksum: str | None, error: str | None, now: float) -> list[Action]:
        """A member samples with this version, or could not load it."""
        target = self._targets.get(name)
        if target is None or target.state == "loaded":
            return []
        if error is not None:
            self._evict(name, f"could not load version {self.version}: {error}")
        elif checksum is not None and target.receivers and checksum != self.checksum:
            self._evict(name, f"loaded checksum {checksum}, the learner sent {self.checksum}", alarm=True)
        else:
            target.state = "loaded"
            self._loaded.append(name)
            if self._stage is not None:
                self._stage.waiting.discard(name)
        return self._flush(now)

    def member_gone(self, name: str, reason: str, now: float) -> list[Action]:
        """A member left, fell silent, was replaced or cannot be reached.

        If the stage waits for it, it has failed now: the sender need not wait for the deadline to find out.
        """
        target = self._targets.get(name)
        if target is None:
            return []
        stage = self._stage
        if stage is not None and stage.sender_waits and not stage.abandoned and name in stage.waiting:
            stage.abandoned = True
            self._actions.append(Abandon(stage.epoch, f"{name} is gone: {reason}"))
        self._remove(name)
        if target.state != "loaded":
            self._gone[name] = reason
        return self._flush(now)

    def tick(self, now: float) -> list[Action]:
        """Time passes: whoever is past its deadline is evicted."""
        stage, patience = self._stage, self._settings.patience_s
        if stage is not None and now >= stage.began + patience:
            verb = "join" if stage.kind == "join" else "receive"
            if stage.sender_waits:
                stage.sender_waits, stage.sender_error = False, f"the sender was silent for {patience:g} s"
            for name in sorted(stage.waiting):
                self._evict(name, f"did not {verb} version {self.version} in epoch {stage.epoch} within {patience:g} s")
        for target in list(self._targets.values()):
            if target.state == "loading" and now >= target.load_by:
                self._evict(target.name, f"did not load version {self.version} within {patience:g} s")
        return self._flush(now)

    def awaited(self) -> set[str]:
        """Members whose answer the round waits for."""
        loading = {target.name for target in self._targets.values() if target.state == "loading"}
        return loading | (self._stage.waiting if self._stage is not None else set())

    def describe(self, now: float) -> str:
        """One sentence: what the round waits for."""
        parts = []
        if self._stage is not None:
            missing = [*sorted(self._stage.waiting), *(["the learner's sender"] if self._stage.sender_waits else [])]
            since = now - self._stage.began
            parts.append(f"{self._stage.kind} in epoch {self._stage.epoch} since {since:.1f} s: {', '.join(missing)}")
        loading = sorted(target.name for target in self._targets.values() if target.state == "loading")
        if loading:
            parts.append(f"loading: {', '.join(loading)}")
        return f"publication of version {self.version} waits for {'; '.join(parts) or 'nothing'}"

    # --- parts ----------------------------------------------------------------------------------

    def _expects(self, kind: str, name: str, epoch: int) -> bool:
        stage = self._stage
        return stage is not None and (stage.kind, stage.epoch) == (kind, epoch) and name in stage.waiting

    def _answer(self, kind: str, name: str, epoch: int, error: str | None, now: float) -> list[Action]:
        if self._stage is not None and self._expects(kind, name, epoch):
            self._stage.waiting.discard(name)
            if error is not None:
                self._stage.errors[name] = error
        return self._flush(now)

    def _sender_answer(self, kind: str, epoch: int, error: str | None, now: float) -> list[Action]:
        stage = self._stage
        if stage is not None and (stage.kind, stage.epoch) == (kind, epoch) and stage.sender_waits:
            stage.sender_waits, stage.sender_error = False, error
        return self._flush(now)

    def _pending(self) -> list[_Target]:
        return [target for target in self._targets.values() if target.state == "pending"]

    def _begin_load(self, target: _Target, now: float) -> None:
        target.state, target.load_by = "loading", now + self._settings.patience_s

    def _try(self, now: float) -> None:
        """Begin a try with everyone who lacks the bytes, in the group that stands if it is exactly theirs."""
        pending = self._pending()
        if not pending:
            return
        self._tries += 1
        if not self._epochs.needs_new(target.name for target in pending):
            assert self._epochs.current is not None, "a group that stands has a plan"
            return self._transfer(self._epochs.current, now)
        plan = self._epochs.assign_ranks([(target.name, target.receivers) for target in pending])
        self._stage = _Stage("join", plan, now, set(plan.ranks))
        self._actions.append(JoinGroup(plan, self._settings.deadline_s))

    def _transfer(self, plan: EpochPlan, now: float) -> None:
        self._stage = _Stage("transfer", plan, now, set(plan.ranks))
        self._actions.append(SendWeights(plan.epoch, self.version, tuple(plan.ranks), self._settings.deadline_s))

    def _flush(self, now: float) -> list[Action]:
        """Go on as far as possible without another event, and hand out the actions."""
        while (stage := self._stage) is not None and not stage.waiting and not stage.sender_waits:
            self._end_stage(stage, now)
        if self._stage is None and self.report is None and all(t.state == "loaded" for t in self._targets.values()):
            self.report = self._make_report(now)
            self._actions.append(Done(self.report))
        actions, self._actions = self._actions, []
        return actions

    def _end_stage(self, stage: _Stage, now: float) -> None:
        """Everyone in the stage has answered or is out.

        If a member left the group, errors of the others are the consequence and use up no retry.
        """
        self._stage, self._transferred = None, now
        self._seconds[stage.kind] += now - stage.began
        self._sender_error = stage.sender_error or self._sender_error
        vanished = self._epochs.current is not stage.plan
        failed = vanished or bool(stage.errors) or stage.sender_error is not None
        if not failed and stage.kind == "join":
            return self._transfer(stage.plan, now)
        if failed:
            self._epochs.broken()
        if failed and not vanished:
            self._count_failures(stage)
        self._try(now)

    def _count_failures(self, stage: _Stage) -> None:
        """Nobody left the group, and still it failed: that uses up a retry of each that lacks the bytes."""
        for target in self._pending():
            target.failures += 1
            if target.failures > self._settings.max_retries:
                cause = stage.errors.get(target.name) or stage.sender_error or "others in the group failed"
                self._evict(target.name, f"{stage.kind} failed {target.failures} times in a row, last: {cause}")

    def _remove(self, name: str) -> None:
        """Take a member out of the round and of the group."""
        del self._targets[name]
        self._epochs.lost(name)
        if self._stage is not None:
            self._stage.waiting.discard(name)

    def _evict(self, name: str, reason: str, alarm: bool = False) -> None:
        self._remove(name)
        self._evicted[name] = reason
        self._actions.append(Evict(name, reason, alarm))

    def _make_report(self, now: float) -> Report:
        return Report(
            version=self.version,
            loaded=tuple(self._loaded),
            evicted=self._evicted,
            gone=self._gone,
            tries=self._tries,
            join_s=self._seconds["join"],
            transfer_s=self._seconds["transfer"],
            load_s=now - self._transferred,
            total_s=now - self._began,
            sender_error=self._sender_error,
        )
