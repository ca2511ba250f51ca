"""Losses: per-token inputs to per-token loss, never reduced (reductions.py does that).

A loss is minus a surrogate objective, lower is better. Masked tokens have loss exactly 0 and gradient exactly 0,
whatever their inputs hold. Symbols: A advantage, pi current policy, prox proximal policy, mu behavior policy,
w the behavior weight of importance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algos.importance import log_ratio
from async_rl.config.schema import DecoupledPpoLoss, Loss, PpoLoss, ReinforceLoss


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Tokens of one packed micro-batch; whole sequences only."""

    logprobs: Tensor
    """[T] of the current policy, with gradient."""
    proximal_logprobs: Tensor
    """[T] of the policy at the start of the step."""
    behavior_logprobs: Tensor
    """[T] as sampled."""
    advantages: Tensor
    """[T]."""
    mask: Tensor
    """bool [T], True where the token is in the loss: sampled, not overdue, not rejected."""
    sequence_index: Tensor
    """int64 [T], sequence of each token, 0..num_sequences-1."""
    num_sequences: int
    behavior_weight: Tensor | None = None
    """[T] without gradient, from importance.behavior_weight; None is 1. Losses that take the ratio to mu ignore it."""
    entropy: Tensor | None = None
    """[T] of the current policy, with gradient; nats."""
    reference_logprobs: Tensor | None = None
    """[T] of the reference policy."""

    def masked(self) -> LossInputs:
        """Everything as float32, and 0 where masked, before any exp: no input of a masked token reaches a gradient."""

        return replace(
            self,
            logprobs=self._clean(self.logprobs),
            proximal_logprobs=self._clean(self.proximal_logprobs),
            behavior_logprobs=self._clean(self.behavior_logprobs),
            advantages=self._clean(self.advantages),
            behavior_weight=None if self.behavior_weight is None else self._clean(self.behavior_weight),
            entropy=None if self.entropy is None else self._clean(self.entropy),
            reference_logprobs=None if self.reference_logprobs is None else self._clean(self.reference_logprobs),
        )

    def _clean(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values.float(), 0.0)


class LossOutput(NamedTuple):
    """Per-token results."""

    loss: Tensor
    """float32 [T]."""
    diagnostics: dict[str, Tensor]
    """[T] each, without gradient: `ratio`, `clipped_low`, `clipped_high`, ... as the loss has them."""


LossFunction = Callable[[LossInputs], LossOutput]


def loss_function(config: Loss) -> LossFunction:
    """Return the loss of the configuration as a function of masked inputs."""
    match config:
        case PpoLoss():
            return lambda inputs: ppo(config, inputs.masked())
        case DecoupledPpoLoss():
            return lambda inputs: decoupled_ppo(config, inputs.masked())
        case ReinforceLoss():
            return lambda inputs: reinforce(inputs.masked())


def ppo(config: PpoLoss, inputs: LossInputs) -> LossOutput:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi / mu (arXiv:1707.06347 eq. 7)."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
    return _clipped(log_ratios.exp(), inputs.advantages, config.clip_low, config.clip_high, config.dual_clip)


def decoupled_ppo(config: DecoupledPpoLoss, inputs: LossInputs) -> LossOutput:
    """-w min(r A, clip(r, 1 - low, 1 + high) A), r = pi / prox (arXiv:2110.00641 eq. 10, arXiv:2505.24298 eq. 5)."""
    log_ratios = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask)
    output = _clipped(log_ratios.exp(), inputs.advantages, config.clip_low, config.clip_high, config.dual_clip)
    return output._replace(loss=_weighted(output.loss, inputs))


def reinforce(inputs: LossInputs) -> LossOutput:
    """-w A log pi (Williams 1992)."""
    return LossOutput(_weighted(-inputs.advantages * inputs.logprobs, inputs), {})


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None) -> LossOutput:
    """PPO's clipped surrogate, negated; dual clip bounds it by -c A for A < 0 (arXiv:1912.09729 eq. 5)."""
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    positive, negative = advantages > 0, advantages < 0
    diagnostics = {
        "ratio": ratio.detach(),
        "clipped_low": negative & (ratio < 1 - low),
        "clipped_high": positive & (ratio > 1 + high),
    }
    if dual_clip is not None:
        surrogate = torch.where(negative, torch.maximum(surrogate, dual_clip * advantages), surrogate)
        diagnostics["dual_clipped"] = negative & (ratio > dual_clip)
    return LossOutput(-surrogate, diagnostics)


def _weighted(loss: Tensor, inputs: LossInputs) -> Tensor:
    """Times the behavior weight, a constant."""
    return loss if inputs.behavior_weight is None else loss * inputs.behavior_weight.detach()
