"""A plain synchronous learner, written out: one sequence at a time, the model's own logits, torch's AdamW.

Nothing of async_rl.learner is used here. Algorithm: RLOO or GRPO advantages given as rewards minus statistics by hand,
decoupled PPO at its single update (ratio 1), weight min(prox / mu, cap), mean over all tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.buffer import TrajectoryGroup
from async_rl.protocol import Problem, Trajectory


def load_plain(path: Path) -> PreTrainedModel:
    """The model in float32 with eager attention, without dropout."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def plain_scores(model: PreTrainedModel, problem: Problem, member: Trajectory, temperature: float) -> Tensor:
    """Log-probabilities of all tokens at the place of every completion token, [L, V]."""
    prompt, completion = problem.prompt_ids.tolist(), member.completion_ids.tolist()
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    return torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]


def plain_logprobs(model: PreTrainedModel, problem: Problem, member: Trajectory, temperature: float) -> Tensor:
    """Logprob of every completion token, [L]."""
    scores = plain_scores(model, problem, member, temperature)
    return torch.stack([scores[i, token] for i, token in enumerate(member.completion_ids.tolist())])


def plain_loss(
    model: PreTrainedModel, groups: Sequence[TrajectoryGroup], temperature: float, cap: float, eps: float = 1e-4
) -> Tensor:
    """-(1 / tokens) sum over tokens of min(pi / mu, cap) A pi / sg(pi), A = (r - mean) / (std + eps) in each group."""
    terms: list[Tensor] = []
    for group in groups:
        rewards = torch.tensor([member.reward for member in group.members], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + eps)
        for member, advantage in zip(group.members, advantages.tolist(), strict=True):
            logprobs = plain_logprobs(model, group.problem, member, temperature)
            for i, sampled in enumerate(member.completion_mask.tolist()):
                if sampled:
                    weight = min(float(torch.exp(logprobs[i].detach() - float(member.behavior_logprobs[i]))), cap)
                    ratio = torch.exp(logprobs[i] - logprobs[i].detach())
                    terms.append(-weight * advantage * ratio)
    return torch.stack(terms).sum() / len(terms)


def plain_steps(
    path: Path,
    batches: Sequence[Sequence[TrajectoryGroup]],
    lr: float,
    eps: float,
    max_norm: float,
    temperature: float,
    cap: float,
) -> tuple[list[float], list[float], PreTrainedModel]:
    """Train one step per batch; return losses, gradient norms before clipping, and the model."""
    model = load_plain(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)
    losses, norms = [], []
    for groups in batches:
        optimizer.zero_grad()
        loss = plain_loss(model, groups, temperature, cap)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, model
