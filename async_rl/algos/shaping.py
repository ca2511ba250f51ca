"""Changes to rewards before advantages are computed."""

from __future__ import annotations


def soft_overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """What a completion of num_tokens adds to its reward: 0 up to max - buffer, then linearly down to -1 at max.

    DAPO, arXiv:2503.14476 eq. 13.
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    if excess <= 0:
        return 0.0
    return -excess / buffer_tokens if excess < buffer_tokens else -1.0


def penalize_kl(reward: float | None, kl: float, coefficient: float) -> float | None:
    """reward - coefficient * kl, kl summed over the trajectory's sampled tokens (arXiv:2009.01325); None stays None."""
    return None if reward is None else reward - coefficient * kl
