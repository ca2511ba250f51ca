"""From per-token losses to one number, the same for every split into micro-batches and ranks.

A reduction is a weight for each token; the loss is sum(loss * weight). The weight's denominator is counted over the
whole batch of one optimizer update, all ranks, before any micro-batch is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from async_rl.algos.ratios import sequence_sum


@dataclass(frozen=True)
class Denominator:
    """What the losses of one optimizer update are divided by; adds over micro-batches and ranks."""

    tokens: int
    """Tokens that count."""
    sequences: int
    """Sequences with at least one token that counts."""

    def __add__(self, other: Denominator) -> Denominator:
        return Denominator(self.tokens + other.tokens, self.sequences + other.sequences)


def count(mask: Tensor, sequence_index: Tensor, num_sequences: int) -> Denominator:
    """Count tokens and sequences of a mask [T]."""
    lengths = sequence_sum(mask, sequence_index, num_sequences)
    return Denominator(tokens=int(mask.sum()), sequences=int((lengths > 0).sum()))


def recount(reduction: str, counted: Denominator, kept: Denominator) -> float:
    """What turns a loss, or its gradient, that was divided by `counted` into one divided by `kept`; 0 without any."""
    if reduction == "token_mean":
        return counted.tokens / kept.tokens if kept.tokens else 0.0
    return counted.sequences / kept.sequences if kept.sequences else 0.0


def token_weights(
    reduction: str,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    denominator: Denominator,
    constant_length: int | None = None,
) -> Tensor:
    """Weight of each token, float32 [T], 0 where masked; no sequence may be split between micro-batches.

    token_mean               1 / tokens                        (DAPO, arXiv:2503.14476)
    sequence_mean_token_mean 1 / (sequences * own length)      (GRPO, arXiv:2402.03300)
    sequence_mean_token_sum  1 / sequences
    constant                 1 / (sequences * constant_length) (Dr.GRPO, arXiv:2503.20783)

    `mask` is the mask of tokens that count: one rejected later keeps its share of the denominator and has loss 0. The
    sequence's own length is that of `mask`; `denominator` may be another count, which `recount` exchanges later.
    """
    tokens, sequences = max(denominator.tokens, 1), max(denominator.sequences, 1)
    weights = mask.float()
    match reduction:
        case "token_mean":
            return weights / tokens
        case "sequence_mean_token_mean":
            lengths = sequence_sum(mask, sequence_index, num_sequences).clamp(min=1)
            return weights / (lengths * sequences)[sequence_index]
        case "sequence_mean_token_sum":
            return weights / sequences
        case "constant":
            assert constant_length is not None, "reduction='constant' needs constant_length"
            return weights / (sequences * constant_length)
    raise ValueError(
        f"unknown reduction {reduction!r}; token_mean, sequence_mean_token_mean, sequence_mean_token_sum or constant"
    )


def reduce(loss: Tensor, weights: Tensor) -> Tensor:
    """sum(loss * weight), float32; its sum over all micro-batches and ranks is the loss of the update."""
    return torch.sum(loss * weights)
