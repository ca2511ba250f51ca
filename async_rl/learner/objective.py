"""The loss of one optimizer update, micro-batch by micro-batch, and what the whole of it is divided by.

It is sum over tokens of (per-token loss * weight). A denominator over all tokens of the mini-batch is known before.
One over the tokens that the correction keeps, and the mean behavior weight of `correction.normalize`, are known only
when every micro-batch has run. The gradient of a sum is linear, so it is multiplied once by what exchanges them
(`UpdateLoss.finish`), and nothing has to run twice.

The exception is a mean weight beside an entropy bonus or a KL penalty, which it does not divide: there the logprobs of
the step's start are computed first, and with them the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_rl.algos.importance import behavior_weight, loglinear_proximal, mean_weight_factor
from async_rl.algos.losses import LossInputs, LossOutput, loss_function, penalized
from async_rl.algos.ratios import sequence_sum
from async_rl.algos.reductions import Denominator, count, recount, reduce, token_weights
from async_rl.config import Config
from async_rl.config.effect import penalizes_loss, rejects, several_updates, weighs
from async_rl.learner.batch import PreparedBatch
from async_rl.learner.layout import MicroBatch
from async_rl.learner.ranks import sum_over_ranks
from async_rl.learner.reference import KlPenalty
from async_rl.learner.tally import Tally, tally_loss, tally_policy


class Objective:
    """What a run's settings make of the loss."""

    def __init__(self, config: Config) -> None:
        self.algorithm = config.algorithm
        self.loss = loss_function(config.algorithm.loss)
        self.constant_length = config.algorithm.constant_length or config.sampling.max_completion_tokens
        self.counts_kept = self.algorithm.denominator == "kept" and rejects(self.algorithm)
        self.normalizes = self.algorithm.correction.normalize and weighs(self.algorithm)
        self.penalizes = penalizes_loss(self.algorithm)
        self.normalizes_first = self.normalizes and self.penalizes
        recomputes = self.algorithm.proximal == "recompute"
        self.needs_start = recomputes and (several_updates(config.learner) or self.normalizes_first)
        """Whether the logprobs of the step's start are computed before its first update."""
        self.runs_every_sequence = self.penalizes or self.counts_kept or self.normalizes
        """Whether a sequence of advantage 0 matters, by its gradient or by what it adds to a denominator."""


@dataclass(frozen=True, kw_only=True)
class BatchTensors:
    """Per-token inputs of a whole batch, [T] each, on the policy's device."""

    behavior_logprobs: Tensor
    advantages: Tensor
    staleness: Tensor
    sequence_index: Tensor
    start_logprobs: Tensor | None = None
    """Of the policy at the start of the step; None: not computed."""
    reference_logprobs: Tensor | None = None
    """None: no KL penalty in the loss."""

    @classmethod
    def of(cls, batch: PreparedBatch, device: torch.device) -> BatchTensors:
        """What the data alone says."""
        return cls(
            behavior_logprobs=torch.tensor(batch.behavior_logprobs, device=device),
            advantages=torch.tensor(batch.token_advantages(), device=device),
            staleness=torch.tensor(batch.staleness, device=device),
            sequence_index=torch.tensor(batch.sequence_index(), device=device),
        )


