"""The chunked head against log_softmax over all logits: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_rl.learner.logprobs import token_logprobs

T, E, V = 11, 8, 37


def inputs(dtype: torch.dtype = torch.float32, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(0, V, (T,), generator=generator)
    return draw(T, E), draw(V, E), draw(V) if bias else None, targets


def full(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The definition, with float32 behind the product."""
    scores = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).float() / temperature, dim=-1)
    return scores[torch.arange(T), targets], -(scores.exp() * scores).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], leaves: list[Tensor], use_entropy: bool) -> list[Tensor]:
    """Gradients of a sum with a different weight for each token."""
    weights = torch.linspace(-1, 2, T)
    total = (outputs[0] * weights).sum()
    if use_entropy:
        total = total + (outputs[1] * weights.flip(0)).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("use_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_full_softmax(chunk: int, use_entropy: bool, bias: bool) -> None:
    hidden, weight, offset, targets = inputs(bias=bias)
    leaves = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    got = token_logprobs(hidden, weight, offset, targets, 0.7, chunk)
    expected = full(hidden, weight, offset, targets, 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradients(got, leaves, use_entropy), gradients(expected, leaves, use_entropy), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [4, 11])
def test_bfloat16_weights_with_float32_reductions(chunk: int) -> None:
    """Values are exact given the bfloat16 product; gradients round once, not once for every chunk."""
    hidden, weight, _, targets = inputs(torch.bfloat16)
    got = token_logprobs(hidden, weight, None, targets, 0.7, chunk)
    expected = full(hidden, weight, None, targets, 0.7)
    assert got[0].dtype == got[1].dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(got, [hidden, weight], False), gradients(expected, [hidden, weight], False)
    assert ours[0].dtype == ours[1].dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_certain_token_has_finite_gradients() -> None:
    """Logits so far apart that other tokens have probability exactly 0."""
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, None, torch.tensor([0, 1]), 1.0, 8)
    assert logprobs.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]
    for gradient in torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight]):
        assert torch.isfinite(gradient).all()


def test_two_backward_passes_agree() -> None:
    """The kept scores are consumed by the first; the second computes them again."""
    hidden, weight, _, targets = inputs()
    logprobs, _ = token_logprobs(hidden, weight, None, targets, 0.7, 4)
    first = torch.autograd.grad(logprobs.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    torch.testing.assert_close(first, second)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def test_never_holds_more_logits_than_one_chunk() -> None:
    tokens, vocabulary, chunk = 64, 1000, 8
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    with _LargestTensor() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, None, torch.arange(tokens), 1.0, chunk)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest == chunk * vocabulary
