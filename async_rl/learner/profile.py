"""How far the data of one step is from the policy that trains on it, by staleness; measured whatever corrects for it.

The ratio is that of the policy at the start of the step to the behavior policy, token by token: what it is before any
update of the step moves it, and before a correction truncates, masks or rejects anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algos.diagnostics import (
    NUM_BINS,
    OffPolicyness,
    log_ratio_counts,
    off_policyness,
    ratio_quantiles,
    staleness_sums,
)
from async_rl.algos.kl import divergence
from async_rl.algos.losses import LossInputs
from async_rl.algos.ratios import clamp_log_ratio, log_ratio, raw_log_ratio, sequence_sum
from async_rl.learner.ranks import sum_over_ranks
from async_rl.metrics import Metrics

MAX_ROWS = 16
"""Staleness 0..15 has a row of its own where max_staleness allows it; older tokens share one."""
COLUMNS = 7
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


class Profile:
    """Running sums on the policy's device, float64; every rank holds its own until `record`."""

    def __init__(self, device: torch.device, max_staleness: int) -> None:
        self.oldest = min(max_staleness, MAX_ROWS - 1)
        self.rows = torch.zeros(self.oldest + 2, COLUMNS, dtype=torch.float64, device=device)
        self.counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=device)
        self.sequences = torch.zeros(3, dtype=torch.float64, device=device)
        """Number, k1 and k3 of whole sequences."""

    @torch.no_grad()
    def add(self, inputs: LossInputs, start_logprobs: Tensor, staleness: Tensor) -> None:
        """One micro-batch; `start_logprobs` are those of the policy at the start of the step."""
        pair = (start_logprobs, inputs.behavior_logprobs, inputs.mask)
        self.rows += staleness_sums(*pair, staleness, self.oldest)
        self.counts += log_ratio_counts(log_ratio(*pair), inputs.mask)
        totals = sequence_sum(raw_log_ratio(*pair), inputs.sequence_index, inputs.num_sequences)
        valid = sequence_sum(inputs.mask, inputs.sequence_index, inputs.num_sequences) > 0
        log_ratios = clamp_log_ratio(totals[valid])
        sums = (valid.sum(), divergence("k1", -log_ratios).sum(), divergence("k3", -log_ratios).sum())
        self.sequences += torch.stack([value.double() for value in sums])

    def record(self, metrics: Metrics) -> None:
        """Total over all ranks into metrics. Collective."""
        parts = (self.rows.flatten(), self.counts, self.sequences)
        flat = sum_over_ranks(torch.cat(parts)).cpu()
        rows, counts, sequences = flat.split([len(part) for part in parts])
        rows = rows.view(-1, COLUMNS)
        whole = off_policyness(rows.sum(0))
        if whole is None:
            return
        metrics.mean("ratio/effective_sample_size", whole.effective_sample_size, 1.0)
        metrics.mean("ratio/far_share", whole.far_share * whole.tokens, whole.tokens)
        for name, value in zip(QUANTILES, ratio_quantiles(counts, tuple(QUANTILES.values())), strict=True):
            metrics.last(f"ratio/{name}", value)
        number, k1, k3 = sequences.tolist()
        metrics.mean("ratio/kl_sequence_k1", k1, number)
        metrics.mean("ratio/kl_sequence_k3", k3, number)
        for age, row in enumerate(rows):
            measures = off_policyness(row)
            if measures is not None:
                _record_row(metrics, str(age) if age <= self.oldest else "older", measures)


def _record_row(metrics: Metrics, age: str, measures: OffPolicyness) -> None:
    tokens = measures.tokens
    metrics.sum(f"profile/tokens_{age}", tokens)
    metrics.mean(f"profile/effective_sample_size_{age}", measures.effective_sample_size, 1.0)
    metrics.mean(f"profile/log_ratio_abs_{age}", measures.log_ratio_abs_mean * tokens, tokens)
    metrics.mean(f"profile/k1_{age}", measures.k1 * tokens, tokens)
    metrics.mean(f"profile/k3_{age}", measures.k3 * tokens, tokens)
    metrics.mean(f"profile/far_share_{age}", measures.far_share * tokens, tokens)
