"""Ledger and problems across a checkpoint: the same work, or a refusal with both values, or a counted loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.checkpoints.contents import describe, rows_of, summary
from async_rl.checkpoints.differences import changed_settings
from async_rl.checkpoints.state import RunState, read_state
from async_rl.checkpoints.work import capture, restore
from async_rl.errors import InputError
from tests.checkpoints.rig import Problems, busy, make_ledger, save
from tests.ledger_world import key_of, make_trajectory


def test_work_goes_on_where_it_was() -> None:
    problems, after = Problems(), Problems()
    before = busy(problems)
    ledger = make_ledger(after)
    assert restore(capture(before, problems.state()), ledger, after) == []
    ledger.check()
    assert ledger.counts() == before.counts()
    assert after.drawn == problems.drawn == 3
    assert ledger.owners() == ("g0",)
    assert [key_of(lease) for lease in ledger.lease("g2", 0, 9, 0.0)] == [
        key_of(lease) for lease in before.lease("g2", 0, 9, 0.0)
    ]


def test_other_problems_are_refused_or_cost_the_tickets_under_way() -> None:
    problems, other = Problems(), Problems("id-2")
    data = capture(busy(problems), problems.state())
    with pytest.raises(InputError, match=r"identity id-1 is not id-2"):
        restore(data, make_ledger(other), other)
    with pytest.raises(InputError, match=r"identity"):
        restore(data, make_ledger(other), other, ("tickets",))
    ledger = make_ledger(other)
    notes = restore(data, ledger, other, ("problems",))
    assert notes == ["3 tickets under way are dropped (problems_changed), as checkpoint.accept_changed allows"]
    ledger.check()
    assert ledger.counts().dropped == {"problems_changed": 3} and ledger.counts().issued == 3
    lease = ledger.lease("g", 0, 1, 0.0)[0]
    assert (lease.ticket, lease.problem.id) == (3, "0"), "the new problems begin at their first"


def test_other_binding_settings_are_refused_or_cost_the_tickets_under_way() -> None:
    problems = Problems()
    data = capture(busy(problems), problems.state())
    with pytest.raises(InputError, match=r"batch_groups = 4, but .* under batch_groups = 2.*accept_changed=tickets"):
        restore(data, make_ledger(Problems(), batch_groups=4), Problems())
    after = Problems()
    ledger = make_ledger(after, batch_groups=4)
    assert restore(data, ledger, after, ("tickets",)) == [
        "3 tickets under way are dropped (settings_changed), as checkpoint.accept_changed allows"
    ]
    ledger.check()
    assert ledger.settings.batch_groups == 4 and after.drawn == 3, "the problems go on after those drawn"


def test_what_is_accepted_costs_nothing_where_nothing_changed() -> None:
    problems, after = Problems(), Problems()
    ledger = make_ledger(after)
    assert restore(capture(busy(problems), problems.state()), ledger, after, ("problems", "tickets")) == []
    assert ledger.counts().buffered == 1


def test_late_results_of_tickets_that_were_given_up_change_nothing() -> None:
    problems, after = Problems(), Problems()
    before = busy(problems)
    ledger = make_ledger(after, batch_groups=4)
    restore(capture(before, problems.state()), ledger, after, ("tickets",))
    assert ledger.finish("g0", 1, 1, 1, make_trajectory(0), 9.0) == "duplicate"
    ledger.check()


def test_inspection_shows_every_member_under_way() -> None:
    problems = Problems()
    state = RunState(step=0, work=np.frombuffer(capture(busy(problems), problems.state()), np.uint8))
    rows = list(rows_of(state))
    assert [(row.ticket, row.member, row.place) for row in rows] == [
        (0, 0, "buffered"), (0, 1, "buffered"), (1, 0, "partial"), (1, 1, "leased"),
        (2, 0, "waiting"), (2, 1, "waiting"),
    ]  # fmt: skip
    assert [(row.reward, row.versions, row.staleness) for row in rows[:3]] == [
        (0.0, (0, 0), 0), (1.0, (0, 0), 0), (0.0, (0, 0), 0),
    ]  # fmt: skip
    assert rows[3].owner == "g0" and rows[4].owner is None
    assert "reward 1.0, complete, 2 tokens, version 0, staleness 0" in describe(rows[1])
    assert "leased to g0" in describe(rows[3])
    assert summary(state) == (
        "step 0: 3 problems drawn, 0 trained, 1 groups buffered, 2 tickets with members open, dropped: none"
    )


def test_inspection_names_greedy_completions() -> None:
    problems = Problems()
    ledger = make_ledger(problems, group_size=1, batch_groups=2, baseline=True)
    leases = ledger.lease("g0", 0, 4, 1.0)
    for lease in leases[:2]:
        ledger.finish("g0", lease.ticket, lease.member, lease.attempt, make_trajectory(0, reward=0.5), 2.0)
    lease = leases[3]
    ledger.finish("g0", lease.ticket, lease.member, lease.attempt, make_trajectory(0, reward=0.25), 2.0)
    state = RunState(step=0, work=np.frombuffer(capture(ledger, problems.state()), np.uint8))
    rows = list(rows_of(state))
    assert [(row.ticket, row.member, row.baseline, row.place, row.reward) for row in rows] == [
        (0, 0, False, "buffered", 0.5), (0, 1, True, "buffered", 0.5), (1, 0, False, "leased", None),
        (1, 1, True, "partial", 0.25),
    ]  # fmt: skip
    assert describe(rows[1]).startswith("ticket 0 baseline  ") and describe(rows[0]).startswith("ticket 0 member 0  ")


def test_state_is_read_back_from_a_checkpoint(tmp_path: Path) -> None:
    state = read_state(save(tmp_path, 7).path)
    assert state.step == 7 and len(list(rows_of(state))) == 6


def test_changes_that_matter_are_named_with_both_values() -> None:
    saved = {
        "learner": {"lr": 1e-5, "ranks": 1, "betas": [0.9, 0.95]},
        "run": {"seed": 0, "dir": "a"},
        "model": {"path": "m"},
    }
    now = {
        "learner": {"lr": 1e-6, "ranks": 2, "betas": (0.9, 0.95)},
        "run": {"seed": 1, "dir": "b"},
        "model": {"path": "m"},
    }
    assert changed_settings(saved, now) == ["learner.lr = 1e-06 (was 1e-05)", "run.seed = 1 (was 0)"]
