"""The ledger, event by event: values and answers that a reader can check by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from async_rl.buffer import Ledger, LedgerSettings, MemberLease, TrajectoryGroup
from async_rl.protocol import LeaseKey, Problem, ProtocolError, TrajectoryStatus
from async_rl.staleness import trajectory_staleness
from tests.ledger_world import key_of, make_problem, make_trajectory


def make_ledger(num_problems: int | None = None, **settings) -> Ledger:  # type: ignore[no-untyped-def]
    defaults = {"batch_groups": 2, "group_size": 2, "max_staleness": 1}
    ledger = Ledger(LedgerSettings(**{**defaults, **settings}), lambda: draw())

    def draw() -> Problem | None:
        return None if num_problems is not None and ledger.issued >= num_problems else make_problem(ledger.issued)

    return ledger


def finish(
    ledger: Ledger,
    lease: MemberLease,
    owner: str = "a",
    version: int = 0,
    status: TrajectoryStatus = "complete",
    reward: float = 1.0,
) -> str:
    trajectory = make_trajectory(version, status=status, reward=reward)
    return ledger.finish(owner, lease.ticket, lease.member, lease.attempt, trajectory, 1.0)


def run(ledger: Ledger, steps: int, seen: Callable[[int, TrajectoryGroup], None] = lambda step, group: None) -> None:
    """Steps of a run in which a single generator has the newest version and finishes at once."""
    for _ in range(steps):
        version = ledger.steps
        for lease in ledger.lease("a", version, 10**6, 0.0):
            finish(ledger, lease, version=version)
        batch = ledger.take_batch(0.0)
        assert batch is not None, ledger.describe_wait(0.0)
        for group in batch:
            seen(ledger.steps + 1, group)
        ledger.trained(batch)


def places(leases: list[MemberLease]) -> list[tuple[int, int]]:
    return [(lease.ticket, lease.member) for lease in leases]


# --- cases ---------------------------------------------------------------------------------------


def test_case_resume_capacity() -> None:
    settings = {"batch_groups": 64, "group_size": 1, "max_staleness": 2}
    before = make_ledger(total_steps=50, **settings)
    run(before, 50)
    assert (before.issued, before.counts().trained) == (3200, 3200)

    resumed = make_ledger(**settings)
    resumed.restore(before.state())
    leases = resumed.lease("a", 50, 10**6, 0.0)
    assert len(leases) == 192
    assert [leases[0].ticket, leases[-1].ticket] == [3200, 3391]


@pytest.mark.parametrize("overdue", ["mask", "wait", "keep"])
def test_case_staleness_zero(overdue: str) -> None:
    ledger = make_ledger(batch_groups=3, max_staleness=0, overdue=overdue, reorder_window=1)
    assert len(ledger.lease("a", 0, 100, 0.0)) == 3 * 2, "B tickets start, and no more"
    ledger.return_leases("a", ledger._leases.held("a"), 0.0)
    ages: list[int] = []
    run(ledger, 20, lambda step, group: ages.extend(trajectory_staleness(step, m.versions) for m in group.members))
    assert ages == [0] * (20 * 3 * 2)


def test_case_generate_4_train_2() -> None:
    before = make_ledger()
    for lease in before.lease("a", 0, 100, 0.0):
        finish(before, lease)
    batch = before.take_batch(0.0)
    assert batch is not None and [group.problem.id for group in batch] == ["0", "1"]
    before.trained(batch)

    resumed = make_ledger()
    resumed.restore(before.state())
    batch = resumed.take_batch(0.0)
    assert batch is not None and [group.problem.id for group in batch] == ["2", "3"]
    assert resumed.lease("a", 1, 1, 0.0)[0].problem.id == "4", "the dataset goes on where it was"


def test_case_tail() -> None:
    ledger = make_ledger(num_problems=7)
    trained: list[str] = []
    run(ledger, 3, lambda step, group: trained.append(group.problem.id))
    assert trained == ["0", "1", "2", "3", "4", "5"]
    assert ledger.lease("a", 3, 100, 0.0) == []
    assert ledger.finished and ledger.take_batch(0.0) is None
    assert ledger.counts().dropped == {"tail": 1}


def test_a_restored_ledger_at_the_end_of_the_data_asks_once_more() -> None:
    """It may have been given more epochs: nothing is lost of them, and nothing is awaited where there are none."""
    before = make_ledger(num_problems=4)
    run(before, 2)
    assert before.lease("a", 2, 100, 0.0) == [] and before.finished

    ended = make_ledger(num_problems=4)
    ended.restore(before.state())
    assert ended.finished and not ended.has_work("a", 2) and ended.counts() == before.counts()

    trained: list[str] = []
    longer = make_ledger(num_problems=8)
    longer.restore(before.state())
    longer.check()
    assert not longer.finished and longer.has_work("a", 2)
    again = make_ledger(num_problems=8)
    again.restore(longer.state())
    for ledger in (longer, again):
        trained.clear()
        run(ledger, 2, lambda step, group: trained.append(group.problem.id))
        assert trained == ["4", "5", "6", "7"]
        assert ledger.lease("a", 4, 100, 0.0) == [] and ledger.finished
        ledger.check()


def test_asking_the_data_once_more_issues_nothing_beyond_the_last_step() -> None:
    before = make_ledger(num_problems=4)
    run(before, 2)
    assert before.lease("a", 2, 100, 0.0) == []
    full = make_ledger(num_problems=8, total_steps=2)
    full.restore(before.state())
    assert full.finished and full.issued == 4


@pytest.mark.parametrize("overdue", ["mask", "wait", "keep"])
def test_case_slow_prompts(overdue: str) -> None:
    """Durations of 1 step (90 %) and 10 steps (10 %): whatever is done about age, slow prompts keep their share."""
    batch_groups, steps = 10, 300
    ledger = make_ledger(
        batch_groups=batch_groups, group_size=1, max_staleness=3, overdue=overdue, reorder_window=21, total_steps=steps
    )
    rng = random.Random(0)
    slow = {i for i in range(batch_groups * steps) if rng.random() < 0.1}
    running: list[tuple[float, MemberLease, int]] = []
    trained, discarded, now = [], 0, 0.0
    while not ledger.finished:
        now += 1
        for due, lease, version in [work for work in running if work[0] <= now]:
            running.remove((due, lease, version))
            assert finish(ledger, lease, version=version) == "stored"
        for lease in ledger.lease("a", ledger.steps, 40 - len(running), now):
            running.append((now + (10 if lease.ticket in slow else 1), lease, ledger.steps))
        if batch := ledger.take_batch(now):
            ages = [trajectory_staleness(ledger.steps + 1, group.members[0].versions) for group in batch]
            discarded += sum(age > 3 and group.ticket in slow for age, group in zip(ages, batch, strict=True))
            trained += [group.ticket for group in batch]
            ledger.trained(batch)
        assert now < 20 * steps, ledger.describe_wait(now)
    assert sorted(trained) == list(range(batch_groups * steps)), "every problem exactly once"
    assert sum(ticket in slow for ticket in trained) / len(trained) == pytest.approx(0.1, abs=0.02)
    if overdue == "wait":
        assert discarded == 0, "the bound holds without any discard"
    else:
        assert discarded > 0.9 * len(slow), "a rule that discards what is too old would have lost them"


def test_case_everything_stale() -> None:
    """A stall names what is waited for: who holds the oldest open member, since when; why nothing is issued."""
    ledger = make_ledger(max_staleness=0)
    assert ledger.describe_wait(0.0) == "step 1 waits for 2 of 2 groups; no generator has asked for work"
    leases = ledger.lease("slow", 0, 3, 10.0) + ledger.lease("fast", 0, 3, 11.0)
    for lease in leases[2:]:
        finish(ledger, lease, owner="slow" if lease is leases[2] else "fast")
    finish(ledger, leases[1], owner="slow")
    assert ledger.describe_wait(52.5) == (
        "step 1 waits for 1 of 2 groups; the oldest is ticket 0 (problem '0', 1 of 2 members open): member 0 is held "
        "by 'slow' for 42.5 s, attempt 1; admission is closed: the next ticket needs version 1, and the newest "
        "generator that asked, 'slow', has version 0"
    )
    ledger.release("slow", 60.0)
    assert "member 0 has waited for 2.0 s for a free slot at version 0 or newer" in ledger.describe_wait(62.0)


def test_case_capacity_in_groups() -> None:
    ledger = make_ledger(batch_groups=1, group_size=16, max_staleness=0)
    leases = ledger.lease("a", 0, 100, 0.0)
    assert places(leases) == [(0, member) for member in range(16)]
    results = [make_trajectory(0) for _ in leases]
    for lease, result in zip(leases[:15], results, strict=False):
        ledger.finish("a", lease.ticket, lease.member, lease.attempt, result, 0.0)
        assert ledger.take_batch(0.0) is None, "a group is given whole or not at all"
    ledger.finish("a", 0, 15, 1, results[15], 0.0)
    batch = ledger.take_batch(0.0)
    assert batch is not None and len(batch) == 1
    assert [id(member) for member in batch[0].members] == [id(result) for result in results]


def test_case_producer_10x() -> None:
    """Ten generators' worth of slots for one learner: oldest first, nothing lost, and nothing grows."""
    ledger = make_ledger(batch_groups=4, max_staleness=3, num_problems=2000)
    trained: list[int] = []
    for _ in range(500):
        for _ in range(10):
            for lease in ledger.lease("a", ledger.steps, 64, 0.0):
                finish(ledger, lease, version=ledger.steps)
            assert ledger.counts().buffered <= 4 * (3 + 1)
            assert len(ledger._tickets) + len(ledger._waiting) + len(ledger._leases._open) == 0
            assert len(ledger._buffer._order) == len(ledger._buffer)
        batch = ledger.take_batch(0.0)
        assert batch is not None
        trained += [group.ticket for group in batch]
        ledger.trained(batch)
    assert trained == list(range(2000))


