"""One step of the learner: a prepared batch in, optimizer updates, metrics out; on every rank alike.

The loss of an update is sum over tokens of (per-token loss * weight), with weights whose denominators are counted over
the whole mini-batch first. FSDP averages gradients over ranks, so each rank's share is multiplied by their number: then
micro-batching, packing and ranks cannot change the result.

Sequences whose advantage is exactly 0 have no gradient under any of the losses, which are all proportional to it. They
stay in the denominators but are not run, which saves most of the work once many groups are solved; correction/*,
mismatch/* and loss/* are then over the tokens that were run. A mini-batch without any signal still runs its first
group, so that these diagnostics never go blank, and Adam steps with the zero gradient that it has.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rl.algos.importance import behavior_weight
from async_rl.algos.losses import LossInputs, loss_function
from async_rl.algos.reductions import count, reduce, token_weights
from async_rl.config import Config
from async_rl.learner.batch import PreparedBatch, minibatch_sequences
from async_rl.learner.layout import MicroBatch
from async_rl.learner.model import Policy
from async_rl.learner.optim import Optimizer
from async_rl.learner.ranks import RankContext, max_over_ranks, sum_over_ranks
from async_rl.learner.tally import Tally, tally_loss, tally_policy
from async_rl.metrics import Metrics


@dataclass(frozen=True)
class _BatchTensors:
    """Per-token inputs of a whole batch, [T] each, on the policy's device."""

    behavior_logprobs: Tensor
    advantages: Tensor
    staleness: Tensor
    sequence_index: Tensor

    @classmethod
    def of(cls, batch: PreparedBatch, device: torch.device) -> _BatchTensors:
        arrays = (batch.behavior_logprobs, batch.token_advantages(), batch.staleness, batch.sequence_index())
        return cls(*(torch.tensor(array, device=device) for array in arrays))


