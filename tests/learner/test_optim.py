"""Schedule values, clipping, and what happens to a gradient that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from async_rl.config.schema import LearnerConfig
from async_rl.learner.optim import Optimizer, learning_rate


def rates(steps: range, **settings: object) -> list[float]:
    return [learning_rate(LearnerConfig(lr=1.0, **settings), step, 10) for step in steps]  # type: ignore[arg-type]


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    assert rates(range(1, 6), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_decay_ends_at_the_last_step() -> None:
    values = rates(range(2, 12), warmup_steps=2, decay="linear", min_lr_ratio=0.1)
    assert values == pytest.approx([1 - 0.9 * i / 8 for i in range(9)] + [0.1])


def test_cosine_decay() -> None:
    values = rates(range(1, 11), decay="cosine", min_lr_ratio=0.2)
    assert values == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(1, 11)])


def make(limit: int = 3, **settings: object) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    config = LearnerConfig(lr=0.1, max_nonfinite_updates=limit, **settings)  # type: ignore[arg-type]
    return parameter, Optimizer([parameter], config, total_steps=10)


def give(parameter: nn.Parameter, *values: float) -> None:
    parameter.grad = torch.tensor(values)


@pytest.mark.parametrize(("limit", "expected"), [(4.0, [2.4, 3.2]), (6.0, [3.0, 4.0]), (None, [3.0, 4.0])])
def test_clipping_scales_the_gradient_to_the_limit(limit: float | None, expected: list[float]) -> None:
    """Seen through AdamW's first moment, which is (1 - beta1) times the gradient."""
    parameter, optimizer = make(max_grad_norm=limit)
    give(parameter, 3.0, 4.0)
    report = optimizer.update(1)
    assert report.applied and report.grad_norm == 5.0 and report.clipped == (limit == 4.0)
    moment = optimizer.adamw.state[parameter]["exp_avg"] / 0.1
    assert moment.tolist() == pytest.approx(expected, rel=1e-5)
    assert parameter.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameter, optimizer = make()
    give(parameter, 1.0, 1.0)
    optimizer.update(1)
    before, moment = parameter.detach().clone(), optimizer.adamw.state[parameter]["exp_avg"].clone()
    give(parameter, 1.0, bad)
    assert not optimizer.update(2).applied
    assert parameter.tolist() == before.tolist()
    assert optimizer.adamw.state[parameter]["exp_avg"].tolist() == moment.tolist()
    assert parameter.grad is None


def test_too_many_in_a_row_end_the_run_and_a_good_one_starts_the_count_again() -> None:
    parameter, optimizer = make(limit=2)
    for value in (math.nan, 1.0, math.nan):
        give(parameter, value, 1.0)
        optimizer.update(7)
    give(parameter, math.nan, 1.0)
    with pytest.raises(RuntimeError, match=r"step 8: the gradient norm was nan.*max_nonfinite_updates = 2.*Lower"):
        optimizer.update(8)
