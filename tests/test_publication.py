"""Publication: rounds by hand, and random fleets whose members fail, lie, hang and leave at any point."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from async_rl.membership import Epochs, Member
from async_rl.publication import (
    Abandon,
    Action,
    Done,
    Evict,
    JoinGroup,
    Publication,
    Publications,
    PublicationSettings,
    Report,
    SendRelabel,
    SendSnapshot,
    SendWeights,
    WriteSnapshot,
)

SETTINGS = PublicationSettings(deadline_s=10.0, grace_s=1.0, max_retries=1)
SUM = "right"


def member(name: str, receivers: int = 1) -> Member:
    return Member(
        name=name,
        incarnation="1",
        slots=1,
        receivers=receivers,
        engine="simulated",
        host="here",
        pid=1,
        joined=0.0,
        order=0,
        last_seen=0.0,
    )


def begin(*names: str, epochs: Epochs | None = None) -> tuple[Publication, list[Action], Epochs]:
    epochs = epochs or Epochs()
    round_ = Publication(SETTINGS, epochs, 7, SUM, 0.0)
    return round_, round_.start([member(name) for name in names], 0.0), epochs


def transfer(round_: Publication, *names: str, epoch: int = 1) -> list[Action]:
    """Everyone joins: what follows is the transfer."""
    actions = round_.sender_joined(epoch, None, 1.0)
    for name in names:
        actions += round_.epoch_joined(name, epoch, None, 1.0)
    return actions


def report_of(actions: list[Action]) -> Report:
    assert actions and isinstance(actions[-1], Done), actions
    return actions[-1].report


# --- by hand ---------------------------------------------------------------------------------------


def test_a_round_in_which_all_goes_well() -> None:
    round_, actions, epochs = begin("a", "b")
    assert isinstance(actions[0], JoinGroup) and actions[0].plan.ranks == {"a": 1, "b": 2}
    assert transfer(round_, "a", "b") == [SendWeights(1, 7, ("a", "b"), 10.0)]
    assert round_.received("a", 1, SUM, None, 2.0) == []
    assert round_.loaded("a", SUM, None, 2.5) == []
    assert round_.describe(2.5) == (
        "publication of version 7 waits for transfer in epoch 1 since 1.5 s: b, the learner's sender"
    )
    assert round_.sender_sent(1, None, 3.0) == []
    assert round_.received("b", 1, SUM, None, 4.0) == []
    report = report_of(round_.loaded("b", SUM, None, 6.0))
    assert (report.loaded, report.evicted, report.gone, report.tries) == (("a", "b"), {}, {}, 1)
    assert (report.join_s, report.transfer_s, report.load_s, report.total_s) == (1.0, 3.0, 2.0, 6.0)
    assert epochs.current is not None and epochs.current.epoch == 1, "the group stands for the next round"


def test_the_next_round_uses_the_group_that_stands() -> None:
    _, _, epochs = begin("a", "b")
    _, actions, _ = begin("a", "b", epochs=epochs)
    assert actions == [SendWeights(1, 7, ("a", "b"), 10.0)]
    _, actions, _ = begin("a", "b", "c", epochs=epochs)
    assert isinstance(actions[0], JoinGroup) and actions[0].plan.epoch == 2


def test_no_members_is_done_at_once() -> None:
    _, actions, _ = begin()
    assert report_of(actions).tries == 0


def test_members_that_load_no_weights_are_relabelled_and_waited_for() -> None:
    round_ = Publication(SETTINGS, Epochs(), 7, SUM, 0.0)
    assert round_.start([member("s", receivers=0)], 0.0) == [SendRelabel(7, ("s",))]
    assert round_.tick(10.9) == []
    assert report_of(round_.loaded("s", None, None, 10.9)).loaded == ("s",)

    round_ = Publication(SETTINGS, Epochs(), 7, SUM, 0.0)
    round_.start([member("s", receivers=0)], 0.0)
    assert list(report_of(round_.tick(11.0)).evicted) == ["s"]


def test_a_silent_member_is_evicted_and_the_rest_gets_it_in_a_new_epoch() -> None:
    round_, _, _ = begin("a", "b")
    transfer(round_, "a", "b")
    assert round_.received("a", 1, None, "sender closed", 5.0) == []
    assert round_.sender_sent(1, "b did not answer", 5.0) == []
    assert round_.tick(11.9) == [], "the stage began at 1"
    evict, join = round_.tick(12.0)
    assert evict == Evict("b", "did not receive version 7 in epoch 1 within 11 s")
    assert isinstance(join, JoinGroup) and (join.plan.epoch, join.plan.ranks) == (2, {"a": 1})
    assert transfer(round_, "a", epoch=2) == [SendWeights(2, 7, ("a",), 10.0)]
    assert round_.received("b", 2, SUM, None, 13.0) == [], "it is out"
    round_.received("a", 2, SUM, None, 13.0)
    round_.sender_sent(2, None, 13.0)
    report = report_of(round_.loaded("a", SUM, None, 14.0))
    assert report.loaded == ("a",) and list(report.evicted) == ["b"] and report.tries == 2
    assert report.sender_error == "b did not answer"


def test_only_those_without_the_bytes_try_again() -> None:
    round_, _, _ = begin("a", "b")
    transfer(round_, "a", "b")
    round_.received("a", 1, SUM, None, 2.0)
    round_.sender_sent(1, None, 2.0)
    (join,) = round_.received("b", 1, None, "connection reset", 2.0)
    assert isinstance(join, JoinGroup) and join.plan.ranks == {"b": 1}
    assert round_.loaded("a", SUM, None, 3.0) == [], "the first loads meanwhile"


def test_errors_of_a_live_member_use_up_its_retries() -> None:
    round_, _, _ = begin("a")
    transfer(round_, "a")
    round_.sender_sent(1, None, 2.0)
    assert isinstance(round_.received("a", 1, None, "no memory", 2.0)[0], JoinGroup)
    transfer(round_, "a", epoch=2)
    round_.sender_sent(2, None, 3.0)
    evict, _ = round_.received("a", 2, None, "no memory", 3.0)
    assert evict == Evict("a", "transfer failed 2 times in a row, last: no memory")


def test_errors_that_follow_from_a_death_use_up_no_retry() -> None:
    round_, _, _ = begin("v", "d1", "d2", "d3")
    names = ["v", "d1", "d2", "d3"]
    for epoch, dying in enumerate(("d1", "d2", "d3"), start=1):
        transfer(round_, *names, epoch=epoch)
        names.remove(dying)
        round_.member_gone(dying, "silent", 2.0)
        round_.sender_sent(epoch, "connection closed", 2.0)
        for name in names:
            actions = round_.received(name, epoch, None, "connection closed", 2.0)
        assert isinstance(actions[-1], JoinGroup), "max_retries is 1, and v has seen more errors than that"
    transfer(round_, "v", epoch=4)
    round_.received("v", 4, SUM, None, 3.0)
    round_.sender_sent(4, None, 3.0)
    report = report_of(round_.loaded("v", SUM, None, 3.0))
    assert report.loaded == ("v",) and report.evicted == {} and sorted(report.gone) == ["d1", "d2", "d3"]


def test_wrong_bytes_are_an_alarm() -> None:
    round_, _, _ = begin("a", "b")
    transfer(round_, "a", "b")
    (evict,) = round_.received("a", 1, "wrong", None, 2.0)
    assert evict == Evict("a", "received checksum wrong, the learner sent right", alarm=True)
    round_.received("b", 1, SUM, None, 2.0)
    evict, *_ = round_.loaded("b", "wrong", None, 3.0)
    assert evict == Evict("b", "loaded checksum wrong, the learner sent right", alarm=True)


def test_a_member_that_cannot_load_is_evicted() -> None:
    round_, _, _ = begin("a", "b")
    transfer(round_, "a", "b")
    for name in "ab":
        round_.received(name, 1, SUM, None, 2.0)
    round_.sender_sent(1, None, 2.0)
    assert round_.loaded("a", None, "engine died", 3.0) == [Evict("a", "could not load version 7: engine died")]
    evict, done = round_.tick(13.0)
    assert evict == Evict("b", "did not load version 7 within 11 s")
    assert isinstance(done, Done) and done.report.loaded == ()


def test_answers_of_an_earlier_epoch_do_not_count() -> None:
    round_, _, _ = begin("a", "b")
    round_.member_gone("b", "died", 1.0)
    round_.epoch_joined("a", 1, "b is missing", 1.0)
    assert isinstance(round_.sender_joined(1, "b is missing", 1.0)[0], JoinGroup)
    assert round_.sender_joined(1, None, 2.0) == round_.epoch_joined("a", 1, None, 2.0) == []
    assert round_.sender_joined(2, None, 3.0) == []
    assert round_.epoch_joined("a", 2, None, 3.0) == [SendWeights(2, 7, ("a",), 10.0)]
    assert round_.received("a", 1, SUM, None, 4.0) == []
    assert "a, the learner's sender" in round_.describe(4.0)


def test_a_member_that_is_gone_ends_the_wait_of_the_sender_too() -> None:
    """Before its deadline: the sender is told once, the others' errors and its own use up no retry."""
    round_, _, _ = begin("a", "b", "c")
    round_.epoch_joined("a", 1, None, 1.0)
    assert round_.member_gone("b", "its connection is gone", 1.0) == [Abandon(1, "b is gone: its connection is gone")]
    assert round_.member_gone("c", "silent", 1.5) == [], "the sender knows"
    (join,) = round_.sender_joined(1, "b is gone", 2.0)
    assert isinstance(join, JoinGroup) and (join.plan.epoch, join.plan.ranks) == (2, {"a": 1})
    assert transfer(round_, "a", epoch=2) == [SendWeights(2, 7, ("a",), 10.0)]
    assert round_.awaited() == {"a"}
    assert round_.member_gone("a", "killed", 3.0) == [Abandon(2, "a is gone: killed")]
    report = report_of(round_.sender_sent(2, "a is gone", 3.0))
    assert (report.loaded, report.evicted, sorted(report.gone)) == ((), {}, ["a", "b", "c"])


