"""The learner's gradient against the formulas written out, for combinations of correction, penalties and reduction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rl.algos.kl import adaptive_coefficient
from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config
from async_rl.errors import InputError
from async_rl.learner.batch import token_staleness
from async_rl.learner.model import Policy
from async_rl.learner.update import Updater
from async_rl.protocol import Problem, Trajectory
from tests.learner.helpers import make_group, make_trajectory
from tests.learner.plain import load_plain, plain_logprobs, plain_scores
from tests.reference import advantages as reference_advantages
from tests.reference import losses as reference_losses
from tests.reference.update import Result, Rules, Token, update
from tests.tiny_models import tiny_model

STEP = 4
TEMPERATURE = 0.7


def decoupled_ppo(pi: float, prox: float, mu: float, adv: float, weight: float) -> tuple[float, float]:
    return reference_losses.decoupled_ppo(pi, prox, adv, weight, 0.2, 0.2, None)


def ppo(pi: float, prox: float, mu: float, adv: float, weight: float) -> tuple[float, float]:
    return reference_losses.ppo(pi, mu, adv, 0.2, 0.2, None)


def reinforce(pi: float, prox: float, mu: float, adv: float, weight: float) -> tuple[float, float]:
    return reference_losses.reinforce(pi, adv, weight)


REJECTION = ("k3", "sequence_mean", None, 1.1)
REJECT = {"rejections": [{"estimator": "k3", "level": "sequence_mean", "high": 1.1}]}
MASK = {"mode": "mask", "floor": 0.4, "cap": 2.0}
CASES: dict[str, tuple[dict[str, Any], Rules]] = {
    "entropy": ({"entropy_coefficient": 0.05}, Rules(decoupled_ppo, entropy_coefficient=0.05)),
    "kl_k1": ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, Rules(decoupled_ppo, kl=("k1", 0.1))),
    "kl_default_is_k2": ({"kl": {"coefficient": 0.1}}, Rules(decoupled_ppo, kl=("k2", 0.1))),
    "kl_k3_of_a_loss_with_its_own_ratio": (
        {"loss": {"type": "ppo"}, "kl": {"coefficient": 0.1, "estimator": "k3"}, "entropy_coefficient": 0.02},
        Rules(ppo, kl=("k3", 0.1), entropy_coefficient=0.02),
    ),
    "penalties_leave_with_rejected_tokens": (
        {"correction": MASK, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.02, "reduction": "constant"},
        Rules(
            decoupled_ppo, mode="mask", floor=0.4, cap=2.0, kl=("k2", 0.1), entropy_coefficient=0.02,
            reduction="constant", constant_length=16,
        ),
    ),
    "kept_tokens": (
        {"correction": MASK, "denominator": "kept"},
        Rules(decoupled_ppo, mode="mask", floor=0.4, cap=2.0, denominator="kept"),
    ),
    "kept_tokens_of_each_sequence": (
        {"correction": MASK, "denominator": "kept", "reduction": "sequence_mean_token_mean"},
        Rules(
            decoupled_ppo, mode="mask", floor=0.4, cap=2.0, denominator="kept", reduction="sequence_mean_token_mean"
        ),
    ),
    "kept_sequences": (
        {"correction": REJECT, "denominator": "kept", "reduction": "sequence_mean_token_sum"},
        Rules(decoupled_ppo, rejection=REJECTION, denominator="kept", reduction="sequence_mean_token_sum"),
    ),
    "kept_sequences_of_constant_length": (
        {"correction": REJECT, "denominator": "kept", "reduction": "constant", "loss": {"type": "ppo"}},
        Rules(ppo, rejection=REJECTION, denominator="kept", reduction="constant", constant_length=16),
    ),
    "normalized": (
        {"correction": {"normalize": True, "cap": 2.0}, "loss": {"type": "reinforce"}},
        Rules(reinforce, normalize=True, cap=2.0),
    ),
    "normalized_over_kept_sequences": (
        {"correction": {"normalize": True, "cap": 1.5, "level": "geometric", **REJECT}, "denominator": "kept"},
        Rules(
            decoupled_ppo, normalize=True, cap=1.5, level="geometric", rejection=REJECTION, denominator="kept"
        ),
    ),
    "normalized_beside_penalties": (
        {
            "correction": {"normalize": True, **MASK}, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.02,
            "denominator": "kept",
        },
        Rules(
            decoupled_ppo, normalize=True, mode="mask", floor=0.4, cap=2.0, kl=("k2", 0.1),
            entropy_coefficient=0.02, denominator="kept",
        ),
    ),
    "loglinear": (
        {"proximal": "loglinear", "correction": {"cap": 1.2}}, Rules(decoupled_ppo, cap=1.2)
    ),
    "loglinear_normalized": (
        {"proximal": "loglinear", "correction": {"cap": 1.2, "normalize": True}},
        Rules(decoupled_ppo, cap=1.2, normalize=True),
    ),
    "old_tokens_leave": (
        {"correction": {"max_token_staleness": 1}, "kl": {"coefficient": 0.1}},
        Rules(decoupled_ppo, most_staleness=1, kl=("k2", 0.1)),
    ),
    "old_tokens_leave_counts_and_mean_weight": (
        {
            "correction": {"max_token_staleness": 2, "normalize": True, "cap": 2.0, **REJECT}, "denominator": "kept",
            "reduction": "sequence_mean_token_mean", "entropy_coefficient": 0.02,
        },
        Rules(
            decoupled_ppo, most_staleness=2, normalize=True, cap=2.0, rejection=REJECTION, denominator="kept",
            reduction="sequence_mean_token_mean", entropy_coefficient=0.02,
        ),
    ),
    "old_tokens_leave_where_weights_are_1": (
        {"proximal": "behavior", "correction": {"max_token_staleness": 0}, "denominator": "kept"},
        Rules(decoupled_ppo, most_staleness=0, denominator="kept"),
    ),
    "behavior": (
        {"proximal": "behavior", "reduction": "sequence_mean_token_mean"},
        Rules(decoupled_ppo, reduction="sequence_mean_token_mean"),
    ),
}  # fmt: skip


def make_batch() -> list[TrajectoryGroup]:
    """Three groups of four with tokens of staleness 0, 2 and 3; the last group has equal rewards."""
    rng = np.random.default_rng(3)
    groups = []
    for ticket in range(3):
        members = []
        for place in range(4):
            length = int(rng.integers(3, 9))
            versions = [(0, 0, 1), (1, 1, 2), (3, 2, length)]
            members.append(make_trajectory(rng, length, 1.0 if ticket == 2 else float(place % 2), versions))
        groups.append(make_group(rng, ticket, 3, members))
    return groups


def members_of(groups: list[TrajectoryGroup]) -> list[tuple[Problem, Trajectory]]:
    return [(group.problem, member) for group in groups for member in group.members]


def group_advantages(groups: list[TrajectoryGroup], penalties: list[float] | None = None) -> list[float]:
    """GRPO's, of rewards less their penalties."""
    left = list(penalties or [0.0] * 12)
    result = []
    for group in groups:
        rewards = [float(member.reward or 0.0) - left.pop(0) for member in group.members]
        equal = max(rewards) == min(rewards)
        result += [0.0] * 4 if equal else reference_advantages.grpo(rewards, 1e-4, sample=True)
    return result


