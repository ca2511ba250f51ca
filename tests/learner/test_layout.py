"""Packed, padded and separate sequences give the same logprobs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.learner.batch import PreparedBatch, prepare_batch
from async_rl.learner.model import Policy
from tests.learner.helpers import make_groups
from tests.learner.plain import load_plain, plain_logprobs


def score(policy: Policy, batch: PreparedBatch, budget: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs of all tokens in the loss in batch order, and gradients of a sum with a weight for each token."""
    weights = torch.linspace(-1, 2, batch.num_tokens)
    result = torch.full((batch.num_tokens,), torch.nan)
    for row in policy.plan(batch, range(len(batch.sequences)), budget):
        micro_batch = policy.micro_batch(batch, row[0])
        logprobs, _ = policy.logprobs(micro_batch, 0.7)
        (logprobs * weights[micro_batch.tokens]).sum().backward()
        result[micro_batch.tokens] = logprobs.detach()
    gradients = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return result, gradients


def expected_scores(path: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from separate sequences through the model's own head."""
    model = load_plain(path)
    parts = []
    for group in make_groups():
        for member in group.members:
            logprobs = plain_logprobs(model, group.problem, member, 0.7)
            parts.append(logprobs[torch.from_numpy(member.completion_mask.astype(bool))])
    logprobs = torch.cat(parts)
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_layouts_equal_separate_sequences(
    load: Callable, models: dict[str, Path], kind: str, attention: str, budget: int
) -> None:
    policy, config = load(kind, model={"attention": attention})
    assert policy.packed == (attention == "sdpa")
    logprobs, gradients = score(policy, prepare_batch(make_groups(), 1, config), budget)
    expected, expected_gradients = expected_scores(models[kind])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_prompts_are_read_once(load: Callable) -> None:
    policy, config = load("tied")
    batch = prepare_batch(make_groups(), 1, config)
    [[units]] = policy.plan(batch, range(len(batch.sequences)), 10_000)
    read = policy.micro_batch(batch, units).input_ids.numel()
    prompts = {s.group: len(s.prompt_ids) for s in batch.sequences}
    assert read == sum(prompts.values()) + sum(len(s.completion_ids) - 1 for s in batch.sequences)


def test_checkpointed_activations_change_nothing(load: Callable) -> None:
    policy, config = load("tied")
    batch = prepare_batch(make_groups(), 1, config)
    plain = score(policy, batch, 60)
    recomputing, _ = load("tied", model={"gradient_checkpointing": True})
    calls = []
    recomputing.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(score(recomputing, batch, 60), plain, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2 * len(policy.plan(batch, range(len(batch.sequences)), 60))


def test_entropy_is_that_of_the_sampling_distribution(load: Callable, models: dict[str, Path]) -> None:
    policy, config = load("untied")
    group = make_groups()[1]
    batch = prepare_batch([group], 1, config)
    [[units]] = policy.plan(batch, [0], 1000)
    _, entropy = policy.logprobs(policy.micro_batch(batch, units), 0.7)
    ids = torch.tensor([[*group.problem.prompt_ids.tolist(), *group.members[0].completion_ids.tolist()]])
    scores = torch.log_softmax(load_plain(models["untied"])(input_ids=ids).logits[0] / 0.7, dim=-1)
    expected = -(scores.exp() * scores).sum(-1)[len(group.problem.prompt_ids) - 1 : -1]
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-5)
    assert np.isfinite(entropy.detach().numpy()).all()
