"""The rewards that advantages are computed from: those of the environment, changed as the algorithm says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from async_rl.algos.shaping import penalize_kl, soft_overlong_penalty
from async_rl.config import Config
from async_rl.metrics import Metrics

if TYPE_CHECKING:
    from async_rl.buffer import TrajectoryGroup
    from async_rl.protocol import Trajectory

BUFFER_SHARE = 5
"""The penalty rises over a fifth of the longest completion, as in DAPO: 4096 of 20480 tokens."""


@dataclass(frozen=True)
class TrajectoryKl:
    """The KL penalty in the rewards of a batch."""

    coefficient: float
    by_slot: np.ndarray
    """float64 [groups * group_size], KL(prox || reference) of each member, summed over its sampled tokens; nats."""


def shaped_rewards(
    groups: Sequence[TrajectoryGroup], config: Config, metrics: Metrics, kl: TrajectoryKl | None = None
) -> list[list[float | None]]:
    """One reward for each member; None takes no part in its group's statistics and does not train."""
    rewards = [[_shaped(member, config, metrics) for member in group.members] for group in groups]
    if kl is None:
        return rewards
    size = config.sampling.group_size
    return [
        [penalize_kl(reward, float(kl.by_slot[i * size + j]), kl.coefficient) for j, reward in enumerate(group)]
        for i, group in enumerate(rewards)
    ]


def baseline_rewards(groups: Sequence[TrajectoryGroup], config: Config) -> list[float | None]:
    """The reward of each group's greedy completion, overlong penalty included; None where the group has none.

    It stays where truncated completions are excluded, since every member needs it, and bears no KL penalty: whatever
    does not depend on a member's own tokens may be its baseline.
    """
    return [None if group.baseline is None else _penalized(group.baseline, config)[0] for group in groups]


def _shaped(member: Trajectory, config: Config, metrics: Metrics) -> float | None:
    overlong = config.algorithm.overlong
    if member.reward is None:
        return None
    if overlong.truncated != "keep":
        metrics.mean("completion/left_out_share", float(is_left_out(member, config)), 1.0)
    if overlong.truncated == "exclude" and is_left_out(member, config):
        return None
    reward, added = _penalized(member, config)
    if overlong.penalty > 0:
        metrics.mean("reward/overlong_penalty", -added, 1.0)
    return reward


def _penalized(trajectory: Trajectory, config: Config) -> tuple[float, float]:
    """(reward with the overlong penalty, the penalty, which is at most 0)."""
    overlong, longest = config.algorithm.overlong, config.sampling.max_completion_tokens
    assert trajectory.reward is not None, "only scored trajectories have rewards"
    if overlong.penalty == 0:
        return trajectory.reward, 0.0
    buffer = overlong.buffer_tokens or max(1, longest // BUFFER_SHARE)
    added = overlong.penalty * soft_overlong_penalty(int(np.sum(trajectory.completion_mask)), longest, buffer)
    return trajectory.reward + added, added


def is_left_out(member: Trajectory, config: Config) -> bool:
    """Whether no token of a trajectory is in the loss because its completion was truncated."""
    return config.algorithm.overlong.truncated != "keep" and member.status == "truncated"
