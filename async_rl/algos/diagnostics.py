"""How far the proximal policy is from the behavior policy, by the staleness of the token.

Measured on token ratios r = prox / mu whatever the correction does with them, so that a run without any correction
still shows which staleness starts to hurt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.algos.importance import effective_sample_size_of_sums
from async_rl.algos.kl import divergence
from async_rl.algos.ratios import MAX_LOG_RATIO, log_ratio

FAR = 2.0
"""A ratio outside [1 / FAR, FAR] is far from 1."""
BIN_NATS = 0.01
"""Width of the bins that quantiles are read from: exact to half a percent, at any number of tokens."""
NUM_BINS = 2 * round(MAX_LOG_RATIO / BIN_NATS) + 1


@dataclass(frozen=True)
class OffPolicyness:
    """Tokens of one staleness."""

    tokens: int
    ratio_mean: float
    """Mean of r; 1 in expectation, whatever the staleness."""
    effective_sample_size: float
    """(sum r)^2 / (n sum r^2), in (0, 1]."""
    k1: float
    """KL(mu || prox) in nats per token, estimated by -log r."""
    k3: float
    """The same by r - 1 - log r, which is never negative."""
    log_ratio_abs_mean: float
    """Mean |log r| in nats; at staleness 0 the mismatch of engine and learner."""
    far_share: float
    """Tokens whose r lies outside [1/2, 2]."""


@torch.no_grad()
def staleness_sums(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, staleness: Tensor, max_staleness: int
) -> Tensor:
    """Sums over tokens [T] by staleness, float64 [max_staleness + 2, 7], that add over micro-batches and ranks.

    Row s is staleness s; the last one holds all that is older. `staleness` is int64 [T]; anything where masked.
    """
    log_ratios = log_ratio(proximal_logprobs, behavior_logprobs, mask)
    ratio = log_ratios.exp()
    k1, k3 = divergence("k1", -log_ratios), divergence("k3", -log_ratios)
    distance = log_ratios.abs()
    columns = (torch.ones_like(ratio), ratio, ratio.square(), k1, k3, distance, distance > math.log(FAR))
    values = torch.stack([column.double() for column in columns], dim=1)
    row = staleness.clamp(0, max_staleness + 1)
    return values.new_zeros(max_staleness + 2, len(columns)).index_add(0, row, values * mask[:, None])


def by_staleness(sums: Tensor) -> list[OffPolicyness | None]:
    """What `staleness_sums` adds up to, one entry a row; None where there is no token."""
    return [off_policyness(row) for row in sums]


def off_policyness(sums: Tensor) -> OffPolicyness | None:
    """What one row of `staleness_sums`, or the sum of several, adds up to; None where there is no token."""
    tokens, ratio, squared, *rest = sums.tolist()
    share = effective_sample_size_of_sums(ratio, squared, tokens)
    if share is None:
        return None
    return OffPolicyness(int(tokens), ratio / tokens, share, *(total / tokens for total in rest))


@torch.no_grad()
def log_ratio_counts(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """How many valid log-ratios lie in each bin of BIN_NATS, float64 [NUM_BINS]; adds over micro-batches and ranks.

    One that is not a number lies in no bin.
    """
    bins = (log_ratios[mask & ~log_ratios.isnan()] / BIN_NATS).round().long() + NUM_BINS // 2
    return torch.bincount(bins, minlength=NUM_BINS).double()


def ratio_quantiles(counts: Tensor, shares: tuple[float, ...]) -> list[float]:
    """The smallest ratio with at least `share` of all at or below it, for each share in (0, 1], to half a bin.

    Empty list where nothing was counted.
    """
    reached = counts.cumsum(0)
    total = float(reached[-1])
    if not total:
        return []
    wanted = torch.tensor([math.ceil(share * total - 1e-9) for share in shares], dtype=reached.dtype)
    bins = torch.searchsorted(reached.cpu(), wanted) - NUM_BINS // 2
    return (bins * BIN_NATS).exp().tolist()
