"""Behavior weights, rejections, veto, effective sample size, the log-linear proximal policy."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from async_rl.algos.importance import (
    behavior_weight,
    effective_sample_size,
    effective_sample_size_of_sums,
    loglinear_proximal,
    mean_weight_factor,
)
from async_rl.algos.ratios import (
    importance_ratio,
    keep_within,
    log_ratio,
    sequence_max,
    sequence_mean,
    sequence_sum,
    truncate,
)
from async_rl.config.schema import CorrectionConfig, Rejection
from tests.algos.inputs import Packed, packed
from tests.reference import importance as reference

SHORT = (3, 5, 2, 4, 1, 6, 2, 7, 3)


def weigh(config: CorrectionConfig, batch: Packed) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    where = (batch.mask, batch.index, batch.num_sequences)
    return behavior_weight(config, batch.proximal, batch.behavior, *where, ages(batch))


def ages(batch: Packed) -> torch.Tensor:
    """Staleness 0 to 4 of every token, masked ones included."""
    return (torch.arange(len(batch.mask)) * 7) % 5


def literal(config: CorrectionConfig, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and keep by the reference, sequence by sequence."""
    weight = torch.zeros(len(batch.mask), dtype=torch.float64)
    keep = torch.zeros(len(batch.mask), dtype=torch.bool)
    for sequence in range(batch.num_sequences):
        tokens = batch.valid(sequence)
        if not tokens:
            continue
        proximal, behavior = ([float(values[t]) for t in tokens] for values in (batch.proximal, batch.behavior))
        kept = [True] * len(tokens)
        weights = reference.weights(proximal, behavior, config.level, config.mode, config.floor, config.cap)
        for rule in config.rejections:
            passed = reference.kept_by_rejection(proximal, behavior, rule.estimator, rule.level, rule.low, rule.high)
            kept = [a and b for a, b in zip(kept, passed, strict=True)]
        if config.veto is not None and reference.vetoed(proximal, behavior, config.veto):
            kept = [False] * len(tokens)
        if config.max_token_staleness is not None:
            young = reference.young([int(ages(batch)[t]) for t in tokens], config.max_token_staleness)
            kept = [a and b for a, b in zip(kept, young, strict=True)]
        for t, (value, within), passed_all in zip(tokens, weights, kept, strict=True):
            keep[t] = within and passed_all
            weight[t] = value if keep[t] else 0.0
    return weight, keep


