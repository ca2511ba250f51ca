"""GAE and V-trace against their sums written out."""

from __future__ import annotations

import math
import random

import pytest

from async_rl.algos.temporal import gae, vtrace
from tests.reference import advantages as reference


def random_trajectory(seed: int) -> tuple[list[float], list[float], list[float], list[int]]:
    """Rewards, values, log-ratios and mask; masked entries hold numbers that must not be read."""
    generator = random.Random(seed)
    size = generator.randint(1, 12)
    mask = [int(generator.random() < 0.7) for _ in range(size)]
    columns = [[generator.gauss(0, 1) if valid else 1e9 for valid in mask] for _ in range(3)]
    return columns[0], columns[1], columns[2], mask


@pytest.mark.parametrize("bootstrap", [0.0, 0.7])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (1.0, 1.0)])
def test_gae(gamma: float, lam: float, bootstrap: float) -> None:
    for seed in range(50):
        rewards, values, _, mask = random_trajectory(seed)
        expected = reference.gae(rewards, values, mask, gamma, lam, bootstrap)
        assert gae(rewards, values, mask, gamma, lam, bootstrap) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bootstrap", [0.0, 0.7])
@pytest.mark.parametrize(("rho_cap", "c_cap"), [(1.0, 1.0), (2.0, 0.5), (0.7, 1.3)])
def test_vtrace(rho_cap: float, c_cap: float, bootstrap: float) -> None:
    for seed in range(50):
        rewards, values, log_ratios, mask = random_trajectory(seed)
        ratios = [math.exp(value) if valid else 1e9 for value, valid in zip(log_ratios, mask, strict=True)]
        expected = reference.vtrace(rewards, values, ratios, mask, 0.9, rho_cap, c_cap, bootstrap)
        actual = vtrace(rewards, values, log_ratios, mask, 0.9, rho_cap, c_cap, bootstrap)
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_on_policy_vtrace_is_the_discounted_return_and_gae_of_lambda_one() -> None:
    rewards, values, _, mask = random_trajectory(4)
    size = len(rewards)
    targets, advantages = vtrace(rewards, values, [0.0] * size, mask, 0.9)
    whole = gae(rewards, values, mask, 0.9, 1.0)
    for t in range(size):
        if mask[t]:
            assert advantages[t] == pytest.approx(whole[t])
            assert targets[t] == pytest.approx(values[t] + whole[t])


def test_vtrace_truncates_both_ratios_at_one_by_default() -> None:
    ratios = [1.5, 3.0, 0.5]
    rewards, values = [0.1, 0.2, 1.0], [0.3, -0.2, 0.4]
    expected = reference.vtrace(rewards, values, ratios, [1, 1, 1], 0.9, 1.0, 1.0, 0.0)
    actual = vtrace(rewards, values, [math.log(ratio) for ratio in ratios], [1, 1, 1], 0.9)
    assert actual[0] == pytest.approx(expected[0]) and actual[1] == pytest.approx(expected[1])


def test_vtrace_survives_huge_log_ratios() -> None:
    targets, advantages = vtrace([1.0, 1.0], [0.0, 0.0], [1e4, -1e4], [1, 1], 1.0)
    assert advantages == [1.0, 0.0]
    assert targets == [1.0, 0.0]
