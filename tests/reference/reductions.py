"""Reductions over sequences given as lists of per-token losses, None where masked."""

from __future__ import annotations

Losses = list[list[float | None]]


def valid(sequences: Losses) -> list[list[float]]:
    """Sequences with a valid token, masked tokens left out."""
    kept = [[loss for loss in sequence if loss is not None] for sequence in sequences]
    return [sequence for sequence in kept if sequence]


def token_mean(sequences: Losses) -> float:
    """1 / sum_i |y_i| sum_i sum_t: DAPO, arXiv:2503.14476."""
    losses = [loss for sequence in valid(sequences) for loss in sequence]
    return sum(losses) / len(losses) if losses else 0.0


def sequence_mean_token_mean(sequences: Losses) -> float:
    """1 / G sum_i 1 / |y_i| sum_t: GRPO, arXiv:2402.03300."""
    means = [sum(sequence) / len(sequence) for sequence in valid(sequences)]
    return sum(means) / len(means) if means else 0.0


def sequence_mean_token_sum(sequences: Losses) -> float:
    """1 / G sum_i sum_t."""
    sums = [sum(sequence) for sequence in valid(sequences)]
    return sum(sums) / len(sums) if sums else 0.0


def constant(sequences: Losses, length: int) -> float:
    """1 / (G L) sum_i sum_t with L fixed: Dr.GRPO, arXiv:2503.20783."""
    sums = [sum(sequence) / length for sequence in valid(sequences)]
    return sum(sums) / len(sums) if sums else 0.0