# --- leases --------------------------------------------------------------------------------------


def test_leases_come_oldest_first_and_reopened_members_before_new_tickets() -> None:
    ledger = make_ledger(batch_groups=3)
    first = ledger.lease("a", 0, 3, 0.0)
    assert places(first) == [(0, 0), (0, 1), (1, 0)]
    ledger.release("a", 1.0)
    again = ledger.lease("b", 0, 5, 2.0)
    assert places(again) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [lease.attempt for lease in again] == [2, 2, 2, 1, 1]


def test_members_delivered_before_a_death_stay() -> None:
    ledger = make_ledger()
    leases = ledger.lease("a", 0, 2, 0.0)
    assert finish(ledger, leases[0]) == "stored"
    assert ledger.release("a", 1.0) == [key_of(leases[1])]
    assert places(ledger.lease("b", 0, 1, 2.0)) == [(0, 1)]


def test_a_lagging_generator_gets_no_member_that_its_version_may_not_sample() -> None:
    """Ticket 4 was issued at position 4 = 2 B, which needs version 1: a death must not hand it to version 0."""
    ledger = make_ledger(max_staleness=1)
    run(ledger, 1)
    leases = ledger.lease("new", 1, 100, 0.0)
    assert leases[0].ticket == 4
    ledger.release("new", 0.0)
    assert ledger.lease("old", 0, 100, 0.0) == []
    assert places(ledger.lease("new", 1, 1, 0.0)) == [(4, 0)]


