"""max_staleness = 0 is exactly synchronous training: the same numbers as a plain loop in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config import Config, load_config
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import load_tokenizer
from async_rl.leasing import member_seed
from async_rl.protocol import Problem
from tests.e2e.conftest import Run
from tests.learner.plain import load_plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 6


def sample(model: Any, problem: Problem, seed: int, config: Config, end: int) -> list[int]:
    """One completion, token by token without a cache; each token inverts the distribution at one uniform number."""
    uniforms = torch.rand(
        config.sampling.max_completion_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    tokens = problem.prompt_ids.tolist()
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        cumulative = torch.softmax(logits / config.sampling.temperature, -1).double().cumsum(-1)
        tokens.append(int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)))
        if tokens[-1] == end:
            break
    return tokens[len(problem.prompt_ids) :]


def even_share(text: str) -> float:
    """The reward of conftest.py."""
    return sum(c in "02468" for c in text) / max(len(text), 1)


def plain_loop(config: Config) -> tuple[list[float], list[float], list[float], Any]:
    """GRPO in one process: sample, score, one AdamW step, again. Returns mean rewards, losses, norms and the model."""
    tokenizer = load_tokenizer(config.model.path)
    source = build_environment(config).problems(tokenizer)
    model = load_plain(Path(config.model.path))
    learner = config.learner
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learner.lr, betas=learner.betas, eps=learner.eps, weight_decay=learner.weight_decay
    )
    rewards, losses, norms = [], [], []
    for step in range(STEPS):
        terms, seen = [], []
        for index in range(learner.batch_groups):
            problem = source.draw()
            assert problem is not None
            ticket = step * learner.batch_groups + index
            group = []
            for member in range(config.sampling.group_size):
                seed = member_seed(config.run.seed, "train", ticket, member)
                tokens = sample(model, problem, seed, config, tokenizer.eos_token_id)
                group.append((tokens, even_share(tokenizer.decode(tokens, skip_special_tokens=True))))
            scores = torch.tensor([reward for _, reward in group], dtype=torch.float64)
            seen += scores.tolist()
            for (tokens, _), advantage in zip(group, (scores - scores.mean()) / (scores.std() + 1e-4), strict=True):
                ids = problem.prompt_ids.tolist() + tokens
                logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0] / 1.0, -1)
                for i, token in enumerate(tokens, start=len(ids) - len(tokens)):
                    taken = logprobs[i - 1, token]
                    terms.append(-float(advantage) * torch.exp(taken - taken.detach()))
        optimizer.zero_grad()
        loss = torch.stack(terms).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), learner.max_grad_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
        rewards.append(sum(seen) / len(seen))
    return rewards, losses, norms, model


def test_zero_staleness_equals_a_plain_loop(run: Run) -> None:
    overrides = ("staleness.max_staleness=0", f"run.steps={STEPS}", "evaluation.every=0")
    run.wait(run.start("train", str(run.config), *overrides))
    rewards, losses, norms, model = plain_loop(load_config(run.config, overrides))
    rows = [row for row in run.metrics() if "loss/policy" in row]
    assert [row["staleness/max"] for row in rows] == [0] * STEPS
    assert [row["reward/mean"] for row in rows] == pytest.approx(rewards, abs=1e-6)
    assert [row["loss/policy"] for row in rows] == pytest.approx(losses, abs=1e-5)
    assert [row["optimizer/grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert len(set(rewards)) > 1 and min(norms) > 0, "a loop in which nothing happens proves nothing"
    trained = AutoModelForCausalLM.from_pretrained(run.folder / "run" / "model", dtype=torch.float32)
    for (name, ours), (_, plain) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=1e-3, msg=name)