def test_a_member_that_has_answered_or_is_not_waited_for_costs_the_sender_nothing() -> None:
    round_, _, _ = begin("a", "b")
    transfer(round_, "a", "b")
    round_.received("a", 1, SUM, None, 2.0)
    assert round_.awaited() == {"a", "b"}, "a loads"
    assert round_.member_gone("a", "died", 2.5) == [], "it has all bytes: the sender does not wait for it"
    round_.sender_sent(1, "connection closed", 3.0)
    assert round_.member_gone("b", "died", 3.0)[-1] == Done(round_.report), "the sender has answered already"  # type: ignore[arg-type]


def test_a_member_that_leaves_while_joining_breaks_the_group() -> None:
    round_, _, epochs = begin("a", "b")
    round_.sender_joined(1, None, 1.0)
    round_.epoch_joined("a", 1, None, 1.0)
    epochs.lost("b")
    (join,) = round_.member_gone("b", "goodbye", 1.0)
    assert isinstance(join, JoinGroup) and join.plan.ranks == {"a": 1}


# --- the sequence ----------------------------------------------------------------------------------


def test_joiners_load_the_snapshot_after_the_round_in_flight() -> None:
    publications = Publications(SETTINGS, Epochs())
    assert publications.joiner("early", 1, 0.0) == [], "nothing is published yet"
    done, snapshot = publications.start(0, "sum 0", [], 1.0)
    assert isinstance(done, Done) and snapshot == WriteSnapshot("early", 0)
    assert publications.snapshot_written("early", 0, None, 1.5) == [SendSnapshot("early", 0, 10.0)]
    assert publications.loaded("early", 0, "sum 0", None, 2.0) == []
    publications.start(1, "sum 1", [member("early")], 3.0)
    assert publications.joiner("late", 1, 3.0) == []
    assert publications.joiner("label", 0, 3.0) == []
    publications.sender_joined(1, None, 3.0)
    publications.epoch_joined("early", 1, None, 3.0)
    publications.received("early", 1, "sum 1", None, 3.0)
    publications.sender_sent(1, None, 3.0)
    actions = publications.loaded("early", 1, "sum 1", None, 4.0)
    assert actions[1:] == [WriteSnapshot("late", 1), SendRelabel(1, ("label",))]
    assert publications.published == 1 and publications.round is None


