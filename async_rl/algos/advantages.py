"""Advantages of one group: rewards in, one advantage for each member out.

A failed member (reward None) takes no part in any statistic and has advantage None: it never trains.
A group with one scored member, or with equal rewards, has advantage exactly 0. Everything is a Python
float (float64): a group has a few members, and statistics in float32 turn equal rewards of 0.95 into noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_rl.config.schema import Advantage, GrpoAdvantage, RlooAdvantage

EQUAL_REWARDS = 1e-6
"""Rewards whose spread is at most this share of the largest magnitude count as equal: a float32 reward model returns
equal scores with such noise, and dividing by their deviation would make it a signal of size 1."""


def compute_advantages(config: Advantage, rewards: Sequence[float | None]) -> list[float | None]:
    """Return one advantage per member of a group, None where the member failed; ValueError for NaN or infinity."""
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"rewards {list(rewards)} are not all finite; a reward that cannot be computed is None")
    if _all_equal(scored):
        values = [0.0] * len(scored)
    else:
        match config:
            case GrpoAdvantage():
                values = grpo(scored, config.std, config.eps)
            case RlooAdvantage():
                values = rloo(scored)
    remaining = iter(values)
    return [None if reward is None else next(remaining) for reward in rewards]


def grpo(rewards: Sequence[float], std: str, eps: float) -> list[float]:
    """(r - mean) / (std + eps), arXiv:2402.03300 eq. 3; without the division for std='none', arXiv:2503.20783."""
    mean = _mean(rewards)
    if std == "none":
        return [reward - mean for reward in rewards]
    degrees = len(rewards) - 1 if std == "sample" else len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / degrees)
    return [(reward - mean) / (deviation + eps) for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others, arXiv:2402.14740 eq. 8."""
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _all_equal(values: Sequence[float]) -> bool:
    """Whether no difference carries information; true for none or one value."""
    return len(values) < 2 or max(values) - min(values) <= EQUAL_REWARDS * max(map(abs, values))
