"""Advantage estimators as their papers write them: loops over Python floats."""

from __future__ import annotations

import math


def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def deviation(values: list[float], degrees: int) -> float:
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) * (value - center)
    return math.sqrt(total / degrees)


def grpo(rewards: list[float], eps: float, sample: bool) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps): DeepSeekMath, arXiv:2402.03300."""
    std = deviation(rewards, len(rewards) - 1 if sample else len(rewards))
    return [(reward - mean(rewards)) / (std + eps) for reward in rewards]


def dr_grpo(rewards: list[float]) -> list[float]:
    """A_i = r_i - mean(r): arXiv:2503.20783."""
    return [reward - mean(rewards) for reward in rewards]


def rloo(rewards: list[float]) -> list[float]:
    """A_i = r_i - 1/(k-1) sum over j != i of r_j: arXiv:2402.14740."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        advantages.append(reward - mean(others))
    return advantages


def opo(rewards: list[float], lengths: list[int]) -> list[float]:
    """A_i = r_i - sum_j l_j r_j / sum_j l_j: arXiv:2505.23585."""
    weighted, total = 0.0, 0.0
    for reward, length in zip(rewards, lengths, strict=True):
        for _ in range(length):
            weighted += reward
            total += 1
    return [reward - weighted / total for reward in rewards]


def remax(rewards: list[float], greedy_reward: float) -> list[float]:
    """A_i = r_i - r(greedy completion of the same problem): arXiv:2310.10505, algorithm 1."""
    advantages = []
    for reward in rewards:
        advantages.append(reward - greedy_reward)
    return advantages


def reinforce_plus_plus(groups: list[list[float]], group_baseline: bool, eps: float) -> list[list[float]]:
    """(a - mean_batch(a)) / (std_batch(a) + eps), a = r or r - mean_group(r): arXiv:2501.03262."""
    centered = [[reward - mean(group) if group_baseline else reward for reward in group] for group in groups]
    flat = [value for group in centered for value in group]
    std = deviation(flat, len(flat))
    return [[(value - mean(flat)) / (std + eps) for value in group] for group in centered]


def gae(
    rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}: arXiv:1506.02438, eq. 16, on the sampled tokens only."""
    steps = [t for t, valid in enumerate(mask) if valid]
    advantages = [0.0] * len(rewards)
    for start in range(len(steps)):
        total = 0.0
        for offset, k in enumerate(range(start, len(steps))):
            t = steps[k]
            following = values[steps[k + 1]] if k + 1 < len(steps) else bootstrap
            total += (gamma * lam) ** offset * (rewards[t] + gamma * following - values[t])
        advantages[steps[start]] = total
    return advantages


def vtrace(
    rewards: list[float],
    values: list[float],
    ratios: list[float],
    mask: list[int],
    gamma: float,
    rho_cap: float,
    c_cap: float,
    bootstrap: float,
) -> tuple[list[float], list[float]]:
    """v_s = V_s + sum_t gamma^(t-s) (prod_{i=s}^{t-1} c_i) rho_t delta_t: arXiv:1802.01561, eq. 1."""
    steps = [t for t, valid in enumerate(mask) if valid]
    targets, advantages = [0.0] * len(rewards), [0.0] * len(rewards)
    traced = []
    for s in range(len(steps)):
        total = values[steps[s]]
        for k in range(s, len(steps)):
            product = 1.0
            for i in range(s, k):
                product *= min(c_cap, ratios[steps[i]])
            following = values[steps[k + 1]] if k + 1 < len(steps) else bootstrap
            delta = rewards[steps[k]] + gamma * following - values[steps[k]]
            total += gamma ** (k - s) * product * min(rho_cap, ratios[steps[k]]) * delta
        traced.append(total)
    for s, t in enumerate(steps):
        following = traced[s + 1] if s + 1 < len(steps) else bootstrap
        targets[t] = traced[s]
        advantages[t] = min(rho_cap, ratios[t]) * (rewards[t] + gamma * following - values[t])
    return targets, advantages