def test_results_are_idempotent() -> None:
    ledger = make_ledger()
    lease = ledger.lease("a", 0, 1, 0.0)[0]
    assert finish(ledger, lease, owner="b") == "unknown", "someone else's lease"
    assert ledger.finish("a", lease.ticket, lease.member, 2, make_trajectory(0), 0.0) == "unknown", "no such attempt"
    assert ledger.finish("a", lease.ticket, 2, 1, make_trajectory(0), 0.0) == "unknown", "no such member"
    assert ledger.finish("a", 99, 0, 1, make_trajectory(0), 0.0) == "unknown", "no such ticket"
    assert [finish(ledger, lease) for _ in range(3)] == ["stored", "duplicate", "duplicate"]
    run(ledger, 1)
    assert finish(ledger, lease) == "duplicate", "its ticket is trained and forgotten"


def test_late_result_is_taken_and_the_attempt_that_replaced_it_is_cancelled() -> None:
    ledger = make_ledger()
    late = ledger.lease("a", 0, 1, 0.0)[0]
    ledger.release("a", 1.0)
    again = ledger.lease("b", 0, 1, 2.0)[0]
    assert finish(ledger, late, owner="a") == "stored"
    assert ledger.take_cancelled() == [("b", key_of(again))]
    assert ledger.take_cancelled() == []
    assert ledger.outstanding("b") == 0
    assert finish(ledger, again, owner="b") == "duplicate"


def test_failed_members_are_retried_up_to_the_limit_and_a_resend_is_no_attempt() -> None:
    ledger = make_ledger(max_attempts=2, group_size=3)
    lease = ledger.lease("a", 0, 1, 0.0)[0]
    answers = [finish(ledger, lease, status="failed") for _ in range(3)]
    assert answers == ["stored", "duplicate", "duplicate"]
    again = ledger.lease("a", 0, 3, 0.0)
    assert [(lease.member, lease.attempt) for lease in again] == [(0, 2), (1, 1), (2, 1)]
    for lease in again[1:]:
        finish(ledger, lease)
    assert ledger.counts().buffered == 0
    assert finish(ledger, again[0], status="failed") == "stored"
    assert ledger.counts().buffered == 1, "the group goes on without its failed member"
    assert ledger.events["failed_members"] == 1


