"""Copies in a group are a surprise only where they are improbable."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from async_rl.learner.batch import prepare_batch
from async_rl.learner.repeats import all_identical, repeated_nats
from async_rl.protocol import Trajectory
from tests.learner.helpers import make_config, make_group, make_trajectory

RNG = np.random.default_rng(1)


def trajectory(tokens: list[int], logprob: float, mask: list[int] | None = None) -> Trajectory:
    """Completion `tokens`, each sampled with this logprob."""
    made = make_trajectory(RNG, len(tokens), 1.0, mask=mask)
    ids, logprobs = np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32)
    return msgspec.structs.replace(made, completion_ids=ids, behavior_logprobs=logprobs)


def test_copies_of_improbable_completions() -> None:
    copies = [trajectory([5, 6, 7], -2.0) for _ in range(4)]
    assert all_identical(copies)
    assert repeated_nats(copies) == pytest.approx(3 * 6.0)
    pair = [*copies[:2], trajectory([5, 6, 8], -2.0), trajectory([9], -0.5)]
    assert not all_identical(pair)
    assert repeated_nats(pair) == pytest.approx(6.0 - math.log(6))


def test_a_policy_that_is_sure_repeats_itself_without_surprise() -> None:
    assert repeated_nats([trajectory([5, 6, 7], -0.001) for _ in range(16)]) == pytest.approx(15 * 0.003)


def test_nothing_is_repeated() -> None:
    for members in ([], [trajectory([1], -9.0)], [trajectory([1], -9.0), trajectory([2], -9.0)]):
        assert repeated_nats(members) == 0.0 and not all_identical(members)


def test_tokens_that_were_not_sampled_are_no_surprise() -> None:
    assert repeated_nats([trajectory([5, 6, 7], -2.0, [1, 0, 0]) for _ in range(2)]) == pytest.approx(2.0)


def test_independent_samples_stay_below_their_bound() -> None:
    """Of 2000 groups of eight from a skewed distribution, no more than 7 x 2000 exp(-s) reach a surprise of s."""
    probabilities = np.array([0.6, 0.2, 0.1, 0.05, 0.05])
    draws = RNG.choice(5, (2000, 8), p=probabilities)
    found = [repeated_nats([trajectory([int(t)], math.log(probabilities[t])) for t in row]) for row in draws]
    for surprise in (2.5, 3.0, 4.0):
        # Each of the seven possible numbers of copies has a bound of its own.
        assert sum(value >= surprise for value in found) <= 7 * 2000 * math.exp(-surprise)


def test_a_batch_shows_its_most_improbable_group_and_leaves_failures_out() -> None:
    sure = [trajectory([3, 4], -0.01) for _ in range(4)]
    seeded = [trajectory([3, 4, 5, 6], -4.0) for _ in range(3)]
    failed = msgspec.structs.replace(trajectory([9], -1.0), reward=None, status="failed")
    groups = [make_group(RNG, 0, 2, sure), make_group(RNG, 1, 2, [*seeded, failed])]
    values = prepare_batch(groups, 1, make_config()).metrics.resolve()
    assert values["group/repeated_nats"] == pytest.approx(2 * 16.0)
    assert values["group/identical_share"] == 1.0
