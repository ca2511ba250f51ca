"""The behavior weight w = pi_prox / mu: what corrects for tokens sampled by an older policy or another program.

Weights have no gradient. Tensors are of one packed micro-batch, shape [T]; no sequence is split between calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.algos.kl import divergence
from async_rl.algos.ratios import (
    importance_ratio,
    keep_within,
    log_ratio,
    sequence_max,
    sequence_mean,
    sequence_sum,
    truncate,
)
from async_rl.config.schema import CorrectionConfig, Rejection


@torch.no_grad()
def behavior_weight(
    config: CorrectionConfig,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    staleness: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the weight pi_prox / mu [T], what stays in the loss (bool [T]), and sums for metrics.

    The weight is float32 without gradient, 0 where masked or rejected; what stays is a subset of `mask`. The sums
    are 0-dim tensors that add over micro-batches and ranks: int64 counts `tokens` (valid), `kept`, `truncated`,
    `rejected`, of these `stale` for their age, and float32 `weight` and `weight_squared` over kept tokens. `staleness`,
    int64 [T], is read with max_token_staleness only. Ratios of sequences are those of all their valid tokens.
    """
    where = (mask, sequence_index, num_sequences)
    weight, keep = torch.ones_like(mask, dtype=torch.float32), mask
    truncated = torch.zeros_like(mask)
    if config.level != "none":
        ratio = importance_ratio(proximal_logprobs, behavior_logprobs, *where, config.level)
        if config.mode == "truncate":
            weight, truncated = truncate(ratio, config.cap), ratio > config.cap
        else:
            weight, keep = ratio, mask & keep_within(ratio, config.floor, config.cap)
    log_ratios = log_ratio(proximal_logprobs, behavior_logprobs, mask)
    for rejection in config.rejections:
        keep = keep & passes(rejection, log_ratios, *where)
    if config.veto is not None:
        keep = keep & passes_veto(config.veto, log_ratios, *where)
    stale = torch.zeros_like(mask)
    if config.max_token_staleness is not None:
        assert staleness is not None, "a mask by staleness needs the staleness of each token"
        stale = mask & (staleness > config.max_token_staleness)
        keep = keep & ~stale
    weight = torch.where(keep, weight, 0.0)
    sums = {
        "tokens": mask.sum(),
        "kept": keep.sum(),
        "truncated": (keep & truncated).sum(),
        "rejected": (mask & ~keep).sum(),
        "stale": stale.sum(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
    }
    return weight, keep, sums


def passes(
    rejection: Rejection, log_ratios: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int
) -> Tensor:
    """Which tokens one rejection keeps, bool [T]; log_ratios are log(prox / mu), 0 where masked."""
    estimates = divergence(rejection.estimator, -log_ratios)
    match rejection.level:
        case "token":
            level = estimates
        case "sequence_mean":
            level = sequence_mean(estimates, mask, sequence_index, num_sequences)[sequence_index]
        case "sequence_sum":
            level = sequence_sum(estimates, sequence_index, num_sequences)[sequence_index]
        case "sequence_max":
            level = sequence_max(estimates, mask, sequence_index, num_sequences)[sequence_index]
    low = -torch.inf if rejection.low is None else rejection.low
    high = torch.inf if rejection.high is None else rejection.high
    return keep_within(level, low, high)


def passes_veto(veto: float, log_ratios: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """False for all tokens of a sequence in which one valid token has prox / mu < veto; bool [T]."""
    impossible = sequence_max(-log_ratios, mask, sequence_index, num_sequences) > -math.log(veto)
    return ~impossible[sequence_index]


def mean_weight_factor(total: float, kept: float) -> float:
    """What weights are multiplied by so that their mean over the kept tokens is 1: kept / total, 0 without any.

    `total` and `kept` are `weight` and `kept` of the sums, added over micro-batches and ranks.
    """
    return kept / total if total else 0.0


def loglinear_proximal(logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """The proximal policy without its forward pass, [T] without gradient (A-3PO, arXiv:2512.06547).

    log prox = log mu / d + (1 - 1 / d) log pi for tokens of staleness d >= 1, log pi for d = 0.
    """
    behavior_share = torch.where(staleness > 0, 1 / staleness, 0.0)
    return torch.lerp(logprobs.detach().float(), behavior_logprobs.float(), behavior_share)


def effective_sample_size(weight: Tensor, mask: Tensor) -> float | None:
    """(sum w)^2 / (n sum w^2) over valid tokens, in (0, 1]; None where no token is valid (Kong 1992)."""
    weight = torch.where(mask, weight.double(), 0.0)
    return effective_sample_size_of_sums(float(weight.sum()), float(weight.square().sum()), int(mask.sum()))


def effective_sample_size_of_sums(total: float, squared: float, count: float) -> float | None:
    """The same from sum w, sum w^2 and n, which add over micro-batches and ranks; 0 where all weights are."""
    if count == 0:
        return None
    return total * total / (count * squared) if squared > 0 else 0.0
