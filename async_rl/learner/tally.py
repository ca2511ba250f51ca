"""What the updates of one step measured, as sums and maxima that add over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algos.importance import effective_sample_size_of_sums
from async_rl.algos.kl import divergence
from async_rl.algos.losses import LossInputs, LossOutput
from async_rl.algos.ratios import importance_ratio, log_ratio
from async_rl.config.schema import CorrectionConfig
from async_rl.learner.profile import Profile
from async_rl.learner.ranks import max_over_ranks, sum_over_ranks
from async_rl.metrics import Metrics

SUMS = (
    "tokens", "kept", "weight", "weight_squared", "truncated", "rejected", "stale",
    "entropy", "clipped_low", "clipped_high",
    "ratio", "k1", "k3", "fresh_tokens", "fresh_difference", "reference_k1", "reference_k3",
)  # fmt: skip
MAXIMA = ("ratio", "fresh_difference")


class Tally:
    """Running totals on the policy's device, float64; every rank holds its own until `record`."""

    def __init__(self, device: torch.device, max_staleness: int) -> None:
        self.profile = Profile(device, max_staleness)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)

    def add(self, **values: Tensor) -> None:
        """Add to named sums."""
        for name, value in values.items():
            self.sums[SUMS.index(name)] += value.detach()

    def maximum(self, **values: Tensor) -> None:
        """Raise named maxima, which are at least 0."""
        for name, value in values.items():
            place = MAXIMA.index(name)
            self.maxima[place] = torch.maximum(self.maxima[place], value.detach().max().double())

    def record(self, metrics: Metrics) -> dict[str, float]:
        """Total over all ranks into metrics; returns the sums. Collective."""
        self.profile.record(metrics)
        total = dict(zip(SUMS, sum_over_ranks(self.sums).tolist(), strict=True))
        largest = dict(zip(MAXIMA, max_over_ranks(self.maxima).tolist(), strict=True))
        tokens, fresh = total["tokens"], total["fresh_tokens"]
        metrics.sum("mismatch/tokens", fresh)
        metrics.mean("mismatch/logprob_abs_mean", total["fresh_difference"], fresh)
        if fresh:
            metrics.max("mismatch/logprob_abs_max", largest["fresh_difference"])
        if not tokens:
            return total
        share = effective_sample_size_of_sums(total["weight"], total["weight_squared"], tokens)
        if share is not None:
            metrics.mean("correction/effective_sample_size", share, 1.0)
        metrics.max("correction/ratio_max", largest["ratio"])
        for key, name in (
            ("correction/ratio_mean", "ratio"),
            ("correction/truncated_share", "truncated"),
            ("correction/masked_share", "rejected"),
            ("correction/stale_share", "stale"),
            ("correction/kl_behavior_current_k1", "k1"),
            ("correction/kl_behavior_current_k3", "k3"),
            ("loss/entropy", "entropy"),
            ("loss/clip_share_low", "clipped_low"),
            ("loss/clip_share_high", "clipped_high"),
        ):
            metrics.mean(key, total[name], tokens)
        return total


@torch.no_grad()
def tally_policy(
    tally: Tally, inputs: LossInputs, staleness: Tensor, config: CorrectionConfig, start_logprobs: Tensor | None
) -> None:
    """How far behavior, proximal, current and reference policy are apart; `inputs.mask` is all True here.

    Tokens of staleness 0 were sampled by the policy at the start of the step: a difference to `start_logprobs` there
    is a mismatch of engine and learner. None: the policy has moved on, and nothing is measured.
    """
    level = config.level if config.level != "none" else "token"
    ratio = importance_ratio(
        inputs.proximal_logprobs,
        inputs.behavior_logprobs,
        inputs.mask,
        inputs.sequence_index,
        inputs.num_sequences,
        level,
    )
    current = log_ratio(inputs.logprobs, inputs.behavior_logprobs, inputs.mask)
    tally.add(ratio=ratio.sum(), k1=-current.sum(), k3=(current.exp() - 1.0 - current).sum())
    tally.maximum(ratio=ratio)
    if start_logprobs is not None:
        tally.profile.add(inputs, start_logprobs, staleness)
        fresh = staleness == 0
        difference = torch.where(fresh, (start_logprobs - inputs.behavior_logprobs).abs(), 0.0)
        tally.add(fresh_tokens=fresh.sum(), fresh_difference=difference.sum())
        tally.maximum(fresh_difference=difference)
    if inputs.reference_logprobs is not None:
        away = log_ratio(inputs.logprobs, inputs.reference_logprobs, inputs.mask)
        tally.add(reference_k1=divergence("k1", away).sum(), reference_k3=divergence("k3", away).sum())


@torch.no_grad()
def tally_loss(tally: Tally, inputs: LossInputs, output: LossOutput) -> None:
    """Entropy and clipping of one micro-batch."""
    assert inputs.entropy is not None
    tally.add(entropy=inputs.entropy.sum())
    for name in ("clipped_low", "clipped_high"):
        if name in output.diagnostics:
            tally.add(**{name: output.diagnostics[name].sum()})
    if "masked" in output.diagnostics:
        tally.add(rejected=output.diagnostics["masked"].sum())  # By the loss itself, as IcePop does.
