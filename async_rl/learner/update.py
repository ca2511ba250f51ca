"""One step of the learner: a prepared batch in, optimizer updates, metrics out; on every rank alike.

FSDP averages gradients over ranks, so each rank's share of the loss is multiplied by their number: then
micro-batching, packing and ranks cannot change the result.

Sequences whose advantage is exactly 0 have no gradient under any of the losses, which are all proportional to it. They
stay in the denominators but are not run, which saves most of the work once many groups are solved; correction/*,
mismatch/* and loss/* are then over the tokens that were run. A mini-batch without any signal still runs its first
group, so that these diagnostics never go blank, and Adam steps with the zero gradient that it has. All sequences are
run where one without advantage has a gradient (entropy bonus, KL penalty in the loss) or adds to what an update is
divided by (tokens that the correction keeps, the mean weight).
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_rl.config import Config
from async_rl.learner.batch import PreparedBatch, minibatch_sequences, prepare_batch
from async_rl.learner.model import Policy
from async_rl.learner.objective import BatchTensors, Objective, UpdateLoss
from async_rl.learner.optim import Optimizer
from async_rl.learner.ranks import RankContext, max_over_ranks
from async_rl.learner.reference import KlPenalty
from async_rl.learner.tally import Tally
from async_rl.metrics import Metrics

if TYPE_CHECKING:
    from async_rl.buffer import TrajectoryGroup


class Updater:
    """Owns the optimizer and the KL penalty; `prepare` and `step` are called once per batch, in step order.

    Both run on every rank with the same batch.
    """

    def __init__(self, policy: Policy, config: Config, ctx: RankContext) -> None:
        self.policy = policy
        self.config = config
        self.ctx = ctx
        self.objective = Objective(config)
        self.optimizer = Optimizer(policy.parameters(), config.learner, config.run.steps)
        self.kl = KlPenalty(config, policy) if config.algorithm.kl.coefficient > 0 else None
        self.kl_in_loss = self.kl if config.algorithm.kl.place == "loss" else None
        self.kl_in_reward = self.kl if config.algorithm.kl.place == "reward" else None

    def prepare(self, groups: Sequence[TrajectoryGroup], step: int) -> PreparedBatch:
        """The batch of a step, after a KL penalty in the reward. Collective."""
        if self.kl_in_reward is not None:
            return self.kl_in_reward.penalized_batch(groups, step)
        return prepare_batch(groups, step, self.config)

    def step(self, batch: PreparedBatch, step: int) -> Metrics:
        """Run all updates of one step and return its metrics, the batch's own included. Collective.

        Raises RuntimeError after too many non-finite gradients in a row.
        """
        learner = self.config.learner
        tally = Tally(self.ctx.device, self.config.staleness.max_staleness)
        metrics = Metrics()
        metrics.merge(batch.metrics)
        metrics.last("optimizer/lr", self.optimizer.set_step(step))
        tensors = self._tensors(batch)
        for epoch in range(learner.epochs):
            for number, chosen in enumerate(minibatch_sequences(batch, learner.minibatches)):
                self._update(batch, tensors, chosen, tally, metrics, first=epoch == number == 0)
        sums = tally.record(metrics)
        if self.kl_in_loss is not None:
            self.kl_in_loss.finish_step(metrics, sums["reference_k1"], sums["reference_k3"], sums["tokens"])
        self._record_memory(metrics)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors (plain data)."""
        coefficient = None if self.kl is None else self.kl.coefficient
        return {"skipped_in_row": self.optimizer.skipped_in_row, "kl_coefficient": coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned; a penalty that was off before starts with its configured coefficient."""
        self.optimizer.skipped_in_row = state["skipped_in_row"]
        if self.kl is not None and state["kl_coefficient"] is not None:
            self.kl.coefficient = state["kl_coefficient"]

    def _update(
        self,
        batch: PreparedBatch,
        tensors: BatchTensors,
        chosen: np.ndarray,
        tally: Tally,
        metrics: Metrics,
        first: bool,
    ) -> None:
        """One optimizer update on a mini-batch."""
        inside = torch.zeros(len(batch.sequences), dtype=torch.bool, device=self.ctx.device)
        inside[torch.from_numpy(chosen)] = True
        loss = UpdateLoss(
            objective=self.objective, tensors=tensors, chosen=inside, tally=tally, kl=self.kl_in_loss, first=first
        )
        budget = self.config.learner.micro_batch_tokens
        for micro_batch in self.policy.micro_batches(batch, self._run(batch, chosen), budget):
            logprobs, entropy = self.policy.logprobs(micro_batch, self.config.sampling.temperature)
            (loss.share(micro_batch, logprobs, entropy) * self.ctx.world).backward()
        value, factor = loss.finish()
        if factor != 1.0:
            self.optimizer.scale_gradients(factor)
        report = self.optimizer.update(batch.step)
        metrics.mean("loss/policy", value, 1.0)
        metrics.sum("optimizer/updates", float(report.applied))
        metrics.sum("optimizer/skipped_updates", float(not report.applied))
        if report.applied:
            metrics.mean("optimizer/grad_norm", report.grad_norm, 1.0)

    def _tensors(self, batch: PreparedBatch) -> BatchTensors:
        """The batch's tensors, with the logprobs that are computed before any update, of what any update will run."""
        tensors = BatchTensors.of(batch, self.ctx.device)
        learner = self.config.learner
        parts = [self._run(batch, part) for part in minibatch_sequences(batch, learner.minibatches)]
        run = [index for part in parts for index in part]
        start = reference = None
        if self.objective.needs_start:
            start = self.policy.score(batch, run, self.config.sampling.temperature, learner.micro_batch_tokens)
        if self.kl_in_loss is not None:
            reference = self.kl_in_loss.reference_logprobs(batch, run)
        return replace(tensors, start_logprobs=start, reference_logprobs=reference)

    def _run(self, batch: PreparedBatch, chosen: np.ndarray) -> list[int]:
        """Which of the chosen sequences take part in forward and backward."""
        return (chosen if self.objective.runs_every_sequence else with_signal(batch, chosen)).tolist()

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
