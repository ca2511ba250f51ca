"""KL penalties against a reference policy: estimators, their gradients, and the adaptive coefficient.

With d = log pi - log ref at a token sampled from pi, each estimates KL(pi || ref) (Schulman, "Approximating KL
Divergence", 2020). What trains is the gradient. A term of the loss has that of the table's third column; in the reward
the value is a constant, and the gradient is E[value * grad log pi] (arXiv:2506.09477, arXiv:2510.01555):

    name  value             d / d log pi   on policy in the loss   on policy in the reward
    k1    d                 1              0                       grad KL(pi || ref)
    k2    d^2 / 2           d              grad KL(pi || ref)      no divergence's
    k3    exp(-d) - 1 + d   1 - exp(-d)    grad KL(ref || pi)      grad KL(pi || ref) - grad KL(ref || pi)
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algos.ratios import log_ratio


def kl_penalty(estimator: str, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimate per token, float32 [T], 0 where masked, with the gradient of the table; d is clamped to +-20."""
    return divergence(estimator, log_ratio(logprobs, reference_logprobs, mask))


def divergence(estimator: str, difference: Tensor) -> Tensor:
    """k1, k2 or k3 of KL(p || q) from log p - log q at samples of p."""
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(-d) - 1 loses near d = 0.
            return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; k1, k2 or k3")


def default_estimator(place: str) -> str:
    """The estimator whose gradient is that of KL(pi || ref), in the `loss` or in the `reward`."""
    return "k2" if place == "loss" else "k1"


def adaptive_coefficient(coefficient: float, kl: float, target: float, horizon: int) -> float:
    """The next coefficient: times 1 + clip(kl / target - 1, -0.2, 0.2) / horizon (arXiv:1909.08593).

    `horizon` is in steps: that many steps far above the target multiply the coefficient by about 1.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error / horizon)