def test_a_failure_that_comes_late_twice_counts_once() -> None:
    ledger = make_ledger(max_attempts=2)
    late = ledger.lease("a", 0, 1, 0.0)[0]
    ledger.release("a", 1.0)
    assert [finish(ledger, late, status="failed") for _ in range(2)] == ["stored", "duplicate"]
    assert ledger.events["failed_attempts"] == 1
    assert ledger.lease("b", 0, 1, 2.0)[0].attempt == 2, "one more attempt is allowed"


def test_group_with_too_few_usable_members_is_dropped_and_its_work_cancelled() -> None:
    ledger = make_ledger(group_size=3, max_attempts=1)
    leases = ledger.lease("a", 0, 3, 0.0)
    finish(ledger, leases[0], status="failed")
    assert ledger.counts().dropped == {}, "two members can still be usable"
    finish(ledger, leases[1], status="failed")
    assert ledger.counts().dropped == {"failed_members": 1}
    assert ledger.take_cancelled() == [("a", key_of(leases[2]))]
    assert ledger.outstanding("a") == 0


def test_a_problem_that_kills_every_generator_is_given_up() -> None:
    ledger = make_ledger(group_size=1, max_losses=3)
    for attempt in (1, 2, 3):
        lease = ledger.lease(f"g{attempt}", 0, 1, 0.0)[0]
        assert (lease.ticket, lease.attempt) == (0, attempt)
        ledger.release(f"g{attempt}", 0.0)
    assert ledger.counts().dropped == {"failed_members": 1}
    assert ledger.lease("g4", 0, 1, 0.0)[0].ticket == 1


def test_returned_leases_wait_again_and_are_no_loss() -> None:
    ledger = make_ledger(group_size=1, max_losses=1)
    for _ in range(5):
        leases = ledger.lease("a", 0, 1, 0.0)
        assert ledger.return_leases("a", [key_of(leases[0])] * 2, 0.0) == [key_of(leases[0])]
    assert ledger.lease("a", 0, 1, 0.0)[0].attempt == 6


def test_reconcile_reopens_what_never_arrived_and_adopts_what_was_taken_back() -> None:
    ledger = make_ledger(batch_groups=3)
    leases = ledger.lease("a", 0, 3, 10.0)
    keys = [key_of(lease) for lease in leases]
    young = key_of(ledger.lease("a", 0, 1, 30.0)[0])
    found = ledger.reconcile("a", [keys[0], keys[1]], sent_before=20.0, now=31.0)
    assert (found.lost, found.adopted, found.unwanted) == ((keys[2],), (), ()), f"{young} may be on its way"
    assert ledger.outstanding("a") == 3
    ledger.release("a", 40.0)
    finish(ledger, leases[1])
    stranger = LeaseKey(kind="train", ticket=50, member=0, attempt=1)
    other = LeaseKey(kind="eval", ticket=0, member=0, attempt=1)
    found = ledger.reconcile("a", [keys[0], keys[1], stranger, other], sent_before=41.0, now=41.0)
    assert (found.lost, found.adopted, found.unwanted) == ((), (keys[0],), (keys[1], stranger))
    assert ledger.outstanding("a") == 1
    assert finish(ledger, leases[0]) == "stored"


def test_tokens_older_than_the_lease_are_refused() -> None:
    """A generator that says version 1 and samples with version 0 has a stale engine."""
    ledger = make_ledger(max_staleness=2)
    run(ledger, 1)
    lease = ledger.lease("a", 1, 1, 0.0)[0]
    with pytest.raises(ProtocolError, match=r"'a' returned ticket 6 member 0 with tokens of version 0.*version 1"):
        finish(ledger, lease, version=0)
    ledger.check()
    assert finish(ledger, lease, version=1) == "duplicate", "that attempt is over"
    again = ledger.lease("b", 1, 1, 0.0)[0]
    assert (again.ticket, again.member, again.attempt) == (lease.ticket, lease.member, 2)
    assert finish(ledger, again, owner="b", version=1) == "stored"


def test_refused_tokens_use_up_the_attempts_of_a_member() -> None:
    """One stale engine must not keep a member for itself forever."""
    ledger = make_ledger(group_size=1, max_staleness=2, max_attempts=3)
    run(ledger, 1)
    ticket = ledger.issued
    for attempt in (1, 2, 3):
        lease = ledger.lease("a", 1, 1, 0.0)[0]
        assert (lease.ticket, lease.attempt) == (ticket, attempt)
        with pytest.raises(ProtocolError):
            finish(ledger, lease, version=0)
    assert ledger.counts().dropped == {"failed_members": 1}
    ledger.check()


