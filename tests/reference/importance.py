"""Behavior weights, rejections and effective sample size, sequence by sequence in Python floats."""

from __future__ import annotations

import math

from tests.reference.losses import geometric_mean_ratio, product_ratio


def weights(
    proximal: list[float], behavior: list[float], level: str, mode: str, floor: float, cap: float
) -> list[tuple[float, bool]]:
    """(weight, kept) of each valid token of one sequence: truncated importance sampling (Ionides 2008), or masking."""
    if level == "none":
        return [(1.0, True) for _ in proximal]
    ratios = [math.exp(a - b) for a, b in zip(proximal, behavior, strict=True)]
    if level == "sequence":
        ratios = [product_ratio(proximal, behavior)] * len(ratios)
    if level == "geometric":
        ratios = [geometric_mean_ratio(proximal, behavior)] * len(ratios)
    if mode == "truncate":
        return [(min(ratio, cap), True) for ratio in ratios]
    return [(ratio, True) if floor <= ratio <= cap else (0.0, False) for ratio in ratios]


def kept_by_rejection(
    proximal: list[float], behavior: list[float], estimator: str, level: str, low: float | None, high: float | None
) -> list[bool]:
    """Which valid tokens of one sequence stay: KL(mu || prox) estimated with r = prox / mu (Schulman 2020)."""
    estimates = []
    for a, b in zip(proximal, behavior, strict=True):
        r = math.exp(a - b)
        estimates.append({"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[estimator])
    if level == "sequence_mean":
        estimates = [sum(estimates) / len(estimates)] * len(estimates)
    if level == "sequence_sum":
        estimates = [sum(estimates)] * len(estimates)
    if level == "sequence_max":
        estimates = [max(estimates)] * len(estimates)
    return [(low is None or value >= low) and (high is None or value <= high) for value in estimates]


def young(staleness: list[int], most: int) -> list[bool]:
    """Which tokens a mask by age keeps."""
    return [not age > most for age in staleness]


def vetoed(proximal: list[float], behavior: list[float], veto: float) -> bool:
    """Whether one token of the sequence has prox / mu < veto."""
    return any(math.exp(a - b) < veto for a, b in zip(proximal, behavior, strict=True))


def effective_sample_size(values: list[float]) -> float:
    """(sum w)^2 / (n sum w^2): Kong 1992."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
