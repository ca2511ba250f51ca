"""Losses: per-token inputs to per-token loss, never reduced (reductions.py does that).

A loss is minus a surrogate objective, lower is better. Masked tokens have loss exactly 0 and gradient exactly 0,
whatever their inputs hold. Symbols: A advantage, pi current policy, prox proximal policy, mu behavior policy,
w the behavior weight of importance.py, sg(x) the value of x without gradient.

At pi = prox = mu every loss has the gradient of REINFORCE, -A per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.algos.kl import kl_penalty
from async_rl.algos.ratios import (
    clamp_log_ratio,
    importance_ratio,
    keep_within,
    log_ratio,
    raw_log_ratio,
    sequence_mean,
    truncate,
)
from async_rl.config.schema import (
    CispoLoss,
    DecoupledPpoLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    IcePopLoss,
    Loss,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
    ToprLoss,
    TruncatedIsLoss,
)


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
    """[T] without gradient, from importance.behavior_weight; None is 1. Losses that take a ratio to mu ignore it."""
    entropy: Tensor | None = None
    """[T] of the current policy's distribution, with gradient; nats. Only `penalized` reads it."""
    reference_logprobs: Tensor | None = None
    """[T] of the reference policy. Only `penalized` reads it."""

    def masked(self) -> LossInputs:
        """Everything as float32, and 0 where masked, before any exp: no input of a masked token reaches a gradient.

        Only logprobs and entropy keep theirs; the rest are constants, whatever they come from.
        """
        return replace(
            self,
            logprobs=self._clean(self.logprobs),
            proximal_logprobs=self._clean(self.proximal_logprobs).detach(),
            behavior_logprobs=self._clean(self.behavior_logprobs).detach(),
            advantages=self._clean(self.advantages).detach(),
            behavior_weight=None if self.behavior_weight is None else self._clean(self.behavior_weight).detach(),
            entropy=None if self.entropy is None else self._clean(self.entropy),
            reference_logprobs=None
            if self.reference_logprobs is None
            else self._clean(self.reference_logprobs).detach(),
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
    """Return the loss of the configuration as a function of inputs as they come; it masks them."""
    match config:
        case PpoLoss():
            return lambda inputs: ppo(config, inputs.masked())
        case DecoupledPpoLoss():
            return lambda inputs: decoupled_ppo(config, inputs.masked())
        case ReinforceLoss():
            return lambda inputs: reinforce(config, inputs.masked())
        case TruncatedIsLoss():
            return lambda inputs: truncated_is(config, inputs.masked())
        case CispoLoss():
            return lambda inputs: cispo(config, inputs.masked())
        case GspoLoss():
            return lambda inputs: gspo(config, inputs.masked())
        case GmpoLoss():
            return lambda inputs: gmpo(config, inputs.masked())
        case SapoLoss():
            return lambda inputs: sapo(config, inputs.masked())
        case IcePopLoss():
            return lambda inputs: icepop(config, inputs.masked())
        case ToprLoss():
            return lambda inputs: topr(config, inputs.masked())
        case DppoLoss():
            return lambda inputs: dppo(config, inputs.masked())


def takes_behavior_weight(config: Loss) -> bool:
    """Whether the loss is multiplied by w; the others correct for mu themselves."""
    return isinstance(config, DecoupledPpoLoss | ReinforceLoss | GspoLoss | GmpoLoss | SapoLoss)


def ppo(config: PpoLoss, inputs: LossInputs) -> LossOutput:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi / mu (arXiv:1707.06347 eq. 7)."""
    ratio = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).exp()
    return _clipped(ratio, inputs.advantages, config.clip_low, config.clip_high, config.dual_clip)


def decoupled_ppo(config: DecoupledPpoLoss, inputs: LossInputs) -> LossOutput:
    """-w min(r A, clip(r, 1 - low, 1 + high) A), r = pi / prox (arXiv:2110.00641, arXiv:2505.24298)."""
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).exp()
    output = _clipped(ratio, inputs.advantages, config.clip_low, config.clip_high, config.dual_clip)
    return output._replace(loss=_weighted(output.loss, inputs))


def reinforce(config: ReinforceLoss, inputs: LossInputs) -> LossOutput:
    """-w A log pi (Williams 1992)."""
    return LossOutput(_weighted(-inputs.advantages * inputs.logprobs, inputs), {})


def truncated_is(config: TruncatedIsLoss, inputs: LossInputs) -> LossOutput:
    """-sg(min(r, cap)) A pi / sg(pi), r = pi / mu: value -min(r, cap) A, gradient -min(r, cap) A grad log pi."""
    ratio = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).exp().detach()
    loss = -truncate(ratio, config.cap) * inputs.advantages * _unit(inputs.logprobs)
    return LossOutput(loss, {"ratio": ratio, "clipped_high": ratio > config.cap})


def cispo(config: CispoLoss, inputs: LossInputs) -> LossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi, r = pi / mu (arXiv:2506.13585)."""
    ratio = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).exp().detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return LossOutput(loss, {"ratio": ratio, "clipped_low": ratio < low, "clipped_high": ratio > high})