def test_a_lease_past_its_deadline_goes_to_another_and_its_slot_stays_taken() -> None:
    ledger = make_ledger(group_size=1)
    old = ledger.lease("slow", 0, 1, 10.0)[0]
    new = ledger.lease("slow", 0, 1, 15.0)[0]
    assert ledger.expire(10.0, 19.9) == []
    assert ledger.expire(10.0, 20.0) == [("slow", key_of(old))]
    assert ledger.expire(10.0, 20.0) == [], "once"
    assert (ledger.outstanding("slow"), ledger.overdue("slow")) == (2, 1), "it may still work on both"
    found = ledger.reconcile("slow", [key_of(old), key_of(new)], sent_before=20.0, now=20.0)
    assert (found.lost, found.adopted, found.unwanted) == ((), (), ()), "it may go on, and does not get it back"
    again = ledger.lease("quick", 0, 1, 20.0)[0]
    assert (again.ticket, again.attempt) == (old.ticket, 2)
    assert finish(ledger, again, owner="quick") == "stored"
    assert ledger.take_cancelled() == [("slow", key_of(old))]
    assert (ledger.outstanding("slow"), ledger.overdue("slow")) == (1, 0)
    assert ledger.events["expired_leases"] == 1
    ledger.check()


def test_a_result_that_comes_after_the_deadline_still_counts() -> None:
    ledger = make_ledger(group_size=1)
    lease = ledger.lease("slow", 0, 1, 0.0)[0]
    ledger.expire(10.0, 10.0)
    other = ledger.lease("quick", 0, 1, 10.0)[0]
    assert finish(ledger, lease, owner="slow") == "stored"
    assert ledger.take_cancelled() == [("quick", key_of(other))]
    assert (ledger.outstanding("slow"), ledger.outstanding("quick")) == (0, 0)
    ledger.check()


def test_each_expiry_doubles_the_deadline_of_its_member() -> None:
    """Completions that take longer than the deadline are not sampled by more and more generators at once."""
    ledger = make_ledger(group_size=1, max_losses=16)
    expired_at = []
    now, owner = 0.0, 0
    while len(expired_at) < 4:
        ledger.lease(f"g{owner}", 0, 1, now)
        while not ledger.expire(10.0, now):
            now += 1.0
        expired_at.append(now)
        owner += 1
    assert expired_at == [10.0, 30.0, 70.0, 150.0]


def test_a_slot_is_free_again_once_its_owner_no_longer_reports_the_lease() -> None:
    ledger = make_ledger(group_size=1, max_losses=1)
    lease = ledger.lease("a", 0, 1, 0.0)[0]
    ledger.expire(10.0, 10.0)
    assert ledger.counts().dropped == {"failed_members": 1}, "it was its last allowed loss"
    assert ledger.take_cancelled() == [("a", key_of(lease))]
    assert ledger.outstanding("a") == 0
    ledger = make_ledger(group_size=1)
    for way in (lambda: ledger.reconcile("a", [], 99.0, 99.0), lambda: ledger.release("a", 99.0)):
        ledger.lease("a", 0, 1, 0.0)
        ledger.expire(10.0, 50.0)
        assert ledger.outstanding("a") == 1
        way()
        assert (ledger.outstanding("a"), ledger.overdue("a")) == (0, 0)
        ledger.check()


def test_after_a_restart_deadlines_begin_anew() -> None:
    ledger = make_ledger(group_size=1)
    lease = ledger.lease("a", 0, 1, 0.0)[0]
    late = ledger.lease("b", 0, 1, -60.0)[0]
    assert ledger.expire(50.0, 0.0) == [("b", key_of(late))]
    restored = make_ledger(group_size=1)
    restored.restore(ledger.state())
    restored.check()
    assert (restored.outstanding("a"), restored.overdue("b")) == (1, 1)
    assert restored.expire(50.0, 1000.0) == []
    assert restored.expire(50.0, 1049.0) == []
    assert restored.expire(50.0, 1050.0) == [("a", key_of(lease))]


def test_tokens_of_a_version_that_a_dead_learner_made_are_not_taken() -> None:
    ledger = make_ledger()
    lease = ledger.lease("a", 0, 1, 0.0)[0]
    assert finish(ledger, lease, version=1) == "unknown"
    assert ledger.events["from_lost_future"] == 1
    assert finish(ledger, lease, version=0) == "stored"


# --- admission, window, batch ----------------------------------------------------------------------