class Updater:
    """Owns the optimizer; `step` is called once per batch, in step order, on every rank with the same batch."""

    def __init__(self, policy: Policy, config: Config, ctx: RankContext) -> None:
        self.policy = policy
        self.config = config
        self.ctx = ctx
        self.loss = loss_function(config.algorithm.loss)
        self.optimizer = Optimizer(policy.parameters(), config.learner, config.run.steps)

    def step(self, batch: PreparedBatch, step: int) -> Metrics:
        """Run all updates of one step and return its metrics, the batch's own included. Collective.

        Raises RuntimeError after too many non-finite gradients in a row.
        """
        learner = self.config.learner
        tensors = _BatchTensors.of(batch, self.ctx.device)
        tally = Tally(self.ctx.device, self.config.staleness.max_staleness)
        metrics = Metrics()
        metrics.merge(batch.metrics)
        metrics.last("optimizer/lr", self.optimizer.set_step(step))
        proximal = None
        if learner.epochs * learner.minibatches > 1:
            proximal = self._proximal_logprobs(batch)
        for _ in range(learner.epochs):
            for chosen in minibatch_sequences(batch, learner.minibatches):
                self._update(batch, tensors, chosen, proximal, tally, metrics)
        tally.record(metrics)
        self._record_memory(metrics)
        return metrics

    def _update(
        self,
        batch: PreparedBatch,
        tensors: _BatchTensors,
        chosen: np.ndarray,
        proximal: Tensor | None,
        tally: Tally,
        metrics: Metrics,
    ) -> None:
        """One optimizer update on a mini-batch."""
        weights = self._token_weights(batch, tensors, chosen)
        loss = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for micro_batch in self._micro_batches(batch, with_signal(batch, chosen)):
            logprobs, entropy = self.policy.logprobs(micro_batch, self.config.sampling.temperature)
            share = self._micro_loss(micro_batch, logprobs, entropy, tensors, weights, proximal, tally)
            (share * self.ctx.world).backward()
            loss += share.detach()
        report = self.optimizer.update(batch.step)
        metrics.mean("loss/policy", float(sum_over_ranks(loss)), 1.0)
        metrics.sum("optimizer/updates", float(report.applied))
        metrics.sum("optimizer/skipped_updates", float(not report.applied))
        if report.applied:
            metrics.mean("optimizer/grad_norm", report.grad_norm, 1.0)

    def _micro_loss(
        self,
        micro_batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        tensors: _BatchTensors,
        weights: Tensor,
        proximal: Tensor | None,
        tally: Tally,
    ) -> Tensor:
        """This micro-batch's share of the loss; exactly 0 for a placeholder, which only takes part in collectives."""
        tokens = micro_batch.tokens
        if not len(tokens):
            return (logprobs * 0.0).sum()
        inputs = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach() if proximal is None else proximal[tokens],
            behavior_logprobs=tensors.behavior_logprobs[tokens],
            advantages=tensors.advantages[tokens],
            mask=torch.ones_like(tokens, dtype=torch.bool),
            sequence_index=micro_batch.sequence_index,
            num_sequences=micro_batch.num_sequences,
            entropy=entropy,
        )
        correction = self.config.algorithm.correction
        tally_policy(tally, inputs, tensors.staleness[tokens], correction)
        weight, keep, sums = behavior_weight(
            correction,
            inputs.proximal_logprobs,
            inputs.behavior_logprobs,
            inputs.mask,
            inputs.sequence_index,
            inputs.num_sequences,
        )
        output = self.loss(replace(inputs, mask=keep, behavior_weight=weight))
        loss = reduce(output.loss, weights[tokens])
        tally.add(**sums)
        tally_loss(tally, inputs, output, loss)
        return loss

    @torch.no_grad()
    def _proximal_logprobs(self, batch: PreparedBatch) -> Tensor:
        """Logprobs at the start of the step of all tokens that any update will run, float32 [T]; 0 elsewhere."""
        result = torch.zeros(batch.num_tokens, device=self.ctx.device)
        parts = minibatch_sequences(batch, self.config.learner.minibatches)
        chosen = np.concatenate([with_signal(batch, part) for part in parts])
        for micro_batch in self._micro_batches(batch, chosen):
            logprobs, _ = self.policy.logprobs(micro_batch, self.config.sampling.temperature)
            result[micro_batch.tokens] = logprobs[: len(micro_batch.tokens)]
        return sum_over_ranks(result)

    def _micro_batches(self, batch: PreparedBatch, chosen: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the chosen sequences; every rank gets the same number of them."""
        plan = self.policy.plan(batch, chosen.tolist(), self.config.learner.micro_batch_tokens)
        for row in plan:
            yield self.policy.micro_batch(batch, row[self.ctx.rank])

    def _token_weights(self, batch: PreparedBatch, tensors: _BatchTensors, chosen: np.ndarray) -> Tensor:
        """Weight of each token of the batch in this update's loss, float32 [T]; 0 outside the mini-batch."""
        algorithm = self.config.algorithm
        inside = torch.zeros(len(batch.sequences), dtype=torch.bool, device=self.ctx.device)
        inside[torch.from_numpy(chosen)] = True
        mask = inside[tensors.sequence_index]
        args = (mask, tensors.sequence_index, len(batch.sequences))
        length = algorithm.constant_length or self.config.sampling.max_completion_tokens
        return token_weights(algorithm.reduction, *args, denominator=count(*args), constant_length=length)

    def _record_memory(self, metrics: Metrics) -> None:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gpu = torch.cuda.max_memory_allocated(self.ctx.device) if self.ctx.device.type == "cuda" else 0
        largest = max_over_ranks(torch.tensor([kib * 1024, gpu], dtype=torch.int64, device=self.ctx.device)).tolist()
        metrics.max("memory/learner_rss_bytes", largest[0])
        if self.ctx.device.type == "cuda":
            metrics.max("memory/learner_gpu_peak_bytes", largest[1])


def with_signal(batch: PreparedBatch, chosen: np.ndarray) -> np.ndarray:
    """The chosen sequences with a gradient; when there is none, those of the first group, for the diagnostics."""
    advantages = np.array([batch.sequences[index].advantage for index in chosen])
    if advantages.any() or not len(chosen):
        return chosen[advantages != 0]
    groups = np.array([batch.sequences[index].group for index in chosen])
    return chosen[groups == groups[0]]
