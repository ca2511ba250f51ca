"""Updates against a plain loop, and against themselves under every way of cutting the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.buffer import TrajectoryGroup
from async_rl.learner.batch import prepare_batch
from async_rl.learner.model import Policy
from async_rl.learner.update import Updater
from tests.learner.helpers import make_group, make_groups, make_trajectory
from tests.learner.plain import load_plain, plain_logprobs, plain_loss, plain_steps

EPS = 1e-4
"""AdamW's epsilon where weights are compared: with 1e-8 it would turn a rounding error of 1e-9 into a step of lr."""


def parameters(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_parameters("float32")}


def run_steps(
    load: Callable, kind: str, batches: list[list[TrajectoryGroup]], **sections: Any
) -> tuple[list[dict], Policy]:
    """One step per batch; the resolved metrics of each, and the policy."""
    policy, config = load(kind, **sections)
    updater = Updater(policy, config, policy.ctx)
    values = [
        updater.step(prepare_batch(groups, step, config), step).resolve()
        for step, groups in enumerate(batches, start=1)
    ]
    return values, policy


def batches(steps: int) -> list[list[TrajectoryGroup]]:
    return [make_groups(seed=step) for step in range(steps)]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_five_steps_equal_a_plain_loop(load: Callable, models: dict[str, Path], kind: str) -> None:
    """Same losses, gradient norms and weights; clipping and truncated weights are active."""
    settings = {"lr": 1e-3, "eps": EPS, "max_grad_norm": 3.7}
    losses, norms, model = plain_steps(
        models[kind], batches(5), lr=1e-3, eps=EPS, max_norm=3.7, temperature=0.7, cap=2.0
    )
    values, policy = run_steps(load, kind, batches(5), algorithm={"correction": {"cap": 2.0}}, learner=settings)
    assert min(norms) < 3.7 < max(norms)
    assert values[0]["correction/truncated_share"] > 0
    assert [v["loss/policy"] for v in values] == pytest.approx(losses, abs=1e-5)
    assert [v["optimizer/grad_norm"] for v in values] == pytest.approx(norms, rel=1e-4)
    torch.testing.assert_close(parameters(policy), dict(model.named_parameters()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"micro_batch_tokens": 1}},
        {"learner": {"micro_batch_tokens": 30}},
        {"learner": {"logprob_chunk_tokens": 3}},
        {"model": {"attention": "eager"}},
        {"model": {"attention": "eager"}, "learner": {"micro_batch_tokens": 25}},
    ],
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "constant"])
def test_cutting_the_work_changes_nothing(load: Callable, sections: dict[str, Any], reduction: str) -> None:
    algorithm = {"algorithm": {"reduction": reduction, "correction": {"level": "geometric", "cap": 1.5}}}
    whole, expected = run_steps(load, "tied", batches(1), **algorithm, learner={"eps": EPS})
    sections = {**sections, "learner": {"eps": EPS, **sections.get("learner", {})}}
    cut, policy = run_steps(load, "tied", batches(1), **algorithm, **sections)
    for key in ("loss/policy", "optimizer/grad_norm", "loss/entropy", "correction/effective_sample_size"):
        assert cut[0][key] == pytest.approx(whole[0][key], rel=1e-5, abs=1e-6), key
    torch.testing.assert_close(parameters(policy), parameters(expected), rtol=0, atol=1e-6)