def test_admission_by_hand() -> None:
    """B = 2, run_ahead = 1: version 0 admits positions 0..3, version 1 also 4 and 5; a drop makes room for one."""
    ledger = make_ledger(group_size=1)
    assert [lease.ticket for lease in ledger.lease("a", 0, 100, 0.0)] == [0, 1, 2, 3]
    assert ledger.lease("a", 0, 100, 0.0) == []
    assert [lease.ticket for lease in ledger.lease("b", 1, 100, 0.0)] == [4, 5]
    ledger.drop(1, "zero_variance")
    assert ledger.lease("a", 0, 100, 0.0) == []
    assert [lease.ticket for lease in ledger.lease("b", 1, 100, 0.0)] == [6]


def test_window_by_hand() -> None:
    """B = 1, W = 3, ticket 0 is slow: tickets 1 and 2 may overtake it, ticket 3 may not."""
    ledger = make_ledger(batch_groups=1, group_size=1, max_staleness=4, overdue="wait", reorder_window=3)
    leases = ledger.lease("a", 0, 100, 0.0)
    assert len(leases) == 3, "run_ahead = 4 - ceil(2 / 1) = 2"
    leases += ledger.lease("a", 1, 100, 0.0)
    for lease in leases[1:]:
        finish(ledger, lease, version=lease.ticket // 3)
    taken = []
    while batch := ledger.take_batch(0.0):
        taken.append(batch[0].ticket)
        ledger.trained(batch)
    assert taken == [1, 2]
    finish(ledger, leases[0])
    batch = ledger.take_batch(0.0)
    assert batch is not None and batch[0].ticket == 0
    assert trajectory_staleness(3, batch[0].members[0].versions) == 2


def test_example_of_the_documentation() -> None:
    """The table of docs/staleness.md, row by row."""
    ledger = make_ledger(group_size=1, max_staleness=2, overdue="wait", reorder_window=3)
    straggler, batches = None, []
    for version, issued, batch in ((0, [0, 1, 2, 3], [0, 1]), (1, [4, 5], [2, 4]), (2, [6, 7], None)):
        leases = ledger.lease("a", version, 100, 0.0)
        assert [lease.ticket for lease in leases] == issued
        straggler = leases[3] if version == 0 else straggler
        for lease in leases:
            if lease is not straggler:
                finish(ledger, lease, version=version)
        batches.append(ledger.take_batch(0.0))
        assert (batch is None) == (batches[-1] is None)
        if batches[-1] is not None:
            assert [group.ticket for group in batches[-1]] == batch
            ledger.trained(batches[-1])
    assert straggler is not None and straggler.ticket == 3
    finish(ledger, straggler)
    batches[2] = ledger.take_batch(0.0)
    ages = [
        [trajectory_staleness(step, group.members[0].versions) for group in batch or ()]
        for step, batch in enumerate(batches, start=1)
    ]
    assert ages == [[0, 0], [1, 0], [2, 1]]


def test_no_more_tickets_than_the_steps_of_the_run_consume() -> None:
    ledger = make_ledger(group_size=1, max_staleness=5, total_steps=2)
    assert [lease.ticket for lease in ledger.lease("a", 0, 100, 0.0)] == [0, 1, 2, 3]
    ledger.drop(3, "zero_variance")
    assert [lease.ticket for lease in ledger.lease("a", 0, 100, 0.0)] == [4], "a drop is made up for"
    for ticket in (0, 1, 2, 4):
        ledger.finish("a", ticket, 0, 1, make_trajectory(0), 0.0)
    run(ledger, 2)
    assert ledger.finished and ledger.lease("a", 2, 100, 0.0) == []
    assert ledger.describe_wait(0.0) == "nothing: the run is at its end after 2 steps"


def test_groups_dropped_from_a_batch_do_not_raise_admission() -> None:
    """A step uses up its place in the order even if it trains fewer groups."""
    ledger = make_ledger(group_size=1)
    for lease in ledger.lease("a", 0, 100, 0.0):
        finish(ledger, lease)
    batch = ledger.take_batch(0.0)
    assert batch is not None
    ledger.drop(batch[0].ticket, "zero_variance")
    assert ledger.lease("a", 0, 100, 0.0) == []
    ledger.trained(batch)
    assert ledger.counts().trained == 1 and ledger.counts().dropped == {"zero_variance": 1}
    assert len(ledger.lease("a", 1, 100, 0.0)) == 2


def finish_group(ledger: Ledger, rewards: list[float]) -> None:
    for lease, reward in zip(ledger.lease("a", ledger.steps, len(rewards), 0.0), rewards, strict=True):
        finish(ledger, lease, version=ledger.steps, reward=reward)


def test_groups_with_equal_rewards_are_refilled_up_to_the_limit_of_each_batch() -> None:
    ledger = make_ledger(max_staleness=0, max_refills=2)
    for rewards in ([1.0, 1.0], [0.5, 1.0], [0.0, 0.0]):
        finish_group(ledger, rewards)
    assert (ledger.counts().buffered, ledger.counts().dropped) == (1, {"zero_variance": 2})
    finish_group(ledger, [1.0, 1.0])  # The limit is reached: equal rewards train as they are.
    batch = ledger.take_batch(0.0)
    assert batch is not None
    assert [group.ticket for group in batch] == [1, 3]
    ledger.trained(batch)
    finish_group(ledger, [1.0, 1.0])
    assert ledger.counts().dropped == {"zero_variance": 3}, "the next batch has a limit of its own"
    assert ledger.dropped_tokens == 3 * 2 * 2, "groups x members x tokens"
    ledger.check()


def test_without_refills_groups_with_equal_rewards_train() -> None:
    ledger = make_ledger()
    run(ledger, 3)
    assert (ledger.counts().trained, ledger.counts().dropped) == (6, {})


def test_one_usable_member_is_a_group_of_equal_rewards() -> None:
    ledger = make_ledger(max_attempts=1, min_group_members=1, max_refills=1)
    first, second = ledger.lease("a", 0, 2, 0.0)
    finish(ledger, first, status="failed")
    finish(ledger, second)
    assert ledger.counts().dropped == {"zero_variance": 1}


def remax_ledger(**settings) -> Ledger:  # type: ignore[no-untyped-def]
    return make_ledger(**{"batch_groups": 1, "max_attempts": 1, "baseline": True, **settings})


def test_a_baseline_member_is_leased_with_its_group_and_is_none_of_its_members() -> None:
    ledger = remax_ledger(group_size=2)
    leases = ledger.lease("a", 0, 3, 0.0)
    assert [(lease.ticket, lease.member, lease.greedy) for lease in leases] == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, True),
    ]
    assert ledger.finish("a", 0, 3, 1, make_trajectory(0), 1.0) == "unknown", "there is no fourth member"
    for lease, reward in zip(leases, (1.0, 0.0, 0.5), strict=True):
        assert ledger.take_batch(1.0) is None
        assert finish(ledger, lease, reward=reward) == "stored"
    assert finish(ledger, leases[2]) == "duplicate"
    batch = ledger.take_batch(1.0)
    assert batch is not None and batch[0].baseline is not None
    assert [member.reward for member in batch[0].members] == [1.0, 0.0]
    assert batch[0].baseline.reward == 0.5
    ledger.check()


