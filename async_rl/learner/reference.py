"""The KL penalty: its reference policy, its coefficient, and its share of the rewards.

In the reward the divergence of a trajectory is summed over all tokens that the policy sampled, those too old for the
loss included, and is that of the policy at the start of the step (of the behavior policy where that is the proximal
one). The coefficient changes only between steps and from sums over all ranks, so that every rank has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from async_rl.algos.kl import adaptive_coefficient, default_estimator, divergence, kl_penalty
from async_rl.algos.ratios import log_ratio, sequence_sum
from async_rl.config import Config
from async_rl.config.schema import OverlongConfig
from async_rl.learner.batch import PreparedBatch, prepare_batch
from async_rl.learner.model import Policy, load_reference
from async_rl.learner.shaping import TrajectoryKl
from async_rl.metrics import Metrics

if TYPE_CHECKING:
    from async_rl.buffer import TrajectoryGroup


class KlPenalty:
    """One for a run, the same on every rank; exists only where the penalty is on."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.settings = config.algorithm.kl
        self.policy = policy
        self.reference = load_reference(self.settings.reference, policy, config.model, config.learner)
        self.estimator = self.settings.estimator or default_estimator(self.settings.place)
        self.coefficient = self.settings.coefficient

    def reference_logprobs(self, batch: PreparedBatch, chosen: Sequence[int]) -> Tensor:
        """Of the tokens of the chosen sequences, float32 [T], 0 elsewhere. Collective."""
        return self._score(self.reference, batch, chosen)

    def penalized_batch(self, groups: Sequence[TrajectoryGroup], step: int) -> PreparedBatch:
        """The batch of a step whose rewards have paid for their divergence. Collective."""
        whole = prepare_batch(groups, step, _with_every_token(self.config))
        everything = range(len(whole.sequences))
        behavior = torch.tensor(whole.behavior_logprobs, device=self.policy.ctx.device)
        if self.config.algorithm.proximal == "behavior":
            logprobs = behavior
        else:
            logprobs = self._score(self.policy, whole, everything)
        reference = self.reference_logprobs(whole, everything)
        kl = self._by_slot(whole, logprobs, reference)
        batch = prepare_batch(groups, step, self.config, TrajectoryKl(self.coefficient, kl))
        scored = [sequence.slot for sequence in whole.sequences]
        batch.metrics.mean("kl/reward_penalty", self.coefficient * float(kl[scored].sum()), len(scored))
        difference = log_ratio(logprobs, reference, torch.ones_like(logprobs, dtype=torch.bool))
        k1, k3 = (float(divergence(name, difference).double().sum()) for name in ("k1", "k3"))
        self.finish_step(batch.metrics, k1, k3, len(difference))
        return batch

    def _by_slot(self, batch: PreparedBatch, logprobs: Tensor, reference: Tensor) -> np.ndarray:
        """The estimate summed over each trajectory, float64 [num_slots]; 0 for members without tokens."""
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        estimates = kl_penalty(self.estimator, logprobs, reference, mask)
        index = torch.tensor(batch.sequence_index(), device=estimates.device)
        kl = np.zeros(batch.num_slots)
        slots = [sequence.slot for sequence in batch.sequences]
        kl[slots] = sequence_sum(estimates, index, len(batch.sequences)).tolist()
        return kl

    def _score(self, policy: Policy, batch: PreparedBatch, chosen: Sequence[int]) -> Tensor:
        learner = self.config.learner
        return policy.score(batch, chosen, self.config.sampling.temperature, learner.micro_batch_tokens)

    def finish_step(self, metrics: Metrics, k1: float, k3: float, tokens: float) -> None:
        """Record the sums of k1 and k3 over tokens, and the coefficient; then steer it by the mean of k3."""
        metrics.mean("kl/reference_k1", k1, tokens)
        metrics.mean("kl/reference_k3", k3, tokens)
        metrics.last("kl/coefficient", self.coefficient)
        target = self.settings.target
        if target is not None and tokens and np.isfinite(k3):
            self.coefficient = adaptive_coefficient(self.coefficient, k3 / tokens, target, self.settings.horizon)


def _with_every_token(config: Config) -> Config:
    """The same run, but no token leaves the loss for its age or for the length of its completion."""
    staleness = msgspec.structs.replace(config.staleness, overdue="keep")
    algorithm = msgspec.structs.replace(config.algorithm, overlong=OverlongConfig())
    return msgspec.structs.replace(config, staleness=staleness, algorithm=algorithm)
