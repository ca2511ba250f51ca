"""Changes to rewards as their papers write them."""

from __future__ import annotations


def soft_overlong_punishment(length: int, max_length: int, cache: int) -> float:
    """R_length(y): DAPO, arXiv:2503.14476 eq. 13, its three cases."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0
