"""Off-policyness by staleness, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from async_rl.algos.diagnostics import by_staleness, log_ratio_counts, off_policyness, ratio_quantiles, staleness_sums
from tests.algos.inputs import Packed, packed
from tests.reference import importance as reference

MAX = 3


def staleness_of(batch: Packed) -> torch.Tensor:
    """0..6, and nonsense where masked."""
    places = torch.arange(len(batch.mask))
    return torch.where(batch.mask, (places * 5) % 7, (-10) ** (places % 9))


def sums_of(batch: Packed, staleness: torch.Tensor) -> torch.Tensor:
    return staleness_sums(batch.proximal, batch.behavior, batch.mask, staleness, MAX)


def test_measures_by_staleness() -> None:
    batch = packed(0)
    staleness = staleness_of(batch)
    sums = sums_of(batch, staleness)
    assert sums.dtype == torch.float64
    rows = by_staleness(sums)
    assert len(rows) == MAX + 2
    for age, row in enumerate(rows):
        chosen = batch.mask & ((staleness == age) if age <= MAX else (staleness > MAX))
        logs = [float(a - b) for a, b in zip(batch.proximal[chosen], batch.behavior[chosen], strict=True)]
        ratios = [math.exp(value) for value in logs]
        assert row is not None and row.tokens == len(logs) > 5
        assert row.ratio_mean == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
        assert row.effective_sample_size == pytest.approx(reference.effective_sample_size(ratios), rel=1e-5)
        assert row.k1 == pytest.approx(-sum(logs) / len(logs), rel=1e-4, abs=1e-6)
        assert row.k3 == pytest.approx(sum(r - 1 - v for r, v in zip(ratios, logs, strict=True)) / len(logs), rel=1e-4)
        assert row.log_ratio_abs_mean == pytest.approx(sum(map(abs, logs)) / len(logs), rel=1e-4)
        assert row.far_share == pytest.approx(sum(r > 2 or r < 0.5 for r in ratios) / len(ratios))
    whole = off_policyness(sums.sum(0))
    assert whole is not None and whole.tokens == int(batch.mask.sum())
    assert 0 < whole.far_share < 1


def test_sums_add_over_micro_batches() -> None:
    batch = packed(1)
    staleness = staleness_of(batch)
    added = torch.zeros_like(sums_of(batch, staleness))
    for part in ([0, 5], [1, 2, 3, 4]):
        tokens = torch.cat([torch.nonzero(batch.index == sequence)[:, 0] for sequence in part])
        added += sums_of(batch.take(part), staleness[tokens])
    torch.testing.assert_close(added, sums_of(batch, staleness))


def test_no_token_of_a_staleness_is_none_and_huge_ratios_stay_finite() -> None:
    proximal = torch.tensor([1e4, -1e4, 0.0])
    mask = torch.ones(3, dtype=torch.bool)
    rows = by_staleness(staleness_sums(proximal, torch.zeros(3), mask, torch.tensor([1, 1, 9]), 2))
    assert rows[0] is None and rows[2] is None
    assert rows[1] is not None and rows[1].effective_sample_size == pytest.approx(0.5)
    assert rows[3] is not None and rows[3].ratio_mean == 1.0


def test_a_ratio_of_exactly_two_or_a_half_is_not_far() -> None:
    two = torch.tensor(2.0).log()
    proximal = torch.stack([two, -two, torch.nextafter(two, two + 1), torch.nextafter(-two, -two - 1)])
    mask = torch.ones(4, dtype=torch.bool)
    rows = by_staleness(staleness_sums(proximal, torch.zeros(4), mask, torch.tensor([0, 0, 1, 1]), 1))
    assert [row and row.far_share for row in rows] == [0.0, 1.0, None]


def test_bins_reach_from_clamp_to_clamp_and_their_counts_add_with_other_sums() -> None:
    counts = log_ratio_counts(torch.tensor([-20.0, 20.0]), torch.ones(2, dtype=torch.bool))
    assert counts.dtype == torch.float64
    assert torch.nonzero(counts)[:, 0].tolist() == [0, len(counts) - 1], "a bin that nothing can lie in"


def test_quantiles_of_ratios_are_those_of_all_tokens_to_half_a_percent() -> None:
    parts = [packed(seed) for seed in range(3)]
    logs = [(batch.proximal - batch.behavior).where(batch.mask, 1e3) for batch in parts]
    counts = sum(log_ratio_counts(values, batch.mask) for values, batch in zip(logs, parts, strict=True))
    ordered = sorted(float(v) for values, batch in zip(logs, parts, strict=True) for v in values[batch.mask])
    shares = (0.01, 0.1, 0.5, 0.99, 1.0)
    expected = [math.exp(ordered[math.ceil(share * len(ordered)) - 1]) for share in shares]
    assert ratio_quantiles(counts, shares) == pytest.approx(expected, rel=0.00503)


def test_quantiles_at_the_edges() -> None:
    mask = torch.tensor([True, True, True, True, False])
    counts = log_ratio_counts(torch.tensor([-20.0, 0.0, 0.0, 20.0, 7.0]), mask)
    assert ratio_quantiles(counts, (0.25, 0.26, 0.75, 0.76)) == pytest.approx([math.exp(-20), 1.0, 1.0, math.exp(20)])
    assert ratio_quantiles(torch.zeros_like(counts), (0.5,)) == []


def test_a_log_ratio_that_is_not_a_number_is_in_no_bin() -> None:
    """As of a broken logprob: the update is skipped for its gradient, and the step is still measured."""
    counts = log_ratio_counts(torch.tensor([math.nan, 0.0, 1.0]), torch.tensor([True, True, True]))
    assert float(counts.sum()) == 2