def test_a_snapshot_that_is_old_when_loaded_is_followed_by_the_next() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    assert publications.joiner("slow", 1, 0.0) == [WriteSnapshot("slow", 0)]
    publications.start(1, "sum 1", [], 1.0)
    assert publications.snapshot_written("slow", 0, None, 1.5) == [SendSnapshot("slow", 0, 10.0)]
    assert publications.loaded("slow", 0, "sum 0", None, 2.0) == [WriteSnapshot("slow", 1)]
    assert publications.snapshot_written("slow", 0, None, 2.0) == [], "of the version before"
    assert publications.snapshot_written("slow", 1, None, 2.5) == [SendSnapshot("slow", 1, 10.0)]
    assert publications.loaded("slow", 1, "sum 1", None, 3.0) == []


def test_snapshot_errors_are_retried_then_evicted_and_silence_too() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    publications.joiner("a", 1, 0.0)
    publications.snapshot_written("a", 0, None, 0.5)
    assert publications.loaded("a", 0, None, "no such file", 1.0) == [WriteSnapshot("a", 0)]
    publications.snapshot_written("a", 0, None, 1.5)
    assert publications.loaded("a", 0, None, "no such file", 2.0) == [
        Evict("a", "could not load a snapshot 2 times, last: no such file")
    ]
    publications.joiner("b", 1, 4.0)
    publications.snapshot_written("b", 0, None, 5.0)
    assert publications.tick(15.9) == []
    assert publications.tick(16.0) == [Evict("b", "did not load the snapshot of version 0 within 11 s")]
    publications.joiner("c", 1, 20.0)
    (evict,) = publications.loaded("c", 0, "other", None, 21.0)
    assert isinstance(evict, Evict) and evict.alarm
    assert publications.events["evicted"] == 3 and publications.events["alarms"] == 1


