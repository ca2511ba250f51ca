"""KL estimators in value and gradient, and the adaptive coefficient."""

from __future__ import annotations

import pytest
import torch

from async_rl.algos.kl import adaptive_coefficient, default_estimator, divergence, kl_penalty
from tests.algos.inputs import packed
from tests.reference import losses as reference


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values_and_gradients(estimator: str) -> None:
    batch = packed(0)
    logprobs = batch.logprobs.clone().requires_grad_()
    penalty = kl_penalty(estimator, logprobs, batch.behavior, batch.mask)
    (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
    for t in range(len(batch.mask)):
        if batch.mask[t]:
            value, slope = reference.kl(estimator, float(batch.logprobs[t]), float(batch.behavior[t]))
        else:
            value, slope = 0.0, 0.0
        assert float(penalty.detach()[t]) == pytest.approx(value, rel=1e-4, abs=2e-6)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-4, abs=2e-6)


def test_expectations_on_policy() -> None:
    """Over a whole distribution: k1 and k3 give the KL; in the loss k2 its gradient, k1 none, k3 the other direction's.

    In the reward, where the value is a constant, k1 has its gradient, and k3 that less the other direction's.
    """
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    other = torch.log_softmax(torch.tensor([0.0, 0.4, -0.5, 0.9], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    probabilities = policy.exp().detach()
    forward = (policy.exp() * (policy - other)).sum()
    backward = (other.exp() * (other - policy)).sum()
    wanted = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": torch.autograd.grad(forward, logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(backward, logits, retain_graph=True)[0],
    }
    for estimator, gradient in wanted.items():
        expectation = (probabilities * divergence(estimator, policy - other)).sum()
        if estimator != "k2":
            torch.testing.assert_close(expectation, forward)
        torch.testing.assert_close(torch.autograd.grad(expectation, logits, retain_graph=True)[0], gradient)
    in_reward = {"k1": wanted["k2"], "k3": wanted["k2"] - wanted["k3"]}
    for estimator, gradient in in_reward.items():
        value = divergence(estimator, (policy - other).detach())
        expectation = (probabilities * value * policy).sum()
        torch.testing.assert_close(torch.autograd.grad(expectation, logits, retain_graph=True)[0], gradient)
    assert [default_estimator(place) for place in ("loss", "reward")] == ["k2", "k1"]


def test_k3_keeps_its_digits_near_zero() -> None:
    difference = torch.tensor([1e-3, -1e-3, 1e-2])
    expected = torch.expm1(-difference.double()) + difference.double()
    assert divergence("k3", difference).tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert (divergence("k3", torch.randn(10_000) * 1e-4) > -1e-10).all()


def test_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        divergence("k4", torch.zeros(1))


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (7.2, 1.02)]
)
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    assert adaptive_coefficient(2.0, kl, target=6.0, horizon=10) == pytest.approx(2 * expected)
