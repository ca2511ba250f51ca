"""The profile of a step by staleness: its values, whatever the correction, the cut and the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.buffer import TrajectoryGroup
from async_rl.learner.batch import prepare_batch
from async_rl.learner.update import Updater
from tests.learner.helpers import make_group, make_trajectory
from tests.learner.plain import load_plain, plain_logprobs
from tests.reference.importance import effective_sample_size

OFFSETS = {0: 0.01, 1: -0.2, 2: 0.9}
"""Staleness -> log(start of the step / behavior) of its tokens."""
STEP = 5


def stale_groups(model: Any) -> list[TrajectoryGroup]:
    """Two groups whose behavior logprobs differ from the model's own by the offset of each token's staleness."""
    rng = np.random.default_rng(11)
    groups = []
    for ticket in range(2):
        spans = [(2, 0, 3), (3, 3, 4), (4, 4, 6)]
        members = [make_trajectory(rng, 6, float(place % 2), spans) for place in range(4)]
        groups.append(make_group(rng, ticket, 3, members))
        for member in members:
            with torch.no_grad():
                own = plain_logprobs(model, groups[-1].problem, member, 0.7).numpy()
            ages = np.repeat([2, 1, 0], [3, 1, 2])
            member.behavior_logprobs[:] = own - np.array([OFFSETS[int(age)] for age in ages], np.float32)
    return groups


def measured(load: Callable, models: dict[str, Path], **sections: dict[str, Any]) -> dict[str, float]:
    policy, config = load("tied", **sections)
    groups = stale_groups(load_plain(models["tied"]))
    return Updater(policy, config, policy.ctx).step(prepare_batch(groups, STEP, config), STEP).resolve()


def test_every_staleness_has_its_values(load: Callable, models: dict[str, Path]) -> None:
    values = measured(load, models)
    for age, tokens in ((0, 16), (1, 8), (2, 24)):
        log_ratio = OFFSETS[age]
        assert values[f"profile/tokens_{age}"] == tokens
        assert values[f"profile/effective_sample_size_{age}"] == pytest.approx(1.0, abs=1e-5)
        assert values[f"profile/k1_{age}"] == pytest.approx(-log_ratio, abs=1e-4)
        assert values[f"profile/k3_{age}"] == pytest.approx(math.exp(log_ratio) - 1 - log_ratio, abs=1e-4)
        assert values[f"profile/log_ratio_abs_{age}"] == pytest.approx(abs(log_ratio), abs=1e-4)
        assert values[f"profile/far_share_{age}"] == float(age == 2)
    assert "profile/tokens_3" not in values and "profile/tokens_older" not in values
    ratios = [math.exp(OFFSETS[age]) for age, tokens in ((0, 16), (1, 8), (2, 24)) for _ in range(tokens)]
    assert values["ratio/effective_sample_size"] == pytest.approx(effective_sample_size(ratios), abs=1e-4)
    assert values["ratio/far_share"] == pytest.approx(0.5)
    assert values["ratio/p01"] == pytest.approx(math.exp(-0.2), rel=0.011)
    assert values["ratio/p50"] == pytest.approx(math.exp(0.01), rel=0.011)
    assert values["ratio/p99"] == pytest.approx(math.exp(0.9), rel=0.011)
    total = 3 * 0.9 - 0.2 + 2 * 0.01
    assert values["ratio/kl_sequence_k1"] == pytest.approx(-total, abs=1e-3)
    assert values["ratio/kl_sequence_k3"] == pytest.approx(math.exp(total) - 1 - total, rel=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"correction": {"level": "none"}}},
        {"algorithm": {"loss": {"type": "ppo"}, "correction": {"level": "none"}}},
        {"algorithm": {"correction": {"mode": "mask", "floor": 0.99, "cap": 1.01, "rejections": ({"high": 1e-9},)}}},
        {"learner": {"micro_batch_tokens": 1}},
        {"learner": {"minibatches": 2, "epochs": 2, "lr": 0.05}},
    ],
)
def test_neither_correction_nor_loss_nor_cut_nor_updates_change_it(
    load: Callable, models: dict[str, Path], sections: dict[str, Any]
) -> None:
    plain, other = measured(load, models), measured(load, models, **sections)
    keys = [key for key in plain if key.startswith(("profile/", "ratio/")) and "tokens" not in key]
    assert len(keys) == 3 * 5 + 7
    for key in keys:
        assert other[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-4), key


def test_tokens_beyond_the_bound_share_a_row(load: Callable, models: dict[str, Path]) -> None:
    values = measured(load, models, staleness={"max_staleness": 0, "overdue": "keep"})
    assert (values["profile/tokens_0"], values["profile/tokens_older"]) == (16, 32)
    assert values["profile/log_ratio_abs_older"] == pytest.approx((24 * 0.9 + 8 * 0.2) / 32, abs=1e-4)


def test_icepops_own_mask_counts_as_masked(load: Callable, models: dict[str, Path]) -> None:
    loss = {"type": "icepop", "low": 0.5, "high": 2.0}
    values = measured(load, models, algorithm={"loss": loss, "correction": {"level": "none"}})
    assert values["correction/masked_share"] == pytest.approx(24 / 48)
