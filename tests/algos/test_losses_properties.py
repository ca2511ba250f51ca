"""What holds for every loss: masks, packing, splits, the on-policy limit, finite values, float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from async_rl.algos import reductions
from async_rl.algos.importance import behavior_weight
from async_rl.algos.losses import LossInputs, LossOutput, loss_function, penalized, takes_behavior_weight
from async_rl.config.effect import OWN_PROXIMAL, OWN_RATIO
from async_rl.config.fields import tag_of
from async_rl.config.schema import (
    CorrectionConfig,
    DecoupledPpoLoss,
    DppoLoss,
    Loss,
    PpoLoss,
    Rejection,
    ToprLoss,
)
from tests.algos.inputs import Packed, packed

LOSSES: list[Loss] = [
    *(kind() for kind in get_args(Loss)),
    PpoLoss(dual_clip=3.0),
    DecoupledPpoLoss(dual_clip=3.0),
    ToprLoss(level="token"),
    ToprLoss(level="geometric"),
    DppoLoss(divergence="kl"),
]
"""Every loss that settings can name, a new one by itself, and those variants that take another branch."""
REDUCTIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
each_loss = pytest.mark.parametrize("config", LOSSES, ids=str)


def with_penalties(config: Loss, inputs: LossInputs) -> LossOutput:
    """The loss with an entropy bonus and a KL term on top."""
    return penalized(
        loss_function(config)(inputs), inputs, entropy_coefficient=0.01, kl_estimator="k3", kl_coefficient=0.1
    )


def inputs_of(batch: Packed, logprobs: Tensor) -> LossInputs:
    """All inputs, with a behavior weight, and stand-ins for entropy and reference that depend on the token only."""
    weight = (batch.proximal - batch.behavior).exp().clamp(max=5)
    return replace(batch.inputs(logprobs, weight), entropy=-logprobs / 2, reference_logprobs=batch.behavior)


@each_loss
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30, -700.0])
def test_masked_tokens_change_nothing_and_get_exactly_zero_gradient(config: Loss, garbage: float) -> None:
    batch = packed(1)
    noisy = batch.map(lambda values: torch.where(batch.mask, values, garbage))
    results = []
    for each in (batch, noisy):
        logprobs = each.logprobs.clone().requires_grad_()
        loss = with_penalties(config, inputs_of(each, logprobs)).loss
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.count_nonzero(loss[~batch.mask]) == 0
        assert torch.count_nonzero(gradient[~batch.mask]) == 0
        results.append((loss, gradient))
    (loss, gradient), (noisy_loss, noisy_gradient) = results
    assert torch.equal(loss[batch.mask], noisy_loss[batch.mask])
    assert torch.equal(gradient[batch.mask], noisy_gradient[batch.mask])
    assert torch.count_nonzero(gradient) > 0


def loss_and_gradient(config: Loss, reduction: str, batch: Packed, parts: list[list[int]]) -> tuple[float, Tensor]:
    """The loss of a batch, summed over micro-batches `parts`, and its gradient by original token."""
    denominator = reductions.Denominator(0, 0)
    for part in parts:
        taken = batch.take(part)
        denominator += reductions.count(taken.mask, taken.index, taken.num_sequences)
    total, gradient = 0.0, torch.zeros(len(batch.logprobs))
    for part in parts:
        taken = batch.take(part)
        logprobs = taken.logprobs.clone().requires_grad_()
        output = with_penalties(config, inputs_of(taken, logprobs))
        weights = reductions.token_weights(reduction, taken.mask, taken.index, len(part), denominator, 50)
        loss = reductions.reduce(output.loss, weights)
        (piece,) = torch.autograd.grad(loss, logprobs)
        gradient[torch.cat([torch.nonzero(batch.index == sequence)[:, 0] for sequence in part])] = piece
        total += loss.item()
    return total, gradient


@each_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_split_into_micro_batches_and_any_order_gives_the_same(config: Loss, reduction: str) -> None:
    batch = packed(3)
    whole, gradient = loss_and_gradient(config, reduction, batch, [[0, 1, 2, 3, 4, 5]])
    for parts in ([[5, 2, 0, 4, 1, 3]], [[0, 1], [2, 3, 4], [5]], [[4], [3], [5], [0], [2], [1]]):
        loss, pieces = loss_and_gradient(config, reduction, batch, parts)
        assert loss == pytest.approx(whole, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(pieces, gradient, rtol=1e-5, atol=1e-7)


@each_loss
def test_padding_of_any_content_changes_nothing(config: Loss) -> None:
    """Masked tokens appended to each sequence, and a sequence of nothing else."""
    batch, padding = packed(3), 4
    index = torch.cat([batch.index, torch.arange(batch.num_sequences + 1).repeat_interleave(padding)])
    order = torch.argsort(index, stable=True)
    num = padding * (batch.num_sequences + 1)
    padded = batch.map(lambda values: torch.cat([values, torch.full((num,), float("nan"))])[order])
    mask = torch.cat([batch.mask, torch.zeros(num, dtype=torch.bool)])[order]
    padded = replace(padded, mask=mask, index=index[order], num_sequences=batch.num_sequences + 1)
    for reduction in REDUCTIONS:
        loss, gradient = loss_and_gradient(config, reduction, batch, [[*range(batch.num_sequences)]])
        wider, padded_gradient = loss_and_gradient(config, reduction, padded, [[*range(padded.num_sequences)]])
        assert wider == pytest.approx(loss, rel=1e-6, abs=1e-7)
        back = torch.empty_like(padded_gradient)
        back[order] = padded_gradient
        assert torch.count_nonzero(back[len(batch.mask) :]) == 0
        torch.testing.assert_close(back[: len(batch.mask)], gradient, rtol=1e-6, atol=1e-8)


@each_loss
def test_on_policy_every_loss_has_the_gradient_of_reinforce(config: Loss) -> None:
    batch = packed(4)
    batch = replace(batch, proximal=batch.logprobs, behavior=batch.logprobs)
    logprobs = batch.logprobs.clone().requires_grad_()
    weight, keep, _ = behavior_weight(CorrectionConfig(), batch.proximal, batch.behavior, *batch_where(batch))
    assert torch.equal(keep, batch.mask)
    (gradient,) = torch.autograd.grad(loss_function(config)(batch.inputs(logprobs, weight)).loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.where(batch.mask, -batch.advantages, 0.0), rtol=1e-6, atol=0)


def batch_where(batch: Packed) -> tuple[Tensor, Tensor, int]:
    return batch.mask, batch.index, batch.num_sequences


EXTREME = [-1e4, -700.0, -104.0, -89.0, -20.1, -1e-30, 0.0, 1e-30, 20.1, 88.8, 89.0, 700.0, 1e4]
"""Log-ratios around the clamp, float32's range (88.7 nats), its denormals (103.3), float64's range (709), beyond."""

CORRECTIONS = [
    CorrectionConfig(level=level, mode=mode, floor=0.5 * (mode == "mask"))
    for level in ("none", "token", "sequence", "geometric")
    for mode in ("truncate", "mask")
] + [
    CorrectionConfig(cap=1e30, veto=1e-4, rejections=(Rejection(estimator=estimator, level=level, high=1e9),))
    for estimator in ("k1", "k2", "k3")
    for level in ("token", "sequence_mean", "sequence_sum", "sequence_max")
]


@each_loss
@pytest.mark.parametrize("length", [1, 300])
def test_extreme_log_ratios_stay_finite(config: Loss, length: int) -> None:
    pairs = [(a, b) for a in EXTREME for b in EXTREME]
    index = torch.arange(len(pairs)).repeat_interleave(length)
    behavior = torch.full((len(index),), -2.0)
    proximal = behavior + torch.tensor([b for _, b in pairs])[index]
    mask = torch.ones(len(index), dtype=torch.bool)
    for sign in (1.0, -1.0):
        for correction in CORRECTIONS if takes_behavior_weight(config) else CORRECTIONS[:1]:
            logprobs = (proximal + torch.tensor([a for a, _ in pairs])[index]).requires_grad_()
            weight, keep, sums = behavior_weight(correction, proximal, behavior, mask, index, len(pairs))
            inputs = LossInputs(
                logprobs=logprobs,
                proximal_logprobs=proximal,
                behavior_logprobs=behavior,
                advantages=torch.full_like(behavior, sign),
                mask=keep,
                sequence_index=index,
                num_sequences=len(pairs),
                behavior_weight=weight,
                entropy=-logprobs,
                reference_logprobs=behavior,
            )
            output = with_penalties(config, inputs)
            (gradient,) = torch.autograd.grad(output.loss.sum(), logprobs)
            assert torch.isfinite(output.loss).all() and torch.isfinite(gradient).all()
            assert torch.isfinite(weight).all() and all(torch.isfinite(value) for value in sums.values())


@each_loss
def test_bfloat16_inputs_are_computed_in_float32(config: Loss) -> None:
    batch = packed(5)
    rounded = batch.map(Tensor.bfloat16)
    widened = rounded.map(Tensor.float)
    losses, gradients = [], []
    for each in (rounded, widened):
        logprobs = each.logprobs.clone().requires_grad_()
        weight = torch.full_like(batch.logprobs, 0.7)
        loss = loss_function(config)(each.inputs(logprobs, weight)).loss
        assert loss.dtype == torch.float32
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss.sum(), logprobs)[0])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(gradients[0], gradients[1].bfloat16())


@each_loss
def test_the_behavior_weight_multiplies_or_is_ignored(config: Loss) -> None:
    batch = packed(6)
    plain = loss_function(config)(batch.inputs()).loss
    weighted = loss_function(config)(batch.inputs(weight=torch.full_like(batch.logprobs, 0.5))).loss
    assert torch.equal(weighted, plain * 0.5 if takes_behavior_weight(config) else plain)


@each_loss
def test_only_logprobs_and_entropy_get_a_gradient(config: Loss) -> None:
    batch = packed(7)
    inputs = inputs_of(batch, batch.logprobs)
    leaves: dict[str, Any] = {
        name: value.detach().clone().requires_grad_()
        for name, value in vars(inputs).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    with_penalties(config, replace(inputs, **leaves)).loss.sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == {"logprobs", "entropy"}
    assert len(leaves) == 7


@each_loss
def test_diagnostics_are_constants(config: Loss) -> None:
    batch = packed(9)
    output = loss_function(config)(batch.inputs(batch.logprobs.clone().requires_grad_()))
    assert not any(value.requires_grad for value in output.diagnostics.values())
    assert all(value.shape == output.loss.shape for value in output.diagnostics.values())


def test_penalties_add_entropy_and_kl() -> None:
    batch = packed(8)
    logprobs = batch.logprobs.clone().requires_grad_()
    entropy = torch.rand(len(logprobs)).requires_grad_()
    inputs = replace(batch.inputs(logprobs), entropy=entropy, reference_logprobs=batch.behavior)
    plain = loss_function(PpoLoss())(inputs)
    output = penalized(plain, inputs, entropy_coefficient=0.5, kl_estimator="k2", kl_coefficient=0.25)
    difference = logprobs.detach() - batch.behavior
    expected = torch.where(batch.mask, -0.5 * entropy.detach() + 0.125 * difference.square(), 0.0)
    torch.testing.assert_close(output.loss - plain.loss, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((output.loss - plain.loss).sum(), (entropy, logprobs))
    torch.testing.assert_close(gradients[0], torch.where(batch.mask, -0.5, 0.0))
    torch.testing.assert_close(gradients[1], torch.where(batch.mask, 0.25 * difference, 0.0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.diagnostics["kl"], torch.where(batch.mask, difference.square() / 2, 0.0))
    assert "clipped_low" in output.diagnostics and not output.diagnostics["kl"].requires_grad
    without = penalized(plain, batch.inputs(logprobs), entropy_coefficient=0.0, kl_estimator="k2", kl_coefficient=0.0)
    assert torch.equal(without.loss, plain.loss)


@each_loss
def test_what_a_loss_reads_is_what_the_settings_are_checked_by(config: Loss) -> None:
    """Settings that change only a policy that the loss does not read are refused as without effect."""
    batch = packed(4, scale=1e-2)  # near: no cap hides a change
    shifted = batch.map(lambda values: values + 0.3)

    def value(**changed: Tensor) -> Tensor:
        return loss_function(config)(replace(batch, **changed).inputs()).loss

    reads = {
        name: not torch.equal(value(), value(**{name: getattr(shifted, name)})) for name in ("proximal", "behavior")
    }
    assert reads == {"proximal": tag_of(config) in OWN_PROXIMAL, "behavior": tag_of(config) in OWN_RATIO}
    weighted = loss_function(config)(batch.inputs(weight=torch.full_like(batch.logprobs, 2.0))).loss
    assert torch.equal(weighted, value()) != takes_behavior_weight(config)