def proximal(mode: str, pi: float, mu: float, staleness: int) -> float:
    """log prox of a step with one update."""
    if mode == "behavior":
        return mu
    if mode == "loglinear" and staleness > 0:
        return mu / staleness + (1 - 1 / staleness) * pi
    return pi


def literal(
    model: PreTrainedModel, other: PreTrainedModel, groups: list[TrajectoryGroup], mode: str, rules: Rules
) -> tuple[Result, dict[str, Tensor]]:
    """The formulas at the model's own numbers, and the gradient that their derivatives make of it."""
    logprobs, entropies, sequences = [], [], []
    for problem, member in members_of(groups):
        scores = plain_scores(model, problem, member, TEMPERATURE)
        logprobs.append(scores.gather(1, torch.from_numpy(member.completion_ids).long()[:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(1))
        ref = plain_logprobs(other, problem, member, TEMPERATURE)
        ages = token_staleness(member, STEP).tolist()
        columns = (logprobs[-1].tolist(), member.behavior_logprobs.tolist(), ref.tolist(), entropies[-1].tolist(), ages)
        sequences.append(
            [
                Token(pi, proximal(mode, pi, mu, age), mu, ref, h, age)
                for pi, mu, ref, h, age in zip(*columns, strict=True)
            ]
        )
    result = update(sequences, group_advantages(groups), rules)
    cotangents = [torch.tensor(values) for values in (*result.by_logprob, *result.by_entropy)]
    model.zero_grad()
    torch.autograd.backward([*logprobs, *entropies], cotangents)
    return result, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def learner_gradient(
    policy: Policy, config: Config, groups: list[TrajectoryGroup]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The metrics, and the gradient of the only update before it is clipped."""
    updater = Updater(policy, config, policy.ctx)
    seen: dict[str, Tensor] = {}
    original = updater.optimizer.update

    def capture(step: int) -> Any:
        seen.update({name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()})
        return original(step)

    updater.optimizer.update = capture  # type: ignore[method-assign]
    values = updater.step(updater.prepare(groups, STEP), STEP).resolve()
    return values, seen


@pytest.mark.parametrize("budget", [10_000, 20])
@pytest.mark.parametrize("case", CASES)
def test_gradient(load: Callable, models: dict[str, Path], case: str, budget: int) -> None:
    """Value of the policy loss, and gradient of everything, however the work is cut."""
    algorithm, rules = CASES[case]
    if "kl" in algorithm:
        algorithm = {**algorithm, "kl": {**algorithm["kl"], "reference": str(models["other"])}}
    policy, config = load("tied", algorithm=algorithm, learner={"micro_batch_tokens": budget})
    plain, other = load_plain(models["tied"]), load_plain(models["other"])
    expected, gradient = literal(plain, other, make_batch(), config.algorithm.proximal, rules)
    values, actual = learner_gradient(policy, config, make_batch())
    assert values["loss/policy"] == pytest.approx(expected.policy_loss, rel=1e-4, abs=1e-6)
    removes = rules.mode == "mask" or rules.rejection is not None or rules.most_staleness is not None
    assert (0.1 < values["correction/masked_share"] < 0.9) == removes
    assert (0.1 < values["correction/stale_share"] < 0.9) == (rules.most_staleness is not None)
    torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=2e-6)


def run_epochs(load: Callable, algorithm: dict[str, Any], **learner: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and weights after a step of three epochs at a rate that moves ratios beyond the clip."""
    settings = {"epochs": 3, "lr": 1e-2, "eps": 1e-4, **learner}
    policy, config = load("tied", algorithm=algorithm, learner=settings)
    updater = Updater(policy, config, policy.ctx)
    values = updater.step(updater.prepare(make_batch(), STEP), STEP).resolve()
    return values, dict(policy.full_parameters("float32"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"loss": {"type": "reinforce"}, "proximal": "current", "correction": {"cap": 2.0}},
            {"loss": {"type": "truncated_is", "cap": 2.0}},
        ),
        ({"loss": {"type": "decoupled_ppo"}, "proximal": "behavior"}, {"loss": {"type": "ppo"}}),
    ],
)
def test_proximal_policies_that_make_one_loss_another(
    load: Callable, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Also when the policy moves within the step; a recomputed proximal policy gives something else."""
    values, weights = run_epochs(load, one)
    _, expected = run_epochs(load, other)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
    _, recomputed = run_epochs(load, {**one, "proximal": "recompute"})
    assert max(float((weights[name] - recomputed[name]).abs().max()) for name in weights) > 1e-4
    # Twelve trajectories, the last four without a gradient: counted once, though there are three updates.
    fresh = sum(len(member.completion_ids) - 2 for _, member in members_of(make_batch())[:8])
    assert values["mismatch/tokens"] == fresh


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"normalize": True, **MASK}, "kl": {"coefficient": 0.1}, "denominator": "kept"},
        {"correction": {"normalize": True, **MASK}, "denominator": "kept", "proximal": "loglinear"},
        {"entropy_coefficient": 0.1, "reduction": "sequence_mean_token_mean"},
    ],
)
def test_cutting_the_work_changes_nothing_with_several_updates(load: Callable, algorithm: dict[str, Any]) -> None:
    whole, expected = run_epochs(load, algorithm, minibatches=2)
    cut, weights = run_epochs(load, algorithm, minibatches=2, micro_batch_tokens=20)
    keys = ("loss/policy", "optimizer/grad_norm", "loss/entropy", "correction/masked_share")
    assert [cut[key] for key in keys] == pytest.approx([whole[key] for key in keys], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def summed_kl(
    model: PreTrainedModel, other: PreTrainedModel, groups: list[TrajectoryGroup], estimator: str
) -> list[float]:
    """KL(pi || ref) of each trajectory, summed over all of its tokens."""
    result = []
    for problem, member in members_of(groups):
        pi = plain_logprobs(model, problem, member, TEMPERATURE).tolist()
        ref = plain_logprobs(other, problem, member, TEMPERATURE).tolist()
        result.append(sum(reference_losses.kl(estimator, p, r)[0] for p, r in zip(pi, ref, strict=True)))
    return result


@pytest.mark.parametrize("estimator", [None, "k3"])
def test_kl_in_the_reward(load: Callable, models: dict[str, Path], estimator: str | None) -> None:
    """Summed over all sampled tokens, those that leave the loss included, and paid before advantages are computed."""
    kl = {"place": "reward", "coefficient": 0.2, "reference": str(models["other"]), "estimator": estimator}
    algorithm = {"kl": kl, "overlong": {"truncated": "mask"}}
    policy, config = load("tied", algorithm=algorithm, staleness={"max_staleness": 2})
    groups = make_batch()
    members = list(groups[1].members)
    members[1] = msgspec.structs.replace(members[1], status="truncated")
    groups[1] = TrajectoryGroup(1, groups[1].problem, tuple(members))
    updater = Updater(policy, config, policy.ctx)
    batch = updater.prepare(groups, STEP)
    plain, other = load_plain(models["tied"]), load_plain(models["other"])
    penalties = [0.2 * value for value in summed_kl(plain, other, groups, estimator or "k1")]
    expected = group_advantages(groups, penalties)
    del expected[5]  # The truncated one: in its group's mean, not in the loss.
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert all(sequence.positions[0] == 1 for sequence in batch.sequences)
    values = updater.step(batch, STEP).resolve()
    assert values["kl/reward_penalty"] == pytest.approx(sum(penalties) / 12, rel=1e-4)
    tokens = sum(len(member.completion_ids) for _, member in members_of(groups))
    for name in ("k1", "k3"):
        total = sum(summed_kl(plain, other, groups, name))
        assert values[f"kl/reference_{name}"] == pytest.approx(total / tokens, rel=1e-4)
    assert values["reward/mean"] == pytest.approx(8 / 12)


def test_kl_in_the_reward_is_of_the_behavior_policy_where_that_is_the_proximal_one(
    load: Callable, models: dict[str, Path]
) -> None:
    kl = {"place": "reward", "coefficient": 0.2, "reference": str(models["other"])}
    policy, config = load("tied", algorithm={"kl": kl, "proximal": "behavior"})
    batch = Updater(policy, config, policy.ctx).prepare(make_batch(), STEP)
    other = load_plain(models["other"])
    penalties = []
    for problem, member in members_of(make_batch()):
        ref = plain_logprobs(other, problem, member, TEMPERATURE).detach().numpy()
        penalties.append(0.2 * float((member.behavior_logprobs - ref).sum()))
    expected = group_advantages(make_batch(), penalties)
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_coefficient_follows_the_divergence(load: Callable, models: dict[str, Path], place: str) -> None:
    kl = {"coefficient": 0.2, "place": place, "target": 0.5, "horizon": 4, "reference": str(models["other"])}
    policy, config = load("tied", algorithm={"kl": kl})
    updater = Updater(policy, config, policy.ctx)
    first, second = (updater.step(updater.prepare(make_batch(), step), step).resolve() for step in (STEP, STEP + 1))
    assert first["kl/coefficient"] == 0.2
    assert second["kl/coefficient"] == pytest.approx(adaptive_coefficient(0.2, first["kl/reference_k3"], 0.5, 4))
    assert second["kl/coefficient"] != 0.2
    assert updater.kl is not None
    again = Updater(policy, config, policy.ctx)
    again.restore(updater.state())
    assert again.kl is not None
    assert again.kl.coefficient == updater.kl.coefficient != 0.2


def test_the_reference_is_a_frozen_copy(load: Callable, models: dict[str, Path]) -> None:
    """It stays what it was while the policy moves, and no parameter of it has a gradient."""
    policy, config = load("tied", algorithm={"kl": {"coefficient": 0.1}})
    updater = Updater(policy, config, policy.ctx)
    values = updater.step(updater.prepare(make_batch(), STEP), STEP).resolve()
    assert values["kl/reference_k3"] == pytest.approx(0.0, abs=1e-6)
    later = updater.step(updater.prepare(make_batch(), STEP + 1), STEP + 1).resolve()
    assert later["kl/reference_k3"] > 1e-5
    assert updater.kl is not None
    reference = updater.kl.reference
    assert reference.parameters() == []
    plain = dict(load_plain(models["tied"]).named_parameters())
    for name, parameter in reference.full_parameters("float32"):
        assert torch.equal(parameter, plain[name])


def test_in_bfloat16_the_reference_computes_what_the_policy_does(load: Callable) -> None:
    """Kept in bfloat16, where the policy's parameters are float32 and cast before they are used."""
    policy, config = load("tied", algorithm={"kl": {"coefficient": 0.1}}, model={"dtype": "bfloat16"})
    updater = Updater(policy, config, policy.ctx)
    assert updater.kl is not None
    stored = {parameter.dtype for parameter in updater.kl.reference.model.parameters()}
    assert stored == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    values = updater.step(updater.prepare(make_batch(), STEP), STEP).resolve()
    assert values["kl/reference_k3"] == 0.0


def test_a_reference_with_a_smaller_vocabulary_is_refused(load: Callable, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "small", tied=True, characters="0123456789")
    policy, config = load("tied", algorithm={"kl": {"coefficient": 0.1, "reference": str(folder)}})
    with pytest.raises(InputError, match=r"algorithm\.kl\.reference = .* knows 12 tokens, and the policy \d+"):
        Updater(policy, config, policy.ctx)
    policy, config = load("tied", algorithm={"kl": {"coefficient": 0.1, "reference": str(tmp_path / "none")}})
    with pytest.raises(InputError, match=r"algorithm\.kl\.reference = .*no such folder"):
        Updater(policy, config, policy.ctx)


def test_an_update_that_keeps_no_token_changes_nothing(load: Callable) -> None:
    correction = {"rejections": [{"estimator": "k2", "low": 1e6}], "normalize": True}
    policy, config = load("tied", algorithm={"correction": correction, "denominator": "kept"})
    values, gradient = learner_gradient(policy, config, make_batch())
    assert values["loss/policy"] == 0.0
    assert not any(tensor.any() for tensor in gradient.values())
