"""Importance ratios and the behavior weight pi_prox / mu.

Every function takes tensors of one packed micro-batch, shape [T], and a bool mask [T]. Masked inputs are replaced
before any exp: a `where` after it would still multiply a zero gradient by infinity. All results are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.config.schema import CorrectionConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats (ratios 2e-9 to 5e8) before exp, so that no ratio, square or product with an
advantage overflows float32. Beyond the clamp a ratio is constant: its gradient is zero."""


def raw_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) as float32 [T], 0 where masked, not clamped: for sums over a sequence."""
    return torch.where(mask, numerator.float() - denominator.float(), 0.0)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) as float32 [T], 0 where masked, clamped to +-MAX_LOG_RATIO."""
    return clamp_log_ratio(raw_log_ratio(numerator, denominator, mask))


def clamp_log_ratio(values: Tensor) -> Tensor:
    """Limit log-ratios so that exp of them is finite."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncate(ratio: Tensor, cap: float) -> Tensor:
    """min(ratio, cap)."""
    return ratio.clamp(max=cap)


def keep_within(ratio: Tensor, low: float, high: float) -> Tensor:
    """True where low <= ratio <= high; the rest leaves the loss."""
    return (ratio >= low) & (ratio <= high)


def sequence_sum(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum of values [T] in each sequence, float32 [num_sequences]."""
    return values.new_zeros(num_sequences, dtype=torch.float32).index_add(0, sequence_index, values.float())


def sequence_mean(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Mean of values [T] over each sequence's valid tokens, float32 [num_sequences]; 0 where there is none."""
    total = sequence_sum(torch.where(mask, values, 0.0), sequence_index, num_sequences)
    return total / sequence_sum(mask, sequence_index, num_sequences).clamp(min=1)


def importance_ratio(
    numerator: Tensor, denominator: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, level: str
) -> Tensor:
    """numerator / denominator, float32 [T]: per token, the sequence's product, or its geometric mean."""
    match level:
        case "token":
            return log_ratio(numerator, denominator, mask).exp()
        case "sequence":
            log_ratios = sequence_sum(raw_log_ratio(numerator, denominator, mask), sequence_index, num_sequences)
        case "geometric":
            raw = raw_log_ratio(numerator, denominator, mask)
            log_ratios = sequence_mean(raw, mask, sequence_index, num_sequences)
        case _:
            raise ValueError(f"unknown level {level!r} of an importance ratio; token, sequence or geometric")
    return clamp_log_ratio(log_ratios).exp()[sequence_index]


@torch.no_grad()
def behavior_weight(
    config: CorrectionConfig,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the weight pi_prox / mu [T], what stays in the loss (bool [T]), and sums for metrics.

    The weight is float32 without gradient, 0 where masked or rejected; what stays is a subset of `mask`. The sums
    are 0-dim float32 tensors that add over micro-batches and ranks: `tokens` (valid), `weight`, `weight_squared`,
    `truncated`, `rejected` (counts of valid tokens). No sequence may be split between calls.
    """
    ones = torch.ones_like(mask, dtype=torch.float32)
    if config.level == "none":
        ratio = ones
    else:
        ratio = importance_ratio(
            proximal_logprobs, behavior_logprobs, mask, sequence_index, num_sequences, config.level
        )
    if config.level == "none":
        weight, keep = ones, mask
    elif config.mode == "truncate":
        weight, keep = truncate(ratio, config.cap), mask
    else:
        weight, keep = ratio, mask & keep_within(ratio, config.floor, config.cap)
    weight = torch.where(keep, weight, 0.0)
    sums = {
        "tokens": mask.sum().float(),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "truncated": (keep & (weight < ratio)).sum().float(),
        "rejected": (mask & ~keep).sum().float(),
    }
    return weight, keep, sums


def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over valid tokens, in (0, 1]; 1 where no token is valid (Kong 1992)."""
    weight = torch.where(mask, weight.float(), 0.0)
    return effective_sample_size_of_sums(weight.sum(), weight.square().sum(), mask.sum().float())


def effective_sample_size_of_sums(total: Tensor, squared: Tensor, count: Tensor) -> Tensor:
    """The same from sum w, sum w^2 and n, which add over micro-batches and ranks."""
    # Dividing by the mean square keeps n * sum w^2 from overflowing float32 at weights of 5e8.
    mean, mean_square = total / count.clamp(min=1), squared / count.clamp(min=1)
    return torch.where(mean_square > 0, mean.square() / mean_square.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