def gspo(config: GspoLoss, inputs: LossInputs) -> LossOutput:
    """-w min(s A, clip(s, 1 - low, 1 + high) A), s the sequence's geometric mean of pi / prox (arXiv:2507.18071).

    In its token form, sg(s) pi / sg(pi): equal value and, averaged over the sequence, equal gradient.
    """
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    ratio = importance_ratio(inputs.logprobs.detach(), inputs.proximal_logprobs, *where, "geometric")
    ratio = ratio * _unit(inputs.logprobs)
    output = _clipped(ratio, inputs.advantages, config.clip_low, config.clip_high, None)
    return output._replace(loss=_weighted(output.loss, inputs))


def gmpo(config: GmpoLoss, inputs: LossInputs) -> LossOutput:
    """-w s A, s the sequence's geometric mean of pi / prox, each clipped in A's direction (arXiv:2507.20673).

    In the token form of gspo; a clipped token has no gradient, and the others of its sequence keep theirs.
    """
    log_ratios = raw_log_ratio(inputs.logprobs.detach(), inputs.proximal_logprobs, inputs.mask)
    clipped_high = (inputs.advantages > 0) & (log_ratios > config.clip_high)
    clipped_low = (inputs.advantages < 0) & (log_ratios < -config.clip_low)
    clipped = torch.where(clipped_high, config.clip_high, torch.where(clipped_low, -config.clip_low, log_ratios))
    mean = sequence_mean(clipped, inputs.mask, inputs.sequence_index, inputs.num_sequences)
    ratio = clamp_log_ratio(mean).exp()[inputs.sequence_index]
    unit = torch.where(clipped_high | clipped_low, 1.0, _unit(inputs.logprobs))
    diagnostics = {"ratio": ratio, "clipped_low": clipped_low, "clipped_high": clipped_high}
    return LossOutput(_weighted(-ratio * unit * inputs.advantages, inputs), diagnostics)


def sapo(config: SapoLoss, inputs: LossInputs) -> LossOutput:
    """-w f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau, r = pi / prox, tau by the sign of A (arXiv:2511.20347)."""
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).exp()
    tau = torch.where(inputs.advantages > 0, config.tau_positive, config.tau_negative)
    # sigmoid's own derivative s (1 - s) has no digits left where s is near 1.
    gate = functional.logsigmoid(tau * (ratio - 1)).exp() * 4 / tau
    loss = -gate * inputs.advantages
    return LossOutput(_weighted(loss, inputs), {"ratio": ratio.detach()})


