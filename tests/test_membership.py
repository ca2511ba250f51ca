"""Members, incarnations and broadcast epochs."""

from __future__ import annotations

import pytest

from async_rl.membership import GONE_KEPT, MAX_EVICTIONS, Epochs, Joined, Membership
from async_rl.protocol import PROTOCOL_VERSION, GeneratorStats, Heartbeat, Hello


def hello(name: str, incarnation: str = "1", receivers: int = 1, slots: int = 8) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        name=name,
        incarnation=incarnation,
        run_id=None,
        policy_version=None,
        slots=slots,
        receivers=receivers,
        engine="simulated",
        host="here",
        pid=7,
    )


def join(members: Membership, name: str, incarnation: str = "1", receivers: int = 1, now: float = 0.0) -> Joined:
    joined = members.hello(hello(name, incarnation, receivers), now)
    assert isinstance(joined, Joined), joined
    return joined


def activate(members: Membership, *names: str) -> None:
    for name in names:
        members.loading(name)
        members.loaded(name, 0)


def test_life_of_a_member() -> None:
    members = Membership(heartbeat_timeout_s=10.0)
    member = join(members, "a").member
    states = [member.state]
    members.loading("a")
    states.append(member.state)
    assert members.active() == []
    members.loaded("a", 3)
    states.append(member.state)
    assert members.active() == [member] and member.version == 3
    members.loading("a")
    states.append(member.state)
    assert members.leave("a", "goodbye") is member
    states.append(member.state)
    assert states == ["joining", "loading", "active", "active", "gone"]
    assert (members.get("a"), member.gone_reason, list(members.gone)) == (None, "goodbye", [member])
    assert members.leave("a", "again") is None


def test_silence_expires_and_any_message_is_a_sign_of_life() -> None:
    members = Membership(heartbeat_timeout_s=10.0)
    for name in ("a", "b", "c"):
        join(members, name, now=0.0)
    stats = GeneratorStats(generated_tokens=5)
    assert members.heartbeat("a", Heartbeat(accepting=False, holding=(), policy_version=0, stats=stats), 6.0)
    assert members.seen("b", 8.0)
    assert members.expired(10.0) == [], "exactly the timeout is not longer than it"
    assert members.expired(10.5) == ["c"]
    assert members.expired(17.0) == ["a", "c"]
    member = members.get("a")
    assert member is not None and member.stats == stats and not member.accepting
    assert not members.seen("x", 0.0) and not members.heartbeat("x", Heartbeat(True, (), 0, stats), 0.0)


def test_the_same_process_reconnects_and_keeps_its_place() -> None:
    members = Membership(10.0)
    first = join(members, "a").member
    activate(members, "a")
    again = join(members, "a", now=5.0)
    assert again.reconnected and again.replaced is None and again.member is first
    assert first.state == "active" and first.last_seen == 5.0


def test_a_restarted_generator_replaces_its_old_self_at_once() -> None:
    members = Membership(10.0)
    old = join(members, "a", "1").member
    activate(members, "a")
    members.epochs.assign_ranks([("a", 1)])
    joined = join(members, "a", "2", now=1.0)
    assert joined.replaced is old and not joined.reconnected
    assert joined.member.state == "joining" and joined.member.version is None, "it has no weights yet"
    assert members.epochs.current is None, "the old process stood in the group"
    assert members.is_current("a", "2") and not members.is_current("a", "1")
    assert isinstance(refusal := members.hello(hello("a", "1"), 2.0), str) and "'a'" in refusal
    assert members.get("a") is joined.member


def test_a_process_cut_off_for_long_does_not_take_its_name_back() -> None:
    members = Membership(10.0)
    join(members, "a", "1")
    members.leave("a", "silent")
    join(members, "a", "2", now=20.0)
    assert isinstance(members.hello(hello("a", "1"), 30.0), str)
    assert members.is_current("a", "2")


def test_a_member_that_was_thought_dead_may_come_back() -> None:
    members = Membership(10.0)
    join(members, "a", "1")
    members.leave("a", "silent")
    joined = join(members, "a", "1", now=20.0)
    assert joined.replaced is None and not joined.reconnected, "its leases and its rank are gone"


def test_order_of_joining_decides_ranks() -> None:
    members = Membership(10.0)
    for name, receivers in (("c", 2), ("a", 1), ("label", 0), ("b", 4)):
        join(members, name, receivers=receivers)
    assert [member.name for member in members.members()] == ["c", "a", "label", "b"]
    assert not members.needs_new_epoch() or members.epochs.current is None
    activate(members, "c", "a", "label")
    plan = members.epochs.assign_ranks([(m.name, m.receivers) for m in members.active() if m.receivers])
    assert (plan.epoch, plan.ranks, plan.size) == (1, {"c": 1, "a": 3}, 4)
    assert not members.needs_new_epoch()
    activate(members, "b")
    assert members.needs_new_epoch(), "b joined"
    plan = members.epochs.assign_ranks([(m.name, m.receivers) for m in members.active() if m.receivers])
    assert (plan.epoch, plan.ranks, plan.size) == (2, {"c": 1, "a": 3, "b": 4}, 8)
    members.leave("label", "goodbye")
    assert not members.needs_new_epoch(), "it had no rank"
    members.leave("a", "goodbye")
    assert members.needs_new_epoch() and members.epochs.current is None


def test_epoch_numbers_never_repeat() -> None:
    epochs = Epochs()
    numbers = []
    for _ in range(3):
        numbers.append(epochs.assign_ranks([("a", 1)]).epoch)
        epochs.broken()
    assert numbers == [1, 2, 3]
    with pytest.raises(AssertionError, match="receives nothing"):
        epochs.assign_ranks([("a", 0)])


def test_memory_is_bounded_under_churn() -> None:
    members = Membership(10.0)
    for i in range(3000):
        join(members, f"g{i % 1500}", incarnation=str(i))
        members.leave(f"g{i % 1500}", "goodbye")
    assert len(members) == 0 and len(members.gone) == GONE_KEPT
    assert len(members._replaced) <= 1024 and len(members._latest) <= 1024


def test_a_process_that_is_evicted_again_and_again_is_not_taken_back() -> None:
    members = Membership(heartbeat_timeout_s=10.0)
    for time in range(MAX_EVICTIONS):
        assert members.worn_out("a", "1") is None
        join(members, "a", now=float(time))
        evicted = members.evict("a", "did not load version 3")
        assert evicted is not None and evicted.gone_reason == "evicted: did not load version 3"
    assert "3 times in a row without a result in between" in str(members.worn_out("a", "1"))
    assert members.worn_out("a", "2") is None, "a new process of that name may hang no more"
    assert members.evict("a", "again") is None and members.num_evicted == MAX_EVICTIONS


def test_results_and_other_ways_to_go_are_no_evictions_in_a_row() -> None:
    members = Membership(heartbeat_timeout_s=10.0)
    for time in range(3 * MAX_EVICTIONS):
        join(members, "a", now=float(time))
        members.leave("a", "silent")
        join(members, "a", now=float(time))
        if time % 2:
            members.delivered("a", float(time))
        members.evict("a", "hung")
        assert members.worn_out("a", "1") is None
    assert members.num_evicted == 3 * MAX_EVICTIONS
