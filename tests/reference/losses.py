"""Losses as their papers write them, one token or one sequence at a time, each with its derivative by hand.

A token-level loss takes Python floats and returns (loss, d loss / d logprob). Where a paper stops the gradient of a
factor, the derivative here treats it as a constant. pi, prox and mu are log-probabilities, adv the advantage.
"""

from __future__ import annotations

import math


def clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def ppo(pi: float, old: float, adv: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """L = -min(r A, clip(r, 1-low, 1+high) A): arXiv:1707.06347 eq. 7; for A < 0 at least c A: arXiv:1912.09729.

    The ratio is to `old`: the behavior policy for plain PPO, the proximal one in the decoupled objective.
    """
    ratio = math.exp(pi - old)
    clipped = clip(ratio, 1 - low, 1 + high)
    if ratio * adv <= clipped * adv:
        objective, derivative = ratio * adv, ratio * adv
    else:
        objective, derivative = clipped * adv, 0.0
    if dual is not None and adv < 0 and objective < dual * adv:
        objective, derivative = dual * adv, 0.0
    return -objective, -derivative


def decoupled_ppo(
    pi: float, prox: float, adv: float, weight: float, low: float, high: float, dual: float | None
) -> tuple[float, float]:
    """L = -(prox / mu) min(u A, clip(u) A), u = pi / prox: arXiv:2110.00641; `weight` is prox / mu as corrected."""
    loss, derivative = ppo(pi, prox, adv, low, high, dual)
    return weight * loss, weight * derivative


def reinforce(pi: float, adv: float, weight: float) -> tuple[float, float]:
    """L = -w A log pi: Williams 1992, with an importance weight."""
    return -weight * adv * pi, -weight * adv


def truncated_is(pi: float, mu: float, adv: float, cap: float) -> tuple[float, float]:
    """gradient -min(cap, pi / mu) A grad log pi: arXiv:1802.01561."""
    rho = min(cap, math.exp(pi - mu))
    return -rho * adv, -rho * adv


def cispo(pi: float, mu: float, adv: float, low: float, high: float) -> tuple[float, float]:
    """L = -sg(clip(r, 1-low, 1+high)) A log pi: MiniMax-M1, arXiv:2506.13585."""
    ratio = clip(math.exp(pi - mu), 1 - low, 1 + high)
    return -ratio * adv * pi, -ratio * adv


def sapo(pi: float, prox: float, adv: float, weight: float, tau_pos: float, tau_neg: float) -> tuple[float, float]:
    """L = -f(r) A, f(x) = sigma(tau (x - 1)) 4 / tau: arXiv:2511.20347; f' = 4 sigma (1 - sigma)."""
    ratio = math.exp(pi - prox)
    tau = tau_pos if adv > 0 else tau_neg
    sigma = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -weight * sigma * 4 / tau * adv, -weight * 4 * sigma * (1 - sigma) * ratio * adv


def icepop(pi: float, prox: float, mu: float, adv: float, low: float, high: float) -> tuple[float, float]:
    """L = -M(prox / mu) r A, M(k) = k if low <= k <= high else 0: arXiv:2510.18855."""
    k = math.exp(prox - mu)
    if k < low or k > high:
        return 0.0, 0.0
    ratio = math.exp(pi - prox)
    return -k * ratio * adv, -k * ratio * adv


def dppo(pi: float, mu: float, adv: float, divergence: str, threshold: float) -> tuple[float, float]:
    """L = -M r A; M = 0 where r is beyond 1 in A's direction and D(mu, pi) > threshold: arXiv:2602.04879."""
    ratio = math.exp(pi - mu)
    p, q = math.exp(mu), math.exp(pi)
    if divergence == "tv":
        distance = (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    else:
        distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    if distance > threshold and ((adv > 0 and ratio > 1) or (adv < 0 and ratio < 1)):
        return 0.0, 0.0
    return -ratio * adv, -ratio * adv


def geometric_mean_ratio(numerator: list[float], denominator: list[float]) -> float:
    """(prod_t r_t)^(1/L)."""
    total = 0.0
    for a, b in zip(numerator, denominator, strict=True):
        total += a - b
    return math.exp(total / len(numerator))


def product_ratio(numerator: list[float], denominator: list[float]) -> float:
    """prod_t r_t."""
    product = 1.0
    for a, b in zip(numerator, denominator, strict=True):
        product *= math.exp(a - b)
    return product


def gspo_sequence(pi: list[float], prox: list[float], adv: float, low: float, high: float) -> tuple[float, list[float]]:
    """L = -min(s A, clip(s) A), s = (pi(y) / prox(y))^(1/|y|), and dL / d log pi_t: arXiv:2507.18071."""
    s = geometric_mean_ratio(pi, prox)
    clipped = clip(s, 1 - low, 1 + high)
    if s * adv <= clipped * adv:
        return -s * adv, [-s * adv / len(pi)] * len(pi)
    return -clipped * adv, [0.0] * len(pi)


def gmpo_sequence(pi: list[float], prox: list[float], adv: float, low: float, high: float) -> tuple[float, list[float]]:
    """L = -(prod_t min(rho_t^sgn A, clip(rho_t^sgn A))^sgn A)^(1/|y|) A, and dL / d log pi_t: arXiv:2507.20673."""
    sign = 1.0 if adv > 0 else -1.0
    product, inside = 1.0, []
    for a, b in zip(pi, prox, strict=True):
        powered = math.exp(a - b) ** sign
        bound = math.exp(high if adv > 0 else low)
        product *= min(powered, bound) ** sign
        inside.append(powered <= bound)
    s = product ** (1 / len(pi))
    return -s * adv, [-s * adv / len(pi) if free else 0.0 for free in inside]


def topr(pi: float, adv: float, ratio: float, cap: float) -> tuple[float, float]:
    """-A log pi for A > 0, -min(ratio, cap) A log pi for A < 0: arXiv:2503.14286; `ratio` is of its sequence."""
    weight = min(ratio, cap) if adv < 0 else 1.0
    return -weight * adv * pi, -weight * adv


def kl(estimator: str, pi: float, reference: float) -> tuple[float, float]:
    """k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, r = ref / pi: Schulman 2020; with d / d log pi."""
    r = math.exp(reference - pi)
    log_r = reference - pi
    if estimator == "k1":
        return -log_r, 1.0
    if estimator == "k2":
        return log_r * log_r / 2, -log_r
    return r - 1 - log_r, 1 - r
