"""Advantages: rewards of a batch in, one advantage for each member out.

A failed member (reward None) takes no part in any statistic and has advantage None: it never trains. A group with one
scored member, or with equal rewards, has advantage exactly 0 in every estimator that has a group baseline. Everything
is a Python float (float64): a batch has some thousand members, and statistics in float32 turn equal rewards of 0.95
into noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_rl.config.schema import (
    Advantage,
    GrpoAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)

EQUAL_REWARDS = 1e-6
"""Rewards whose spread is at most this share of the largest magnitude count as equal: a float32 reward model returns
equal scores with such noise, and dividing by their deviation would make it a signal of size 1."""

Rewards = Sequence[float | None]


def compute_batch_advantages(
    config: Advantage,
    groups: Sequence[Rewards],
    lengths: Sequence[Sequence[int]] | None = None,
    baselines: Rewards | None = None,
) -> list[list[float | None]]:
    """Advantages of all groups of one step, in order, before any member is filtered out.

    `lengths` are the sampled tokens of each member, which only OPO needs; `baselines` the reward of each group's greedy
    completion, which only ReMax needs. ValueError where they are missing, and for a reward of NaN or infinity.
    """
    sizes: Sequence[Sequence[int] | None] = lengths if lengths is not None else [None] * len(groups)
    greedy = baselines if baselines is not None else [None] * len(groups)
    advantages = [_group_advantages(config, *group) for group in zip(groups, sizes, greedy, strict=True)]
    if isinstance(config, ReinforcePlusPlusAdvantage):
        return whiten(advantages, config.eps)
    return advantages


def compute_advantages(
    config: Advantage, rewards: Rewards, lengths: Sequence[int] | None = None, baseline: float | None = None
) -> list[float | None]:
    """Advantages of one group, for estimators that need no other; ValueError for those that do."""
    if isinstance(config, ReinforcePlusPlusAdvantage):
        raise ValueError("advantage 'reinforce_plus_plus' is whitened over the batch: use compute_batch_advantages")
    return _group_advantages(config, rewards, lengths, baseline)


def _group_advantages(
    config: Advantage, rewards: Rewards, lengths: Sequence[int] | None, baseline: float | None
) -> list[float | None]:
    members = [index for index, reward in enumerate(rewards) if reward is not None]
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"rewards {list(rewards)} are not all finite; a reward that cannot be computed is None")
    match config:
        case GrpoAdvantage():
            values = grpo(scored, config.std, config.eps)
        case RlooAdvantage():
            values = rloo(scored)
        case OpoAdvantage():
            if lengths is None:
                raise ValueError("advantage 'opo' needs the number of sampled tokens of each member")
            values = opo(scored, [lengths[index] for index in members])
        case ReinforcePlusPlusAdvantage():
            values = reinforce_plus_plus(scored, config.baseline)
        case RemaxAdvantage():
            if baseline is None or not math.isfinite(baseline):
                raise ValueError(f"advantage 'remax' needs the reward of a greedy completion, got {baseline}")
            values = remax(scored, baseline)
    advantages: list[float | None] = [None] * len(rewards)
    for index, value in zip(members, values, strict=True):
        advantages[index] = value
    return advantages


def grpo(rewards: Sequence[float], std: str, eps: float) -> list[float]:
    """(r - mean) / (std + eps), arXiv:2402.03300; without the division for std='none' (Dr.GRPO, arXiv:2503.20783)."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    if std == "none":
        return _centered(rewards)
    scale = _deviation(rewards, std) + eps
    return [value / scale for value in _centered(rewards)]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others, arXiv:2402.14740."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """r minus the length-weighted mean of the group, the baseline of least variance, arXiv:2505.23585."""
    tokens = sum(lengths)
    if _all_equal(rewards) or tokens == 0:
        return [0.0] * len(rewards)
    baseline = math.fsum(reward * length for reward, length in zip(rewards, lengths, strict=True)) / tokens
    return [reward - baseline for reward in rewards]


def remax(rewards: Sequence[float], greedy_reward: float) -> list[float]:
    """r minus the reward of the greedy completion of the same problem, arXiv:2310.10505."""
    return [0.0 if _all_equal((reward, greedy_reward)) else reward - greedy_reward for reward in rewards]


def reinforce_plus_plus(rewards: Sequence[float], baseline: str) -> list[float]:
    """r, or r - mean of the group for baseline='group', to be whitened over the batch, arXiv:2501.03262."""
    return _centered(rewards) if baseline == "group" else list(rewards)


def whiten(groups: Sequence[Sequence[float | None]], eps: float) -> list[list[float | None]]:
    """(a - mean) / (std + eps) over all scored members of the batch; population deviation."""
    values = [value for group in groups for value in group if value is not None]
    if _all_equal(values):
        return [[None if value is None else 0.0 for value in group] for group in groups]
    mean, deviation = _mean(values), _deviation(values, "population")
    return [[None if value is None else (value - mean) / (deviation + eps) for value in group] for group in groups]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _centered(values: Sequence[float]) -> list[float]:
    """values minus their mean; exactly 0 where all are equal."""
    if _all_equal(values):
        return [0.0] * len(values)
    mean = _mean(values)
    return [value - mean for value in values]


def _deviation(values: Sequence[float], std: str) -> float:
    """Sample (n - 1) or population (n) standard deviation."""
    mean = _mean(values)
    degrees = len(values) - 1 if std == "sample" else len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / degrees)


def _all_equal(values: Sequence[float]) -> bool:
    """Whether no difference carries information; true for none or one value."""
    return len(values) < 2 or max(values) - min(values) <= EQUAL_REWARDS * max(map(abs, values))
