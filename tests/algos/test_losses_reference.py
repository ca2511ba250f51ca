"""Every loss against its paper's formula in float64, token by token, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from async_rl.algos.losses import LossOutput, loss_function
from async_rl.config.schema import (
    CispoLoss,
    DecoupledPpoLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    IcePopLoss,
    Loss,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
    ToprLoss,
    TruncatedIsLoss,
)
from tests.algos.inputs import Packed, packed
from tests.reference import losses as reference

Token = tuple[float, float, float, float, float]
"""pi, prox, mu, advantage, behavior weight."""
Reference = Callable[[float, float, float, float, float], tuple[float, float]]

TOKEN_LOSSES: list[tuple[Loss, Reference]] = [
    (PpoLoss(clip_low=0.2, clip_high=0.28), lambda pi, prox, mu, adv, w: reference.ppo(pi, mu, adv, 0.2, 0.28, None)),
    (PpoLoss(dual_clip=3.0), lambda pi, prox, mu, adv, w: reference.ppo(pi, mu, adv, 0.2, 0.2, 3.0)),
    (
        DecoupledPpoLoss(clip_low=0.2, clip_high=0.28),
        lambda pi, prox, mu, adv, w: reference.decoupled_ppo(pi, prox, adv, w, 0.2, 0.28, None),
    ),
    (
        DecoupledPpoLoss(dual_clip=2.0),
        lambda pi, prox, mu, adv, w: reference.decoupled_ppo(pi, prox, adv, w, 0.2, 0.2, 2.0),
    ),
    (ReinforceLoss(), lambda pi, prox, mu, adv, w: reference.reinforce(pi, adv, w)),
    (TruncatedIsLoss(cap=2.0), lambda pi, prox, mu, adv, w: reference.truncated_is(pi, mu, adv, 2.0)),
    (
        CispoLoss(clip_low=0.5, clip_high=0.28),
        lambda pi, prox, mu, adv, w: reference.cispo(pi, mu, adv, 0.5, 0.28),
    ),
    (
        SapoLoss(tau_positive=0.9, tau_negative=1.3),
        lambda pi, prox, mu, adv, w: reference.sapo(pi, prox, adv, w, 0.9, 1.3),
    ),
    (IcePopLoss(low=0.5, high=2.0), lambda pi, prox, mu, adv, w: reference.icepop(pi, prox, mu, adv, 0.5, 2.0)),
    (
        ToprLoss(level="token", cap=1.2),
        lambda pi, prox, mu, adv, w: reference.topr(pi, adv, reference_ratio(pi, mu), 1.2),
    ),
    (DppoLoss(threshold=0.05), lambda pi, prox, mu, adv, w: reference.dppo(pi, mu, adv, "tv", 0.05)),
    (DppoLoss(divergence="kl", threshold=0.05), lambda pi, prox, mu, adv, w: reference.dppo(pi, mu, adv, "kl", 0.05)),
]


def reference_ratio(pi: float, mu: float) -> float:
    return reference.geometric_mean_ratio([pi], [mu])


def run(config: Loss, batch: Packed, weight: torch.Tensor, cotangent: torch.Tensor) -> tuple[LossOutput, torch.Tensor]:
    """The loss and the gradient of sum(cotangent * loss)."""
    logprobs = batch.logprobs.clone().requires_grad_()
    output = loss_function(config)(batch.inputs(logprobs, weight))
    (gradient,) = torch.autograd.grad((output.loss * cotangent).sum(), logprobs)
    return output, gradient


def random_weights(seed: int, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """A behavior weight and a factor of the loss for each token."""
    generator = torch.Generator().manual_seed(seed)
    size = len(batch.logprobs)
    return 2 * torch.rand(size, generator=generator), 0.5 + torch.rand(size, generator=generator)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(("config", "literal"), TOKEN_LOSSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_token_losses(config: Loss, literal: Reference) -> None:
    for seed in range(20):
        batch = packed(seed)
        weight, cotangent = random_weights(seed, batch)
        expected = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        derivative = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        for t in torch.nonzero(batch.mask)[:, 0].tolist():
            token = (batch.logprobs[t], batch.proximal[t], batch.behavior[t], batch.advantages[t], weight[t])
            expected[t], derivative[t] = literal(*(float(value) for value in token))
        output, gradient = run(config, batch, weight, cotangent)
        close(output.loss, expected)
        close(gradient, derivative * cotangent.double())


def test_random_inputs_reach_every_branch() -> None:
    batches = [packed(seed) for seed in range(20)]
    for config, _ in TOKEN_LOSSES:
        outputs = [loss_function(config)(batch.inputs()) for batch in batches]
        for name in outputs[0].diagnostics:
            if name == "ratio":
                continue
            flags = torch.cat(
                [output.diagnostics[name][batch.mask] for output, batch in zip(outputs, batches, strict=True)]
            )
            assert 20 < int(flags.sum()) < len(flags) - 20, (config, name)


Flag = Callable[[float, float, float, float], bool]
"""Of pi, prox, mu and advantage."""


def far(pi: float, mu: float) -> bool:
    return abs(math.exp(pi) - math.exp(mu)) > 0.05


FLAGS: list[tuple[Loss, dict[str, Flag]]] = [
    (
        PpoLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        {
            "clipped_low": lambda pi, prox, mu, adv: adv < 0 and math.exp(pi - mu) < 0.8,
            "clipped_high": lambda pi, prox, mu, adv: adv > 0 and math.exp(pi - mu) > 1.28,
            "dual_clipped": lambda pi, prox, mu, adv: adv < 0 and math.exp(pi - mu) > 3,
        },
    ),
    (
        DecoupledPpoLoss(clip_low=0.2, clip_high=0.28),
        {
            "clipped_low": lambda pi, prox, mu, adv: adv < 0 and math.exp(pi - prox) < 0.8,
            "clipped_high": lambda pi, prox, mu, adv: adv > 0 and math.exp(pi - prox) > 1.28,
        },
    ),
    (TruncatedIsLoss(cap=2.0), {"clipped_high": lambda pi, prox, mu, adv: math.exp(pi - mu) > 2}),
    (
        CispoLoss(clip_low=0.5, clip_high=0.28),
        {
            "clipped_low": lambda pi, prox, mu, adv: math.exp(pi - mu) < 0.5,
            "clipped_high": lambda pi, prox, mu, adv: math.exp(pi - mu) > 1.28,
        },
    ),
    (SapoLoss(), {}),
    (
        GmpoLoss(clip_low=0.2, clip_high=0.3),
        {
            "clipped_low": lambda pi, prox, mu, adv: adv < 0 and pi - prox < -0.2,
            "clipped_high": lambda pi, prox, mu, adv: adv > 0 and pi - prox > 0.3,
        },
    ),
    (ReinforceLoss(), {}),
    (IcePopLoss(low=0.5, high=2.0), {"masked": lambda pi, prox, mu, adv: not 0.5 <= math.exp(prox - mu) <= 2}),
    (ToprLoss(level="token", cap=1.2), {"clipped_high": lambda pi, prox, mu, adv: adv < 0 and math.exp(pi - mu) > 1.2}),
    (
        DppoLoss(threshold=0.05),
        {
            "clipped_low": lambda pi, prox, mu, adv: adv < 0 and pi < mu and far(pi, mu),
            "clipped_high": lambda pi, prox, mu, adv: adv > 0 and pi > mu and far(pi, mu),
        },
    ),
]


@pytest.mark.parametrize(("config", "flags"), FLAGS, ids=[str(config) for config, _ in FLAGS])
def test_diagnostics_name_the_clipped_tokens(config: Loss, flags: dict[str, Flag]) -> None:
    for seed in range(5):
        batch = packed(seed)
        diagnostics = loss_function(config)(batch.inputs()).diagnostics
        assert set(diagnostics) - {"ratio"} == set(flags)
        for name, flag in flags.items():
            for t in range(len(batch.mask)):
                columns = (batch.logprobs, batch.proximal, batch.behavior, batch.advantages)
                expected = bool(batch.mask[t]) and flag(*(float(column[t]) for column in columns))
                assert bool(diagnostics[name][t]) == expected, (name, t)


@pytest.mark.parametrize(
    "config",
    [
        PpoLoss(clip_low=0, clip_high=0),
        DecoupledPpoLoss(clip_low=0, clip_high=0),
        GspoLoss(clip_low=0, clip_high=0),
        GmpoLoss(clip_low=0, clip_high=0),
        CispoLoss(clip_low=0, clip_high=0),
        TruncatedIsLoss(cap=1),
        ToprLoss(level="token", cap=1),
        IcePopLoss(low=1, high=1),
        DppoLoss(threshold=1e-9),
    ],
    ids=str,
)
def test_on_policy_nothing_is_clipped_even_by_a_band_of_no_width(config: Loss) -> None:
    batch = replace(packed(0), proximal=packed(0).behavior, logprobs=packed(0).behavior)
    for name, flags in loss_function(config)(batch.inputs()).diagnostics.items():
        assert name == "ratio" or not flags.any()


def test_a_ratio_at_the_dual_clip_is_not_clipped() -> None:
    """Exactly at it: the log-ratio is 1, and the clip the float32 nearest to e."""
    batch = packed(0).map(torch.zeros_like)
    batch = replace(batch, logprobs=batch.logprobs + 1, advantages=batch.advantages - 1)
    ratio = float(batch.logprobs[0].exp())
    for cap, clipped in ((ratio, False), (ratio * 0.999, True)):
        flags = loss_function(PpoLoss(dual_clip=cap))(batch.inputs()).diagnostics["dual_clipped"][batch.mask]
        assert bool(flags.any()) == bool(flags.all()) == clipped


@pytest.mark.parametrize(
    ("mu", "pi", "advantage", "clipped"),
    [
        (0.0, -2.0, -1.0, True),  # KL is 2: the other tokens had no probability and add nothing.
        (-1e-3, 0.0, 1.0, False),  # Probability 1 is only the nearest float32, and the divergence not infinite.
        (-1.0, 0.0, 1.0, True),
        (0.0, 0.0, 1.0, False),
    ],
)
def test_the_divergence_of_certain_tokens(mu: float, pi: float, advantage: float, clipped: bool) -> None:
    one = torch.ones(1)
    batch = Packed(one * pi, one * mu, one * mu, one * advantage, one.bool(), torch.zeros(1, dtype=torch.int64), 1)
    diagnostics = loss_function(DppoLoss(divergence="kl"))(batch.inputs()).diagnostics
    assert bool(diagnostics["clipped_low" if advantage < 0 else "clipped_high"]) == clipped


def test_a_token_without_advantage_is_never_clipped_by_a_sided_clip() -> None:
    batch = replace(packed(0), advantages=torch.zeros_like(packed(0).advantages))
    for config in (PpoLoss(dual_clip=2), DecoupledPpoLoss(dual_clip=2), GspoLoss(), GmpoLoss(), ToprLoss(), DppoLoss()):
        for name, flags in loss_function(config)(batch.inputs()).diagnostics.items():
            assert name == "ratio" or not flags.any()


SequenceLoss = Callable[[list[float], list[float], float, float, float], tuple[float, list[float]]]


@pytest.mark.parametrize(
    ("config", "literal", "scale"),
    [
        (GspoLoss(clip_low=0.2, clip_high=0.28), reference.gspo_sequence, 1.0),
        (GspoLoss(), reference.gspo_sequence, 1e-3),
        (GmpoLoss(clip_low=0.2, clip_high=0.28), reference.gmpo_sequence, 1.0),
    ],
    ids=["gspo", "gspo-near", "gmpo"],
)
def test_losses_of_sequences(config: GspoLoss | GmpoLoss, literal: SequenceLoss, scale: float) -> None:
    """Averaged over their tokens, with the sequence's own value at each, they are their papers' objectives."""
    clipped = {"clipped_low": 0, "clipped_high": 0, "inside": 0}
    for seed in range(30):
        batch = packed(seed, scale=scale)
        weight, _ = random_weights(seed, batch)
        weight = weight[batch.index]
        cotangent = torch.zeros(len(batch.logprobs))
        expected = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        derivative = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        for sequence in range(batch.num_sequences):
            tokens = batch.valid(sequence)
            if not tokens:
                continue
            loss, slopes = literal(
                [float(batch.logprobs[t]) for t in tokens],
                [float(batch.proximal[t]) for t in tokens],
                float(batch.advantages[tokens[0]]),
                config.clip_low,
                config.clip_high,
            )
            factor = float(weight[tokens[0]])
            for t, slope in zip(tokens, slopes, strict=True):
                expected[t], derivative[t], cotangent[t] = factor * loss, factor * slope, 1 / len(tokens)
        output, gradient = run(config, batch, weight, cotangent)
        close(output.loss, expected)
        close(gradient, derivative)
        for name in ("clipped_low", "clipped_high"):
            clipped[name] += int(output.diagnostics[name].sum())
        clipped["inside"] += int((gradient != 0).sum())
    assert min(clipped.values()) > 50, clipped


@pytest.mark.parametrize(
    ("level", "ratio"), [("sequence", reference.product_ratio), ("geometric", reference.geometric_mean_ratio)]
)
def test_topr_of_sequences(
    level: Literal["sequence", "geometric"], ratio: Callable[[list[float], list[float]], float]
) -> None:
    config = ToprLoss(level=level, cap=0.9)
    truncated = []
    for seed in range(20):
        batch = packed(seed, lengths=(3, 5, 2, 4, 1, 6, 2), scale=0.5)
        _, cotangent = random_weights(seed, batch)
        expected = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        derivative = torch.zeros(len(batch.logprobs), dtype=torch.float64)
        for sequence in range(batch.num_sequences):
            tokens = batch.valid(sequence)
            if tokens:
                pi, mu = ([float(values[t]) for t in tokens] for values in (batch.logprobs, batch.behavior))
                of_sequence = ratio(pi, mu)
            for t in tokens:
                advantage = float(batch.advantages[t])
                expected[t], derivative[t] = reference.topr(float(batch.logprobs[t]), advantage, of_sequence, 0.9)
        output, gradient = run(config, batch, torch.ones(len(cotangent)), cotangent)
        close(output.loss, expected)
        close(gradient, derivative * cotangent.double())
        truncated += output.diagnostics["clipped_high"][batch.mask & (batch.advantages < 0)].tolist()
    assert 20 < sum(truncated) < len(truncated) - 20
