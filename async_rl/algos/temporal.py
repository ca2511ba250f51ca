"""Advantages over time, from the values of a critic: GAE and V-trace, for one trajectory.

Tokens that the policy did not sample (tool output, padding) are skipped: their rewards and values are never read, and
no discount passes over them. Lists of float64: a recursion over tokens is quicker there than in tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Floats = Sequence[float]


def gae(
    rewards: Floats, values: Floats, mask: Sequence[int], gamma: float, lam: float, bootstrap: float = 0.0
) -> list[float]:
    """A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t; 0 where masked (arXiv:1506.02438 eq. 16).

    `bootstrap` is the value after the last token: 0 where the trajectory ended, V of its end where it was cut off.
    """
    advantages = [0.0] * len(rewards)
    advantage, next_value = 0.0, bootstrap
    for t in reversed(_valid(mask)):
        delta = rewards[t] + gamma * next_value - values[t]
        advantage = delta + gamma * lam * advantage
        advantages[t], next_value = advantage, values[t]
    return advantages


def vtrace(
    rewards: Floats,
    values: Floats,
    log_ratios: Floats,
    mask: Sequence[int],
    gamma: float,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
    bootstrap: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Value targets v_t and advantages rho_t (r_t + gamma v_t+1 - V_t); 0 where masked (arXiv:1802.01561 eq. 1).

    rho_t = min(rho_cap, pi / mu), c_t = min(c_cap, pi / mu), with `log_ratios` = log(pi / mu). The advantages hold
    rho already: use them with a loss that has no ratio of its own.
    """
    targets, advantages = [0.0] * len(rewards), [0.0] * len(rewards)
    correction, next_value, next_target = 0.0, bootstrap, bootstrap
    for t in reversed(_valid(mask)):
        rho = math.exp(min(log_ratios[t], math.log(rho_cap)))
        c = math.exp(min(log_ratios[t], math.log(c_cap)))
        advantages[t] = rho * (rewards[t] + gamma * next_target - values[t])
        correction = rho * (rewards[t] + gamma * next_value - values[t]) + gamma * c * correction
        targets[t] = values[t] + correction
        next_value, next_target = values[t], targets[t]
    return targets, advantages


def _valid(mask: Sequence[int]) -> list[int]:
    return [t for t, valid in enumerate(mask) if valid]