BOUNDS: tuple[tuple[Literal["k1", "k2", "k3"], float | None, float | None], ...] = (
    ("k1", -0.3, 0.25),
    ("k1", -0.3, None),
    ("k2", None, 0.3),
    ("k3", 0.01, 0.4),
)
CONFIGS = [
    *(
        CorrectionConfig(level=level, mode=mode, cap=1.28, floor=0.5 if mode == "mask" else 0.0)
        for level in ("none", "token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    ),
    *(
        CorrectionConfig(rejections=(Rejection(estimator=estimator, level=level, low=low, high=high),))
        for level in ("token", "sequence_mean", "sequence_sum", "sequence_max")
        for estimator, low, high in BOUNDS
    ),
    CorrectionConfig(level="none", veto=0.3),
    CorrectionConfig(max_token_staleness=2),
    CorrectionConfig(level="geometric", max_token_staleness=0, rejections=(Rejection(high=0.4),)),
    CorrectionConfig(
        level="geometric",
        mode="mask",
        cap=1.5,
        veto=0.2,
        rejections=(Rejection(estimator="k3", high=2.0), Rejection(estimator="k2", level="sequence_mean", high=1.5)),
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_weights_agree_with_the_reference(config: CorrectionConfig) -> None:
    totals = dict.fromkeys(("tokens", "kept", "truncated", "rejected"), 0.0)
    for seed in range(25):
        batch = packed(seed, SHORT, scale=0.7)
        weight, keep, sums = weigh(config, batch)
        expected, expected_keep = literal(config, batch)
        assert torch.equal(keep, expected_keep)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)
        assert weight.dtype == torch.float32
        assert float(sums["tokens"]) == int(batch.mask.sum())
        assert float(sums["kept"]) == int(keep.sum())
        assert float(sums["rejected"]) == int((batch.mask & ~keep).sum())
        limit = 99 if config.max_token_staleness is None else config.max_token_staleness
        assert int(sums["stale"]) == int((batch.mask & (ages(batch) > limit)).sum())
        assert float(sums["weight"]) == pytest.approx(float(expected.sum()), rel=1e-5)
        assert float(sums["weight_squared"]) == pytest.approx(float(expected.square().sum()), rel=1e-5)
        if config.level != "none" and config.mode == "truncate":
            assert float(sums["truncated"]) == int((keep & (weight == config.cap)).sum())
        else:
            assert float(sums["truncated"]) == 0
        for name in totals:
            totals[name] += float(sums[name])
    aged = config.max_token_staleness is not None
    rejects = bool(aged or config.rejections or config.veto or (config.mode == "mask" and config.level != "none"))
    truncates = config.level != "none" and config.mode == "truncate" and config.cap < 2
    assert (totals["rejected"] > 20) == rejects
    assert (totals["truncated"] > 20) or not truncates
    assert totals["kept"] > 20


def test_a_ratio_at_the_cap_is_not_truncated() -> None:
    zeros, where = torch.zeros(2), (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    for cap, truncated in ((1.0, 0), (0.999, 2)):
        _, _, sums = behavior_weight(CorrectionConfig(cap=cap), zeros, zeros, *where)
        assert int(sums["truncated"]) == truncated


def test_a_ratio_at_the_veto_stays() -> None:
    where = (torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    for ratio, kept in ((0.5, True), (0.4999, False)):
        _, keep, _ = behavior_weight(CorrectionConfig(veto=0.5), torch.tensor([ratio]).log(), torch.zeros(1), *where)
        assert bool(keep[0]) == kept


def test_a_rejection_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="`low` or `high`"):
        Rejection()


def test_a_product_below_float32_is_a_small_finite_weight() -> None:
    log_ratios = torch.full((300,), math.log(0.7))
    where = (torch.ones(300, dtype=torch.bool), torch.zeros(300, dtype=torch.int64), 1)
    weight, keep, _ = behavior_weight(CorrectionConfig(level="sequence"), log_ratios, torch.zeros(300), *where)
    assert keep.all()
    assert 0 < float(weight[0]) < 1e-8
    geometric = importance_ratio(log_ratios, torch.zeros(300), *where, "geometric")
    torch.testing.assert_close(geometric, torch.full((300,), 0.7))


def test_long_sequences_sum_before_the_clamp() -> None:
    log_ratios = torch.tensor([15.0, 15.0, -30.5, 0.0])
    where = (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 1)
    ratio = importance_ratio(log_ratios, torch.zeros(4), *where, "sequence")
    torch.testing.assert_close(ratio, torch.full((4,), math.exp(-0.5)))


def test_unknown_level_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token, sequence or geometric"):
        importance_ratio(
            torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1).long(), 1, "batch"
        )


def test_ratios_are_float32_whatever_comes_in() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    for one in (torch.bfloat16, torch.float32, torch.float64):
        for other in (torch.bfloat16, torch.float32, torch.float64):
            result = log_ratio(torch.tensor([-1.0, -2.0], dtype=one), torch.tensor([-2.0, -2.5], dtype=other), mask)
            torch.testing.assert_close(result, torch.tensor([1.0, 0.5]))


def test_sequence_statistics_skip_masked_tokens() -> None:
    values = torch.tensor([1.0, 99.0, 4.0, 7.0, float("nan")], dtype=torch.float64)
    where = (torch.tensor([True, False, True, True, False]), torch.tensor([0, 0, 0, 2, 1]), 3)
    torch.testing.assert_close(sequence_mean(values, *where), torch.tensor([2.5, 0.0, 7.0]))
    torch.testing.assert_close(sequence_max(values, *where), torch.tensor([4.0, -torch.inf, 7.0]))
    torch.testing.assert_close(sequence_sum(values[:4], where[1][:4], 3), torch.tensor([104.0, 0.0, 7.0]))


def test_truncate_and_keep_within() -> None:
    ratio = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    assert truncate(ratio, 2.0).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0])
    assert keep_within(ratio, 0.5, 2.0).tolist() == [False, True, True, True, False]


def test_effective_sample_size() -> None:
    for seed in range(5):
        batch = packed(seed)
        weight = (batch.proximal - batch.behavior).exp()
        expected = reference.effective_sample_size(weight[batch.mask].double().tolist())
        assert effective_sample_size(weight, batch.mask) == pytest.approx(expected, rel=1e-6)
    ones = torch.ones(4)
    assert effective_sample_size(ones, ones.bool()) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0]), ones.bool()) == 0.25
    assert effective_sample_size(ones, torch.zeros(4, dtype=torch.bool)) is None
    assert effective_sample_size(0 * ones, ones.bool()) == 0.0
    assert effective_sample_size(torch.full((4,), 1e30), ones.bool()) == pytest.approx(1.0)


def test_effective_sample_size_adds_over_micro_batches() -> None:
    batch = packed(2)
    _, _, whole = weigh(CorrectionConfig(), batch)
    parts = [weigh(CorrectionConfig(), batch.take(part))[2] for part in ([0, 4], [5, 1, 2], [3])]
    added = {name: sum(float(part[name]) for part in parts) for name in whole}
    assert added == pytest.approx({name: float(value) for name, value in whole.items()}, rel=1e-5)
    weight, _, _ = weigh(CorrectionConfig(), batch)
    expected = effective_sample_size(weight, batch.mask)
    assert effective_sample_size_of_sums(added["weight"], added["weight_squared"], added["tokens"]) == pytest.approx(
        expected
    )


def test_normalized_weights_have_mean_one_over_kept_tokens() -> None:
    config = CorrectionConfig(mode="mask", floor=0.5, cap=2.0)
    weight, keep, sums = weigh(config, packed(3))
    normalized = weight * mean_weight_factor(float(sums["weight"]), float(sums["kept"]))
    assert float(normalized[keep].mean()) == pytest.approx(1.0, rel=1e-5)
    assert torch.count_nonzero(normalized[~keep]) == 0
    torch.testing.assert_close(normalized[keep] / normalized[keep][0], weight[keep] / weight[keep][0])
    assert mean_weight_factor(0.0, 0.0) == 0.0


def test_loglinear_proximal() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    proximal = loglinear_proximal(logprobs, torch.full((4,), -3.0), torch.tensor([0, 1, 2, 4]))
    assert proximal.tolist() == pytest.approx([-1.0, -3.0, -2.0, -1.5])
    assert not proximal.requires_grad
    rounded = loglinear_proximal(logprobs.bfloat16(), torch.full((4,), -3.0).bfloat16(), torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(rounded, torch.tensor([-1.0, -3.0, -2.0, -5 / 3]))