def test_a_joiner_has_its_time_from_when_the_file_is_there() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    publications.joiner("a", 1, 0.0)
    assert publications.tick(40.9) == [], "the learner writes: the joiner has been told nothing"
    assert publications.describe(40.9) == "no publication is under way; waiting for the file of a snapshot: a"
    assert publications.awaited() == {"a"}
    assert publications.snapshot_written("a", 0, None, 40.9) == [SendSnapshot("a", 0, 10.0)]
    assert publications.describe(40.9) == "no publication is under way; loading a snapshot: a"
    assert publications.snapshot_written("a", 0, None, 45.0) == [], "it was told, and its time goes on"
    assert publications.tick(51.8) == []
    assert publications.tick(51.9) == [Evict("a", "did not load the snapshot of version 0 within 11 s")]
    assert publications.snapshot_written("a", 0, None, 52.0) == [], "it is out"


def test_a_member_of_a_round_is_not_told_of_an_older_file_any_more() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    publications.joiner("slow", 1, 0.0)
    publications.snapshot_written("slow", 0, None, 1.0)
    publications.start(1, "sum 1", [], 2.0)
    assert publications.loaded("slow", 0, "sum 0", None, 3.0) == [WriteSnapshot("slow", 1)]
    publications.start(2, "sum 2", [member("slow")], 4.0)
    assert publications.snapshot_written("slow", 1, None, 5.0) == []
    assert "slow" in publications.awaited(), "it gets version 2 in the round"


def test_the_file_of_a_snapshot_has_a_deadline_of_its_own() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    publications.joiner("a", 1, 0.0)
    why = "the learner did not write the snapshot of version 0 within 41 s; see weights.deadline_s"
    assert publications.tick(41.0) == [Evict("a", why)]
    publications.joiner("a", 1, 42.0)
    assert publications.snapshot_written("a", 0, None, 43.0) == [SendSnapshot("a", 0, 10.0)], "of its first request"
    assert publications.snapshot_written("a", 0, None, 44.0) == [], "of its second"
    assert SETTINGS.longest_round_s(5) + 41.0 == publications.longest_wait_s(5)