def test_without_a_baseline_there_is_no_greedy_member() -> None:
    ledger = make_ledger(batch_groups=1, group_size=2)
    leases = ledger.lease("a", 0, 2, 0.0)
    assert not any(lease.greedy for lease in leases)
    for lease in leases:
        finish(ledger, lease)
    batch = ledger.take_batch(1.0)
    assert batch is not None and batch[0].baseline is None and len(batch[0].members) == 2


def test_a_group_without_its_baseline_is_dropped_with_a_reason_of_its_own() -> None:
    ledger = remax_ledger(group_size=2, max_attempts=2)
    first, second, baseline = ledger.lease("a", 0, 3, 0.0)
    finish(ledger, first)
    assert finish(ledger, baseline, status="failed") == "stored"
    again = ledger.lease("a", 0, 1, 1.0)[0]
    assert (again.member, again.attempt, again.greedy) == (2, 2, True)
    assert ledger.counts().dropped == {}
    finish(ledger, again, status="failed")
    assert ledger.counts().dropped == {"failed_baseline": 1}
    assert ledger.take_cancelled() == [("a", key_of(second))]
    assert ledger.dropped_tokens == 2, "the tokens of the member that was there"
    ledger.check()


def test_one_usable_member_is_enough_beside_a_baseline() -> None:
    ledger = remax_ledger(group_size=2)
    first, second, baseline = ledger.lease("a", 0, 3, 0.0)
    finish(ledger, first, status="failed")
    finish(ledger, baseline)
    finish(ledger, second)
    assert ledger.counts().buffered == 1
    ledger.drop(0, "by_hand")
    assert ledger.dropped_tokens == 4, "two of the member, two of the baseline"
    first, second, _ = ledger.lease("a", 0, 3, 1.0)
    finish(ledger, first, status="failed")
    finish(ledger, second, status="failed")
    assert ledger.counts().dropped == {"by_hand": 1, "failed_members": 1}


