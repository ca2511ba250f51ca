"""From groups to tokens in the loss: advantages, staleness, masks, order."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl.learner.batch import minibatch_sequences, prepare_batch, token_staleness
from tests.learner.helpers import make_config, make_group, make_groups, make_trajectory


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_staleness_counts_from_the_version_that_the_step_starts_with(rng: np.random.Generator) -> None:
    """A trajectory of versions 7 to 9 that is trained in step 12 is 12 - 1 - 7 = 4 steps old at its oldest token."""
    trajectory = make_trajectory(rng, 5, 1.0, versions=[(7, 0, 2), (9, 2, 5)])
    assert token_staleness(trajectory, 12).tolist() == [4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("overdue", "positions", "staleness"), [("mask", [2, 3, 4], [2, 2, 2]), ("keep", [0, 1, 2, 3, 4], [4, 4, 2, 2, 2])]
)
def test_overdue_tokens(rng: np.random.Generator, overdue: str, positions: list[int], staleness: list[int]) -> None:
    config = make_config(staleness={"max_staleness": 3, "overdue": overdue}, sampling={"group_size": 2})
    old = make_trajectory(rng, 5, 1.0, versions=[(7, 0, 2), (9, 2, 5)])
    fresh = make_trajectory(rng, 1, 0.0, versions=[(11, 0, 1)])
    batch = prepare_batch([make_group(rng, 0, 3, [old, fresh])], 12, config)
    assert batch.sequences[0].positions.tolist() == positions
    assert batch.staleness.tolist() == [*staleness, 0]
    values = batch.metrics.resolve()
    assert values["staleness/max"] == max(staleness)
    assert values["staleness/mean"] == pytest.approx(sum(staleness) / (len(staleness) + 1))
    assert values["staleness/overdue_token_share"] == pytest.approx(2 / 6)


def test_overdue_tokens_cannot_be_there_when_the_learner_waits_for_stragglers(rng: np.random.Generator) -> None:
    config = make_config(staleness={"max_staleness": 1, "overdue": "wait"}, sampling={"group_size": 1})
    group = make_group(rng, 5, 3, [make_trajectory(rng, 4, 1.0)])
    with pytest.raises(AssertionError, match="ticket 5 has tokens of staleness 3 in step 4"):
        prepare_batch([group], 4, config)


def test_a_wholly_overdue_trajectory_leaves_the_loss_but_not_the_baseline(rng: np.random.Generator) -> None:
    config = make_config(
        staleness={"max_staleness": 1}, sampling={"group_size": 3}, algorithm={"advantage": {"type": "rloo"}}
    )
    members = [
        make_trajectory(rng, 3, 1.0, versions=[(0, 0, 3)]),
        make_trajectory(rng, 2, 0.0, versions=[(3, 0, 2)]),
        make_trajectory(rng, 2, 0.0, versions=[(3, 0, 2)]),
    ]
    batch = prepare_batch([make_group(rng, 0, 3, members)], 4, config)
    assert [sequence.slot for sequence in batch.sequences] == [1, 2]
    assert [sequence.advantage for sequence in batch.sequences] == [-0.5, -0.5]


def test_failed_members_take_no_part(rng: np.random.Generator) -> None:
    config = make_config(sampling={"group_size": 4}, algorithm={"advantage": {"type": "rloo"}})
    members = [make_trajectory(rng, 2, 1.0), make_trajectory(rng, 2, None), make_trajectory(rng, 2, 0.0)]
    batch = prepare_batch([make_group(rng, 0, 3, members)], 1, config)
    assert [sequence.advantage for sequence in batch.sequences] == [1.0, -1.0]
    values = batch.metrics.resolve()
    assert values["reward/mean"] == 0.5
    assert values["reward/failed_share"] == 0.5  # one failed, and one that the ledger had left out already


def test_a_greedy_completion_is_the_baseline_and_nothing_else(rng: np.random.Generator) -> None:
    config = make_config(sampling={"group_size": 2}, algorithm={"advantage": {"type": "remax"}})
    members = [make_trajectory(rng, 2, 1.0), make_trajectory(rng, 3, 0.0)]
    group, single = make_group(rng, 0, 3, members), make_group(rng, 1, 3, members[:1])
    greedy = make_trajectory(rng, 9, 0.25, versions=[(0, 0, 9)])
    groups = [msgspec.structs.replace(g, baseline=greedy) for g in (group, single)]
    batch = prepare_batch(groups, 1, config)
    assert [sequence.advantage for sequence in batch.sequences] == [0.75, -0.25, 0.75]
    assert batch.num_tokens == 2 + 3 + 2
    values = batch.metrics.resolve()
    assert values["reward/baseline_mean"] == 0.25
    assert values["reward/mean"] == pytest.approx(2 / 3)
    assert values["completion/length_max"] == 3
    assert values["reward/failed_share"] == 0.25
    assert values["group/zero_variance_share"] == 0.0, "one member alone has a signal against its baseline"
    plain = prepare_batch([group, single], 1, make_config(sampling={"group_size": 2})).metrics.resolve()
    assert "reward/baseline_mean" not in plain


def test_unsampled_tokens_are_read_but_not_in_the_loss(rng: np.random.Generator) -> None:
    config = make_config(sampling={"group_size": 1})
    trajectory = make_trajectory(rng, 6, 1.0, mask=[1, 1, 0, 0, 1, 0])
    batch = prepare_batch([make_group(rng, 0, 2, [trajectory])], 1, config)
    assert batch.sequences[0].positions.tolist() == [0, 1, 4]
    assert batch.sequences[0].completion_ids.tolist() == trajectory.completion_ids[:5].tolist()
    assert batch.behavior_logprobs.tolist() == trajectory.behavior_logprobs[[0, 1, 4]].tolist()


def test_order_of_arrival_changes_nothing() -> None:
    groups, config = make_groups(groups=4), make_config()
    batch, shuffled = prepare_batch(groups, 1, config), prepare_batch([groups[i] for i in (2, 0, 3, 1)], 1, config)
    assert batch.offsets.tolist() == shuffled.offsets.tolist()
    assert batch.behavior_logprobs.tolist() == shuffled.behavior_logprobs.tolist()
    assert [s.completion_ids.tolist() for s in batch.sequences] == [
        s.completion_ids.tolist() for s in shuffled.sequences
    ]
    assert batch.token_advantages().tolist() == shuffled.token_advantages().tolist()


def test_minibatches_hold_equal_slots_and_each_sequence_once(rng: np.random.Generator) -> None:
    config = make_config(sampling={"group_size": 4})
    groups = [make_group(rng, t, 2, [make_trajectory(rng, 2, float(m % 2)) for m in range(4 - t)]) for t in range(3)]
    batch = prepare_batch(groups, 1, config)
    parts = [[batch.sequences[i].slot for i in part] for part in minibatch_sequences(batch, 3)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6], [8, 9]]
    parts = [[batch.sequences[i].slot for i in part] for part in minibatch_sequences(batch, 2)]
    assert parts == [[0, 1, 2, 3, 4, 5], [6, 8, 9]]


def test_zero_variance_and_lengths_are_counted() -> None:
    values = prepare_batch(make_groups(), 1, make_config()).metrics.resolve()
    assert values["group/zero_variance_share"] == pytest.approx(1 / 3)
    assert values["group/trained"] == 3
    lengths = [len(member.completion_ids) for group in make_groups() for member in group.members]
    assert values["completion/length_mean"] == pytest.approx(np.mean(lengths))
    assert values["completion/length_max"] == max(lengths)


def test_overdue_share_by_length_quarter(rng: np.random.Generator) -> None:
    """Four completions of 1, 2, 3, 4 tokens whose first token is overdue in the longest only."""
    config = make_config(staleness={"max_staleness": 0}, sampling={"group_size": 4})
    members = [make_trajectory(rng, n, float(n % 2), versions=[(1, 0, n)]) for n in (3, 1, 2)]
    members.append(make_trajectory(rng, 4, 0.0, versions=[(0, 0, 1), (1, 1, 4)]))
    values = prepare_batch([make_group(rng, 0, 2, members)], 2, config).metrics.resolve()
    shares = [values[f"staleness/overdue_token_share_q{quarter}"] for quarter in (1, 2, 3, 4)]
    assert shares == [0.0, 0.0, 0.0, 0.25]
    assert values["staleness/overdue_token_share"] == 0.1


def test_nothing_scored_is_an_empty_batch(rng: np.random.Generator) -> None:
    batch = prepare_batch([make_group(rng, 0, 2, [make_trajectory(rng, 2, None)])], 1, make_config())
    assert batch.num_tokens == 0
    assert batch.sequences == ()
    assert [part.tolist() for part in minibatch_sequences(batch, 2)] == [[], []]