def test_a_file_that_cannot_be_written_is_tried_again_then_the_joiner_is_out() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(0, "sum 0", [], 0.0)
    publications.joiner("a", 1, 0.0)
    assert publications.snapshot_written("a", 0, "disk full", 1.0) == [WriteSnapshot("a", 0)]
    why = "could not load a snapshot 2 times, last: the learner could not write it: disk full"
    assert publications.snapshot_written("a", 0, "disk full", 2.0) == [Evict("a", why)]
    assert publications.awaited() == set()


def test_one_round_at_a_time_and_versions_rise() -> None:
    publications = Publications(SETTINGS, Epochs())
    publications.start(3, SUM, [], 0.0)
    with pytest.raises(AssertionError, match="version 3 after 3"):
        publications.start(3, SUM, [], 0.0)
    publications.start(4, SUM, [member("a")], 0.0)
    with pytest.raises(AssertionError, match="version 4 is still being published"):
        publications.start(5, SUM, [], 0.0)


# --- random fleets ---------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Members and a sender that answer, or do not, at random times; time moves when nothing else does."""

    rng: random.Random
    trouble: float
    """Probability that an answer is not the right one."""
    publications: Publications
    now: float = 0.0
    inbox: deque[tuple[float, str, tuple]] = field(default_factory=deque)
    loaded: dict[str, int] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    evicted: set[str] = field(default_factory=set)
    written: set[tuple[str, int]] = field(default_factory=set)
    """Files of snapshots: who waited, version."""
    told: dict[str, float] = field(default_factory=dict)
    """When a joiner was told to load one."""
    active: dict[str, int] = field(default_factory=dict)
    """Members that have loaded something, in order -> receivers."""

    def answer(self, method: str, *args) -> None:  # type: ignore[no-untyped-def]
        self.inbox.append((self.now + self.rng.random() * 8, method, args))

    def outcome(self) -> str:
        if self.rng.random() >= self.trouble:
            return "right"
        return self.rng.choice(("error", "silent", "wrong", "gone", "late"))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case JoinGroup(plan=plan):
                    for name in plan.ranks:
                        self.member_answers("epoch_joined", name, plan.epoch)
                    self.sender_answers("sender_joined", plan.epoch)
                case SendWeights(epoch=epoch, names=names):
                    for name in names:
                        self.member_answers("received", name, epoch)
                    self.sender_answers("sender_sent", epoch)
                case WriteSnapshot(name=name, version=version):
                    self.write(name, version)
                case SendSnapshot(name=name, version=version):
                    assert (name, version) in self.written, "told of a file that is not there"
                    self.told[name] = self.now
                    self.load(name, version)
                case SendRelabel(names=names, version=version):
                    for name in names:
                        self.load(name, version, checksum=None)
                case Abandon(epoch=epoch):
                    self.answer("sender_joined", epoch, "abandoned")
                    self.answer("sender_sent", epoch, "abandoned")
                case Evict(name=name, reason=reason):
                    assert name not in self.evicted, "evicted twice"
                    if "did not load the snapshot" in reason:
                        assert self.now - self.told[name] >= 11.0, "it had less than its time"
                    self.evicted.add(name)
                    self.active.pop(name, None)
                case Done(report=report):
                    self.reports.append(report)

    def write(self, name: str, version: int) -> None:
        """Slower than a load may be, when the disk is; twice, when it was asked for twice."""
        match self.outcome():
            case "right" | "wrong":
                self.inbox.append((self.now + self.rng.random() * 30, "snapshot_written", (name, version, None)))
            case "late":
                self.inbox.append((self.now + 60.0, "snapshot_written", (name, version, None)))
            case "error":
                self.answer("snapshot_written", name, version, "disk full")
            case "gone":
                self.answer("member_gone", name, "died")

    def sender_answers(self, method: str, epoch: int) -> None:
        match self.outcome():
            case "right" | "wrong":
                self.answer(method, epoch, None)
            case "error" | "gone":
                self.answer(method, epoch, "connection closed")

    def member_answers(self, method: str, name: str, epoch: int) -> None:
        checksum = () if method == "epoch_joined" else (SUM,)
        match self.outcome():
            case "right":
                self.answer(method, name, epoch, *checksum, None)
                if method == "received" and self.publications.round:
                    self.load(name, self.publications.round.version)
            case "wrong":
                self.answer(method, name, epoch, *(checksum and ("wrong",)), None)
            case "error":
                self.answer(method, name, epoch, *(checksum and (None,)), "no memory")
            case "gone":
                self.answer("member_gone", name, "died")
            case "late":
                self.inbox.append((self.now + 40.0, method, (name, epoch, *checksum, None)))

    def load(self, name: str, version: int, checksum: str | None = SUM) -> None:
        """A label (no checksum) cannot be wrong."""
        outcome = self.outcome()
        match "right" if checksum is None and outcome == "wrong" else outcome:
            case "right" | "late":
                self.loaded[name] = version
                self.answer("loaded", name, version, checksum, None)
            case "wrong":
                self.answer("loaded", name, version, "wrong", None)
            case "error":
                self.answer("loaded", name, version, None, "engine died")
            case "gone":
                self.answer("member_gone", name, "died")

    def step(self) -> None:
        """The next answer, or a second passes."""
        due = [item for item in self.inbox if item[0] <= self.now]
        if due:
            item = self.rng.choice(due)
            self.inbox.remove(item)
            _, method, args = item
            if method == "member_gone":
                self.publications._epochs.lost(args[0])
                self.active.pop(args[0], None)
            if method == "snapshot_written" and args[2] is None:
                self.written.add(args[:2])
            if method == "loaded" and args[2] == SUM and args[3] is None and args[0] not in self.evicted:
                self.active.setdefault(args[0], 1)
            self.act(getattr(self.publications, method)(*args, self.now))
        else:
            self.now += 1.0
            self.act(self.publications.tick(self.now))