def icepop(config: IcePopLoss, inputs: LossInputs) -> LossOutput:
    """-v r A where low <= v <= high, else 0; v = prox / mu, r = pi / prox (arXiv:2510.18855)."""
    mismatch = log_ratio(inputs.proximal_logprobs, inputs.behavior_logprobs, inputs.mask).exp()
    keep = keep_within(mismatch, config.low, config.high)
    ratio = log_ratio(inputs.logprobs, inputs.proximal_logprobs, inputs.mask).exp()
    loss = -torch.where(keep, mismatch, 0.0) * ratio * inputs.advantages
    return LossOutput(loss, {"ratio": ratio.detach(), "masked": inputs.mask & ~keep})


def topr(config: ToprLoss, inputs: LossInputs) -> LossOutput:
    """-A log pi for A > 0, -sg(min(r, cap)) A log pi for A < 0, r = pi / mu (arXiv:2503.14286)."""
    where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
    ratio = importance_ratio(inputs.logprobs.detach(), inputs.behavior_logprobs, *where, config.level)
    negative = inputs.advantages < 0
    weight = torch.where(negative, truncate(ratio, config.cap), 1.0)
    loss = -weight * inputs.advantages * inputs.logprobs
    return LossOutput(loss, {"ratio": ratio, "clipped_high": negative & (ratio > config.cap)})


def dppo(config: DppoLoss, inputs: LossInputs) -> LossOutput:
    """-m r A, r = pi / mu; m = 0 where r is past 1 on A's side and the divergence is past its threshold.

    arXiv:2602.04879: the divergence of mu and pi as distributions over the sampled token and all others together.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask).exp()
    far = _binary_divergence(config.divergence, inputs.behavior_logprobs, inputs.logprobs) > config.threshold
    clipped_high = far & (inputs.advantages > 0) & (ratio > 1)
    clipped_low = far & (inputs.advantages < 0) & (ratio < 1)
    loss = -torch.where(clipped_high | clipped_low, 0.0, ratio) * inputs.advantages
    return LossOutput(loss, {"ratio": ratio.detach(), "clipped_low": clipped_low, "clipped_high": clipped_high})


def penalized(
    output: LossOutput, inputs: LossInputs, entropy_coefficient: float, kl_estimator: str, kl_coefficient: float
) -> LossOutput:
    """loss - entropy_coefficient * entropy + kl_coefficient * KL(pi || ref), per token; kl.py has the estimators.

    A coefficient of 0 leaves its term out; the inputs of a term that is there must be given.
    """
    loss, diagnostics = output.loss, dict(output.diagnostics)
    inputs = inputs.masked()
    if entropy_coefficient:
        assert inputs.entropy is not None, "an entropy bonus needs the entropy of each token"
        loss = loss - entropy_coefficient * inputs.entropy
    if kl_coefficient:
        assert inputs.reference_logprobs is not None, "a KL penalty needs the reference policy's logprobs"
        kl = kl_penalty(kl_estimator, inputs.logprobs, inputs.reference_logprobs, inputs.mask)
        loss, diagnostics["kl"] = loss + kl_coefficient * kl, kl.detach()
    return LossOutput(loss, diagnostics)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None) -> LossOutput:
    """PPO's clipped surrogate, negated; dual clip bounds it by c |A| for A < 0 (arXiv:1912.09729)."""
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
    return loss if inputs.behavior_weight is None else loss * inputs.behavior_weight


def _unit(logprobs: Tensor) -> Tensor:
    """1 with the gradient of logprobs: pi / sg(pi)."""
    return (logprobs - logprobs.detach()).exp()


def _binary_divergence(kind: str, behavior_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """TV or KL(mu || pi) between Bernoulli distributions of the two probabilities."""
    mu, pi = behavior_logprobs.exp(), logprobs.exp()
    if kind == "tv":
        return (mu - pi).abs()
    tiny = torch.finfo(torch.float32).tiny
    # log(1 - p) from expm1: 1 - p itself is 0 for the many tokens of probability near 1.
    log_rest_mu = (-torch.expm1(behavior_logprobs)).clamp(min=tiny).log()
    log_rest_pi = (-torch.expm1(logprobs)).clamp(min=tiny).log()
    return mu * (behavior_logprobs - logprobs) + (1 - mu) * (log_rest_mu - log_rest_pi)
