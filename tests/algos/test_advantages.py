"""Advantage estimators against loops; groups of one, failed members and equal rewards in every one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.algos.advantages import compute_advantages, compute_batch_advantages, opo, remax
from async_rl.config.schema import (
    Advantage,
    GrpoAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)
from tests.reference import advantages as reference

ESTIMATORS: list[Advantage] = [
    GrpoAdvantage(),
    GrpoAdvantage(std="population", eps=0.0),
    GrpoAdvantage(std="none"),
    RlooAdvantage(),
    OpoAdvantage(),
    ReinforcePlusPlusAdvantage(),
    ReinforcePlusPlusAdvantage(baseline="none", eps=0.0),
]
each_estimator = pytest.mark.parametrize("config", ESTIMATORS, ids=str)


def literal(config: Advantage, groups: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    match config:
        case GrpoAdvantage(std="none"):
            return [reference.dr_grpo(group) for group in groups]
        case GrpoAdvantage():
            return [reference.grpo(group, config.eps, config.std == "sample") for group in groups]
        case RlooAdvantage():
            return [reference.rloo(group) for group in groups]
        case OpoAdvantage():
            return [reference.opo(group, sizes) for group, sizes in zip(groups, lengths, strict=True)]
        case ReinforcePlusPlusAdvantage():
            return reference.reinforce_plus_plus(groups, config.baseline == "group", config.eps)
        case RemaxAdvantage():
            raise AssertionError("its baseline is no member: it has tests of its own")


def test_every_estimator_is_here() -> None:
    """ReMax, whose baseline comes from outside of the group, has tests of its own below."""
    assert {type(config) for config in ESTIMATORS} | {RemaxAdvantage} == set(get_args(Advantage))


def flat(groups: Sequence[Sequence[float | None]]) -> list[float]:
    return [value for group in groups for value in group if value is not None]


@each_estimator
def test_against_the_reference(config: Advantage) -> None:
    generator = random.Random(0)
    for _ in range(50):
        sizes = [generator.randint(2, 9) for _ in range(4)]
        groups = [[generator.choice([0.0, 1.0, generator.gauss(0, 3)]) for _ in range(size)] for size in sizes]
        groups = [group if max(group) > min(group) else [*group[:-1], group[-1] + 1] for group in groups]
        lengths = [[generator.randint(1, 40) for _ in group] for group in groups]
        actual = compute_batch_advantages(config, groups, lengths)
        assert flat(actual) == pytest.approx(flat(literal(config, groups, lengths)), rel=1e-9, abs=1e-12)


@each_estimator
@given(data=st.data())
def test_failed_members_change_nothing_and_have_no_advantage(config: Advantage, data: st.DataObject) -> None:
    group = st.lists(st.one_of(st.none(), st.floats(-10, 10, width=32)), min_size=1, max_size=8)
    groups = data.draw(st.lists(group, min_size=1, max_size=5))
    lengths = [list(range(1, len(group) + 1)) for group in groups]
    scored = [[reward for reward in group if reward is not None] for group in groups]
    kept = [
        [length for reward, length in zip(group, sizes, strict=True) if reward is not None]
        for group, sizes in zip(groups, lengths, strict=True)
    ]
    actual = compute_batch_advantages(config, groups, lengths)
    assert [[value is None for value in group] for group in actual] == [[r is None for r in group] for group in groups]
    assert flat(actual) == flat(compute_batch_advantages(config, scored, kept))


@each_estimator
@pytest.mark.parametrize(
    "rewards",
    [
        [0.95] * 8,
        [0.1 + 0.2, 0.3, 0.3],
        [0.95, 0.9500000286102295],
        [-7.3] * 3,
        [0.0] * 4,
        [0.7],
        [0.7, None],
        [None],
        [],
    ],
    ids=str,
)
def test_equal_rewards_and_lone_members_are_exactly_zero(config: Advantage, rewards: list[float | None]) -> None:
    advantages = compute_batch_advantages(config, [rewards, rewards], [[3] * len(rewards)] * 2)
    assert advantages == [[None if reward is None else 0.0 for reward in rewards]] * 2


@each_estimator
def test_a_real_difference_is_never_taken_for_noise(config: Advantage) -> None:
    advantages = compute_batch_advantages(config, [[1000.0, 1000.01]], [[1, 1]])
    assert advantages[0][0] != 0.0 and advantages[0][1] != 0.0


@each_estimator
def test_advantages_follow_their_members(config: Advantage) -> None:
    groups, lengths = [[3.0, 1.0, 0.0], [5.0, 4.0, 0.5]], [[2, 9, 4], [7, 1, 1]]
    forward = compute_batch_advantages(config, groups, lengths)
    backward = compute_batch_advantages(config, [g[::-1] for g in groups[::-1]], [s[::-1] for s in lengths[::-1]])
    assert flat(backward) == pytest.approx(flat(forward)[::-1], rel=1e-12)
    for group in forward:
        assert sorted(flat([group]), reverse=True) == flat([group])


def test_groups_do_not_mix_unless_the_estimator_says_so() -> None:
    for config in ESTIMATORS:
        first = compute_batch_advantages(config, [[1.0, 0.0], [2.0, 7.0]], [[1, 2], [3, 4]])[0]
        second = compute_batch_advantages(config, [[1.0, 0.0], [90.0, 0.0]], [[1, 2], [3, 4]])[0]
        assert (first == second) != isinstance(config, ReinforcePlusPlusAdvantage)


def test_reinforce_plus_plus_is_white_over_the_batch() -> None:
    advantages = flat(compute_batch_advantages(ReinforcePlusPlusAdvantage(eps=0.0), [[1.0, 0.0, 0.0], [0.2, 0.4]]))
    assert reference.mean(advantages) == pytest.approx(0.0, abs=1e-12)
    assert reference.deviation(advantages, len(advantages)) == pytest.approx(1.0)


def test_reinforce_plus_plus_with_group_baseline_gives_a_group_of_equal_rewards_nothing() -> None:
    advantages = compute_batch_advantages(ReinforcePlusPlusAdvantage(), [[0.95] * 3, [1.0, 0.0]])
    assert advantages[0] == [0.0] * 3 and advantages[1][0] == pytest.approx(0.5 / (0.1**0.5 + 1e-4))


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="None"):
        compute_advantages(GrpoAdvantage(), [1.0, reward])


def test_what_an_estimator_needs_is_asked_for() -> None:
    with pytest.raises(ValueError, match="tokens"):
        compute_advantages(OpoAdvantage(), [1.0, 0.0])
    with pytest.raises(ValueError, match="compute_batch_advantages"):
        compute_advantages(ReinforcePlusPlusAdvantage(), [1.0, 0.0])
    with pytest.raises(ValueError):
        compute_batch_advantages(OpoAdvantage(), [[1.0], [0.0]], [[1]])


def test_opo_counts_tokens() -> None:
    assert compute_advantages(OpoAdvantage(), [1.0, 3.0], [1, 0]) == [0.0, 2.0]
    assert compute_advantages(OpoAdvantage(), [1.0, 3.0], [0, 0]) == [0.0, 0.0]
    with pytest.raises(ValueError):
        opo([1.0, 3.0], [1])


def test_remax_against_the_reference() -> None:
    generator = random.Random(0)
    for _ in range(50):
        groups = [[generator.gauss(0, 3) for _ in range(generator.randint(1, 9))] for _ in range(4)]
        baselines = [generator.choice([0.0, generator.gauss(0, 3)]) for _ in groups]
        expected = [reference.remax(*pair) for pair in zip(groups, baselines, strict=True)]
        actual = compute_batch_advantages(RemaxAdvantage(), groups, baselines=baselines)
        assert flat(actual) == pytest.approx(flat(expected), rel=1e-9, abs=1e-12)


def test_remax_by_hand() -> None:
    assert remax([1.0, 0.0, 0.5], 0.5) == [0.5, -0.5, 0.0]
    assert remax([0.1 + 0.2], 0.3) == [0.0]
    assert compute_advantages(RemaxAdvantage(), [None, 1.0, None], baseline=0.25) == [None, 0.75, None]
    assert compute_advantages(RemaxAdvantage(), [0.95] * 3, baseline=0.0) == [0.95] * 3, "equal rewards are no noise"
    assert compute_advantages(RemaxAdvantage(), [], baseline=1.0) == []


@pytest.mark.parametrize("baseline", [None, float("nan"), float("inf")])
def test_remax_without_a_greedy_reward_is_refused(baseline: float | None) -> None:
    with pytest.raises(ValueError, match=f"greedy completion, got {baseline}"):
        compute_advantages(RemaxAdvantage(), [1.0, 0.0], baseline=baseline)