@pytest.mark.parametrize("block", range(10))
def test_random_fleets_always_come_to_an_end_and_nobody_is_skipped(block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        rng = random.Random(seed)
        settings = PublicationSettings(deadline_s=10.0, grace_s=1.0, max_retries=rng.randint(0, 3))
        fleet = Fleet(rng, rng.choice((0.0, 0.1, 0.3, 0.8)), Publications(settings, Epochs()))
        fleet.active = {f"g{i}": rng.randint(0, 3) for i in range(rng.randint(0, 6))}
        for version in range(5):
            targets = [member(name, receivers) for name, receivers in fleet.active.items()]
            begun, stages = fleet.now, (len(targets) + settings.max_retries + 1) * 2 + 1
            fleet.act(fleet.publications.start(version, SUM, targets, fleet.now))
            fleet.act(fleet.publications.joiner(f"joiner-{version}", 1, fleet.now))
            while fleet.publications.round is not None:
                fleet.step()
                # A tick may be up to a second late, in each stage.
                assert fleet.now - begun <= stages * (settings.patience_s + 1), fleet.publications.describe(fleet.now)
            report = fleet.reports[-1]
            names = sorted(target.name for target in targets)
            assert sorted([*report.loaded, *report.evicted, *report.gone]) == names, f"seed {seed}"
            assert all(fleet.loaded[name] == version for name in report.loaded), f"seed {seed}: a false 'loaded'"
            assert set(report.evicted) <= fleet.evicted
        deadline = fleet.now + 400
        while fleet.now < deadline:
            fleet.step()
        assert not fleet.publications._loads and not fleet.publications._waiting, f"seed {seed}: a joiner is forgotten"
        if fleet.trouble == 0.0:
            assert all(not r.evicted and not r.gone and r.tries <= 1 for r in fleet.reports)
            assert len(fleet.active) >= 5 and fleet.loaded == dict.fromkeys(fleet.active, 4), f"seed {seed}"
