"""Reward shaping."""

from __future__ import annotations

import pytest

from async_rl.algos.shaping import penalize_kl, soft_overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (99, -0.95), (100, -1.0), (10**6, -1.0)]
)
def test_soft_overlong_penalty(length: int, expected: float) -> None:
    assert soft_overlong_penalty(length, max_tokens=100, buffer_tokens=20) == pytest.approx(expected)


def test_without_a_buffer_only_what_is_too_long_is_punished() -> None:
    assert [soft_overlong_penalty(length, 100, 0) for length in (99, 100, 101)] == [0.0, 0.0, -1.0]


def test_kl_is_taken_off_the_reward_of_scored_members() -> None:
    assert penalize_kl(1.0, 4.0, 0.05) == pytest.approx(0.8)
    assert penalize_kl(None, 4.0, 0.05) is None
