"""Importance ratios: per token, per sequence, truncated, or kept within bounds.

Every function takes tensors of one packed micro-batch, shape [T], and a bool mask [T]. Masked inputs are replaced
before any exp: a `where` after it would still multiply a zero gradient by infinity. All results are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def sequence_max(values: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Largest of values [T] over each sequence's valid tokens, float32 [num_sequences]; -inf where there is none."""
    lowest = values.new_full((num_sequences,), -torch.inf, dtype=torch.float32)
    return lowest.scatter_reduce(0, sequence_index, torch.where(mask, values.float(), -torch.inf), "amax")


def importance_ratio(
    numerator: Tensor, denominator: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, level: str
) -> Tensor:
    """numerator / denominator, float32 [T]: per token, its product over the sequence, or its geometric mean.

    A sequence's log-ratios are summed before the clamp. The product of 300 ratios of 0.7 is below float32's range;
    it comes out as exp(-20), and must be used as it is, never as a divisor.
    """
    log_ratios = raw_log_ratio(numerator, denominator, mask)
    match level:
        case "token":
            return clamp_log_ratio(log_ratios).exp()
        case "sequence":
            log_ratios = sequence_sum(log_ratios, sequence_index, num_sequences)
        case "geometric":
            log_ratios = sequence_mean(log_ratios, mask, sequence_index, num_sequences)
        case _:
            raise ValueError(f"unknown level {level!r} of an importance ratio; token, sequence or geometric")
    return clamp_log_ratio(log_ratios).exp()[sequence_index]