@pytest.mark.parametrize(("greedy", "dropped"), [(1.0, {"zero_variance": 1}), (0.0, {})])
def test_the_signal_of_a_group_with_a_baseline_is_the_difference_to_it(greedy: float, dropped: dict[str, int]) -> None:
    for size in (1, 2):
        ledger = remax_ledger(group_size=size, max_refills=1)
        *members, baseline = ledger.lease("a", 0, size + 1, 0.0)
        for lease in members:
            finish(ledger, lease, reward=1.0)
        finish(ledger, baseline, reward=greedy)
        assert ledger.counts().dropped == dropped


def test_baseline_members_survive_a_restore_and_cannot_be_switched_on_for_open_tickets() -> None:
    ledger = remax_ledger(group_size=1)
    member, baseline = ledger.lease("a", 0, 2, 0.0)
    finish(ledger, member, reward=1.0)
    restored = remax_ledger(group_size=1)
    restored.restore(ledger.state())
    assert finish(restored, baseline, reward=0.0) == "stored"
    twice = remax_ledger(group_size=1)
    twice.restore(restored.state())
    batch = twice.take_batch(1.0)
    assert batch is not None and batch[0].baseline is not None and batch[0].baseline.reward == 0.0
    with pytest.raises(ValueError, match="baseline = False, but the checkpoint's tickets were issued under baseline"):
        make_ledger(batch_groups=1, group_size=1).restore(ledger.state())


def test_refills_left_survive_a_restore() -> None:
    before = make_ledger(max_refills=1)
    finish_group(before, [1.0, 1.0])
    after = make_ledger(max_refills=1)
    after.restore(before.state())
    finish_group(after, [1.0, 1.0])
    assert (after.counts().buffered, after.counts().dropped) == (1, {"zero_variance": 1})


def test_refills_at_the_end_of_the_data_leave_a_tail() -> None:
    ledger = make_ledger(num_problems=3, max_refills=9)
    for _ in range(3):
        finish_group(ledger, [0.0, 0.0])
    ledger.lease("a", 0, 1, 0.0)
    assert ledger.finished
    assert sum(ledger.counts().dropped.values()) == 3


def test_one_batch_at_a_time() -> None:
    ledger = make_ledger(group_size=1)
    for lease in ledger.lease("a", 0, 100, 0.0):
        finish(ledger, lease)
    assert ledger.take_batch(0.0) is not None
    assert not ledger.ready()
    with pytest.raises(AssertionError, match="step 1 is still in training"):
        ledger.take_batch(0.0)


# --- checkpoints, settings --------------------------------------------------------------------------


def test_a_batch_in_flight_is_taken_again_after_a_restore() -> None:
    before = make_ledger()
    for lease in before.lease("a", 0, 100, 0.0):
        finish(before, lease)
    batch = before.take_batch(0.0)
    resumed = make_ledger()
    resumed.restore(before.state())
    again = resumed.take_batch(0.0)
    assert batch is not None and again is not None
    assert [group.ticket for group in again] == [group.ticket for group in batch] == [0, 1]
    assert again[0].members[0].behavior_logprobs.tolist() == batch[0].members[0].behavior_logprobs.tolist()


def test_restored_leases_belong_to_their_owners() -> None:
    before = make_ledger()
    leases = before.lease("a", 0, 4, 5.0)
    resumed = make_ledger()
    resumed.restore(before.state())
    assert resumed.owners() == ("a",)
    assert "held by 'a' since before the learner restarted" in resumed.describe_wait(0.5)
    found = resumed.reconcile("a", [key_of(lease) for lease in leases[:3]], sent_before=0.1, now=0.1)
    assert found.lost == (key_of(leases[3]),)
    assert finish(resumed, leases[0]) == "stored"


def test_restore_refuses_settings_that_the_bound_depends_on() -> None:
    data = make_ledger(batch_groups=2).state()
    with pytest.raises(ValueError, match=r"batch_groups = 3.*issued under batch_groups = 2"):
        make_ledger(batch_groups=3).restore(data)
    make_ledger(batch_groups=2, max_attempts=9, total_steps=5).restore(data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"publish_every": 3}, "smallest max_staleness that works is 2"),
        ({"overdue": "wait", "max_staleness": 0}, "smallest max_staleness that works is 1"),
        ({"overdue": "wait", "reorder_window": 0}, "reorder_window = 0"),
        ({"batch_groups": 0}, "batch_groups = 0"),
        ({"min_group_members": 3}, "min_group_members = 3, expected 1 to group_size = 2"),
    ],
)
def test_settings_that_cannot_make_progress_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_ledger(**values)