@dataclass(kw_only=True)
class UpdateLoss:
    """The loss of one update on this rank; `finish` is called once, when its micro-batches have run."""

    objective: Objective
    tensors: BatchTensors
    chosen: Tensor
    """bool [S], the sequences of the mini-batch, those that are not run included."""
    tally: Tally
    kl: KlPenalty | None
    """The penalty, where it stands in the loss."""
    first: bool
    """Whether no update of this step came before: then the current policy is that of the step's start."""

    def __post_init__(self) -> None:
        self.inside = self.chosen[self.tensors.sequence_index]
        self.counted = count(self.inside, self.tensors.sequence_index, len(self.chosen))
        self.weight_factor = self._weight_factor() if self.objective.normalizes_first else None
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.inside.device)
        """Policy loss, kept tokens, kept sequences, behavior weight."""

    def share(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """This micro-batch's share of the loss; exactly 0 for a placeholder, which only takes part in collectives."""
        if not len(micro_batch.tokens):
            return (logprobs * 0.0).sum()
        objective, inputs = self.objective, self._inputs(micro_batch, logprobs, entropy)
        correction = objective.algorithm.correction
        staleness = self.tensors.staleness[micro_batch.tokens]
        tally_policy(self.tally, inputs, staleness, correction, self._start(logprobs, micro_batch.tokens))
        where = (inputs.mask, inputs.sequence_index, inputs.num_sequences)
        weight, keep, sums = behavior_weight(
            correction, inputs.proximal_logprobs, inputs.behavior_logprobs, *where, staleness=staleness
        )
        self.tally.add(**sums)
        if self.weight_factor is not None:
            weight = weight * self.weight_factor
        kept = replace(inputs, mask=keep, behavior_weight=weight)
        output = objective.loss(kept)
        weights = self._token_weights(keep if objective.counts_kept else inputs.mask, inputs)
        policy = reduce(output.loss, weights)
        kept_sequences = (sequence_sum(keep, inputs.sequence_index, inputs.num_sequences) > 0).sum()
        values = (policy.detach(), sums["kept"], kept_sequences, sums["weight"])
        self.sums += torch.stack([value.double() for value in values])
        tally_loss(self.tally, inputs, output)
        return reduce(self._penalized(output, kept).loss, weights) if objective.penalizes else policy

    def finish(self) -> tuple[float, float]:
        """The policy loss, and the factor that the accumulated gradient still lacks. Collective."""
        loss, tokens, sequences, weight = sum_over_ranks(self.sums).tolist()
        factor = 1.0
        if self.objective.counts_kept:
            kept = Denominator(int(tokens), int(sequences))
            factor = recount(self.objective.algorithm.reduction, self.counted, kept)
        if self.objective.normalizes and self.weight_factor is None:
            factor *= mean_weight_factor(weight, tokens)
        return loss * factor, factor

    def _inputs(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> LossInputs:
        tokens, reference = micro_batch.tokens, self.tensors.reference_logprobs
        return LossInputs(
            logprobs=logprobs,
            proximal_logprobs=self._proximal(logprobs, tokens),
            behavior_logprobs=self.tensors.behavior_logprobs[tokens],
            advantages=self.tensors.advantages[tokens],
            mask=torch.ones_like(tokens, dtype=torch.bool),
            sequence_index=micro_batch.sequence_index,
            num_sequences=micro_batch.num_sequences,
            entropy=entropy,
            reference_logprobs=None if reference is None else reference[tokens],
        )

    def _start(self, logprobs: Tensor, tokens: Tensor) -> Tensor | None:
        """Logprobs at the start of the step; None when they are not known any more."""
        if self.tensors.start_logprobs is not None:
            return self.tensors.start_logprobs[tokens]
        return logprobs.detach() if self.first else None

    def _proximal(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        behavior = self.tensors.behavior_logprobs[tokens]
        match self.objective.algorithm.proximal:
            case "behavior":
                return behavior
            case "loglinear":
                return loglinear_proximal(logprobs, behavior, self.tensors.staleness[tokens])
            case "current":
                return logprobs.detach()
            case "recompute":
                start = self._start(logprobs, tokens)
                assert start is not None, "a step of several updates starts without its logprobs"
                return start

    def _token_weights(self, mask: Tensor, inputs: LossInputs) -> Tensor:
        """Weight of each token, float32 [T]; its sequence's own length is that of `mask`."""
        where = (mask, inputs.sequence_index, inputs.num_sequences)
        reduction = self.objective.algorithm.reduction
        return token_weights(reduction, *where, self.counted, self.objective.constant_length)

    def _penalized(self, output: LossOutput, inputs: LossInputs) -> LossOutput:
        """With entropy bonus and KL penalty, over the tokens that the correction keeps."""
        estimator, coefficient = ("k2", 0.0) if self.kl is None else (self.kl.estimator, self.kl.coefficient)
        return penalized(output, inputs, self.objective.algorithm.entropy_coefficient, estimator, coefficient)

    def _weight_factor(self) -> float:
        """1 / mean behavior weight of the mini-batch, from the logprobs of the step's start."""
        tensors = self.tensors
        assert tensors.start_logprobs is not None, "the mean weight needs the logprobs of the step's start"
        where = (self.inside, tensors.sequence_index, len(self.chosen))
        correction = self.objective.algorithm.correction
        _, _, sums = behavior_weight(
            correction, tensors.start_logprobs, tensors.behavior_logprobs, *where, staleness=tensors.staleness
        )
        return mean_weight_factor(float(sums["weight"]), float(sums["kept"]))