def test_gradients_do_not_depend_on_the_cut(load: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam hides the size of a gradient, so the gradients themselves are compared."""
    seen: list[dict[str, Tensor]] = []
    for budget in (1, 30, 10_000):
        policy, config = load("untied", learner={"micro_batch_tokens": budget})
        updater = Updater(policy, config, policy.ctx)

        def capture(step: int, policy: Policy = policy) -> Any:
            seen.append({name: p.grad.clone() for name, p in policy.model.named_parameters()})
            raise StopIteration

        monkeypatch.setattr(updater.optimizer, "update", capture)
        with pytest.raises(StopIteration):
            updater.step(prepare_batch(make_groups(), 1, config), 1)
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=1e-4, atol=1e-6)


def test_groups_without_signal_are_counted_but_not_run(load: Callable, models: dict[str, Path]) -> None:
    """The third group of `make_groups` has equal rewards: its tokens stay in the denominator."""
    policy, config = load("tied")
    seen: list[int] = []
    original = policy.micro_batch

    def count(batch: Any, units: Any) -> Any:
        seen.extend(index for unit in units for index in unit.sequences)
        return original(batch, units)

    policy.micro_batch = count
    values = Updater(policy, config, policy.ctx).step(prepare_batch(make_groups(), 1, config), 1).resolve()
    assert sorted(seen) == list(range(8))
    expected = float(plain_loss(load_plain(models["tied"]), make_groups(), 0.7, cap=5.0).detach())
    assert values["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert values["loss/tokens"] > values["mismatch/tokens"] > 0


def test_a_batch_without_signal_still_measures_and_steps(load: Callable) -> None:
    """No gradient: Adam's moments decay and the weights move on by momentum, as they would in a plain loop."""
    policy, config = load("tied")
    updater = Updater(policy, config, policy.ctx)
    updater.step(prepare_batch(make_groups(), 1, config), 1)
    before = parameters(policy)
    rng = np.random.default_rng(3)
    flat = [make_group(rng, t, 4, [make_trajectory(rng, 3, 1.0, [(1, 0, 3)]) for _ in range(4)]) for t in range(2)]
    values = updater.step(prepare_batch(flat, 2, config), 2).resolve()
    assert values["loss/policy"] == 0.0
    assert values["optimizer/grad_norm"] == 0.0
    assert values["optimizer/updates"] == 1.0
    assert values["mismatch/tokens"] == 12
    assert any(not torch.equal(tensor, before[name]) for name, tensor in parameters(policy).items())


def test_an_empty_batch_is_no_error(load: Callable) -> None:
    policy, config = load("tied")
    before = parameters(policy)
    rng = np.random.default_rng(3)
    failed = [make_group(rng, 0, 4, [make_trajectory(rng, 0, None)])]
    values = Updater(policy, config, policy.ctx).step(prepare_batch(failed, 1, config), 1).resolve()
    assert values["loss/tokens"] == 0
    assert values["optimizer/grad_norm"] == 0.0
    torch.testing.assert_close(parameters(policy), before, rtol=0, atol=0)


def test_mismatch_is_over_fresh_tokens_at_the_start_of_the_step(load: Callable, models: dict[str, Path]) -> None:
    """With the model's own logprobs as behavior it is zero, also with several updates; an offset on one token shows."""
    model = load_plain(models["tied"])
    rng = np.random.default_rng(5)
    members = [make_trajectory(rng, 4, float(i % 2), [(1, 0, 2), (2, 2, 4)]) for i in range(4)]
    group = make_group(rng, 0, 3, members)
    with torch.no_grad():
        for member in members:
            logprobs = plain_logprobs(model, group.problem, member, 0.7).numpy()
            member.behavior_logprobs[:] = logprobs
            member.behavior_logprobs[0] += 1.0  # sampled by version 1: stale, not a mismatch
    members[0].behavior_logprobs[3] -= 0.5
    policy, config = load("tied", learner={"minibatches": 2, "epochs": 2})
    values = Updater(policy, config, policy.ctx).step(prepare_batch([group], 3, config), 3).resolve()
    assert values["mismatch/logprob_abs_max"] == pytest.approx(0.5, abs=1e-4)
    assert values["mismatch/logprob_abs_mean"] == pytest.approx(0.5 / 8, abs=1e-4)
    assert values["optimizer/updates"] == 4


def test_later_updates_are_clipped_around_the_start_of_the_step(load: Callable) -> None:
    """With a large rate the second epoch's ratios leave the clip range, and a cut batch clips the same tokens."""
    learner = {"epochs": 3, "lr": 3e-2}
    whole, _ = run_steps(load, "tied", batches(1), learner=learner)
    cut, _ = run_steps(load, "tied", batches(1), learner={**learner, "micro_batch_tokens": 30})
    assert whole[0]["loss/clip_share_low"] > 0 and whole[0]["loss/clip_share_high"] > 0
    assert cut[0]["loss/clip_share_low"] == whole[0]["loss/clip_share_low"]
    assert cut[0]["loss/policy"] == pytest.approx(whole[0]["loss/policy"], rel=1e-4)
    assert whole[0]["correction/truncated_share"] == pytest.approx(cut[0]["correction/truncated_share"])


def test_two_minibatches_are_two_plain_updates(load: Callable, models: dict[str, Path]) -> None:
    """Each mini-batch has its own denominator; the behavior weight keeps the proximal policy of the step's start."""
    first, other = make_groups(groups=2)[0], make_groups(seed=9, groups=2)[0]
    groups = [first, TrajectoryGroup(1, other.problem, other.members)]
    settings = {"minibatches": 2, "batch_groups": 2, "lr": 1e-3, "eps": EPS}
    values, policy = run_steps(load, "untied", [groups], learner=settings)
    model, start = load_plain(models["untied"]), load_plain(models["untied"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    losses = []
    for group in groups:
        rewards = torch.tensor([m.reward for m in group.members], dtype=torch.float64)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        terms = []
        for member, advantage in zip(group.members, advantages, strict=True):
            sampled = torch.from_numpy(member.completion_mask.astype(bool))
            current = plain_logprobs(model, group.problem, member, 0.7)[sampled]
            proximal = plain_logprobs(start, group.problem, member, 0.7)[sampled].detach()
            weight = (proximal - torch.from_numpy(member.behavior_logprobs)[sampled]).exp().clamp(max=5.0)
            ratio = (current - proximal).exp()
            terms.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        optimizer.zero_grad()
        loss = torch.cat(terms).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert values[0]["loss/policy"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    torch.testing.assert_close(parameters(policy), dict(model.named_parameters()), rtol=0, atol=1e-5)
