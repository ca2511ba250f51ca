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
from async_rl.algos.ratios import log_ratio


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


@torch.no_grad()
def staleness_sums(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, staleness: Tensor, max_staleness: int
) -> Tensor:
    """Sums over tokens [T] by staleness, float64 [max_staleness + 2, 6], that add over micro-batches and ranks.

    Row s is staleness s; the last one holds all that is older. `staleness` is int64 [T]; anything where masked.
    """
    log_ratios = log_ratio(proximal_logprobs, behavior_logprobs, mask)
    ratio = log_ratios.exp()
    k1, k3 = divergence("k1", -log_ratios), divergence("k3", -log_ratios)
    columns = (torch.ones_like(ratio), ratio, ratio.square(), k1, k3, log_ratios.abs())
    values = torch.stack([column.double() for column in columns], dim=1)
    row = staleness.clamp(0, max_staleness + 1)
    return values.new_zeros(max_staleness + 2, len(columns)).index_add(0, row, values * mask[:, None])


def by_staleness(sums: Tensor) -> list[OffPolicyness | None]:
    """What `staleness_sums` adds up to, one entry a row; None where there is no token."""
    return [_measures(*row) for row in sums.tolist()]


def _measures(
    tokens: float, ratio: float, squared: float, k1: float, k3: float, absolute: float
) -> OffPolicyness | None:
    share = effective_sample_size_of_sums(ratio, squared, tokens)
    if share is None:
        return None
    return OffPolicyness(int(tokens), ratio / tokens, share, k1 / tokens, k3 / tokens, absolute / tokens)


def quantiles(values: Tensor, mask: Tensor, shares: tuple[float, ...]) -> list[float]:
    """The smallest valid value with at least `share` of the valid values at or below it, for each share in (0, 1].

    Exact at any size (torch.quantile stops at 2^24 values); empty list where no value is valid.
    """
    ordered = values[mask].sort().values
    if not len(ordered):
        return []
    places = torch.tensor([math.ceil(share * len(ordered) - 1e-9) - 1 for share in shares], device=values.device)
    return ordered[places].tolist()
