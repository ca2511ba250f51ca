"""max_staleness = 0 is exactly synchronous training: the same numbers as a plain loop in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
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
REMAX = Path(__file__).parents[2] / "configs" / "algorithms" / "remax.toml"


def sample(model: Any, problem: Problem, seed: int | None, config: Config, end: int) -> list[int]:
    """One completion, token by token without a cache.

    Each token inverts the distribution at one uniform number; without a seed it is the most likely one.
    """
    tokens = problem.prompt_ids.tolist()
    for uniform in uniforms(seed, config.sampling.max_completion_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        cumulative = torch.softmax(logits / config.sampling.temperature, -1).double().cumsum(-1)
        drawn = (
            int(logits.argmax())
            if seed is None
            else int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
        )
        tokens.append(drawn)
        if drawn == end:
            break
    return tokens[len(problem.prompt_ids) :]


def uniforms(seed: int | None, count: int) -> torch.Tensor:
    """float64 [count], those of the engines for a seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed or 0), dtype=torch.float64)


def even_share(text: str) -> float:
    """The reward of conftest.py."""
    return sum(c in "02468" for c in text) / max(len(text), 1)


@dataclass
class Plain:
    """What a loop in one process sees at each step, and its model."""

    model: Any
    rewards: list[float] = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)
    """Mean reward of greedy completions; of ReMax."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def plain_loop(config: Config, steps: int, remax: bool) -> Plain:
    """GRPO or ReMax in one process: sample, score, one AdamW step, again."""
    tokenizer = load_tokenizer(config.model.path)
    source = build_environment(config).problems(tokenizer)
    plain = Plain(model := load_plain(Path(config.model.path)))
    learner = config.learner
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learner.lr, betas=learner.betas, eps=learner.eps, weight_decay=learner.weight_decay
    )

    def scored(problem: Problem, seed: int | None) -> tuple[list[int], float]:
        tokens = sample(model, problem, seed, config, tokenizer.eos_token_id)
        return tokens, even_share(tokenizer.decode(tokens, skip_special_tokens=True))

    for step in range(steps):
        terms, seen, greedy = [], [], []
        for index in range(learner.batch_groups):
            problem = source.draw()
            assert problem is not None
            ticket = step * learner.batch_groups + index
            seeds = [
                member_seed(config.run.seed, "train", ticket, member) for member in range(config.sampling.group_size)
            ]
            group = [scored(problem, seed) for seed in seeds]
            scores = torch.tensor([reward for _, reward in group], dtype=torch.float64)
            seen += scores.tolist()
            if remax:
                greedy.append(scored(problem, None)[1])
                advantages = scores - greedy[-1]
            else:
                advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            for (tokens, _), advantage in zip(group, advantages, strict=True):
                taken = logprobs_of(model, problem, tokens)
                terms.append(-float(advantage) * (taken if remax else torch.exp(taken - taken.detach())))
        optimizer.zero_grad()
        loss = torch.cat(terms).sum() / (len(terms) if remax else sum(map(len, terms)))
        loss.backward()
        plain.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), learner.max_grad_norm)))
        optimizer.step()
        plain.losses.append(float(loss.detach()))
        plain.rewards.append(sum(seen) / len(seen))
        plain.baselines.append(sum(greedy) / max(len(greedy), 1))
    return plain


def logprobs_of(model: Any, problem: Problem, tokens: list[int]) -> torch.Tensor:
    """[L], of each token of a completion, with a gradient."""
    ids = torch.tensor([problem.prompt_ids.tolist() + tokens])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, -len(tokens) - 1 : -1], -1)
    return logprobs.gather(1, ids[0, -len(tokens) :, None])[:, 0]


def compare(run: Run, overrides: tuple[str, ...], remax: bool) -> tuple[list[dict[str, Any]], Plain]:
    """Train without staleness, and the same in a plain loop: all numbers of every step agree; return both."""
    overrides = (*overrides, "staleness.max_staleness=0", f"run.steps={STEPS}", "evaluation.every=0")
    run.wait(run.start("train", str(run.config), *overrides))
    plain = plain_loop(load_config(run.config, overrides), STEPS, remax)
    rows = [row for row in run.metrics() if "loss/policy" in row]
    assert [row["staleness/max"] for row in rows] == [0] * STEPS
    assert [row["reward/mean"] for row in rows] == pytest.approx(plain.rewards, abs=1e-6)
    assert [row["loss/policy"] for row in rows] == pytest.approx(plain.losses, abs=1e-5)
    assert [row["optimizer/grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-4)
    assert len(set(plain.rewards)) > 1 and min(plain.norms) > 0, "a loop in which nothing happens proves nothing"
    trained = AutoModelForCausalLM.from_pretrained(run.folder / "run" / "model", dtype=torch.float32)
    for (name, ours), (_, theirs) in zip(trained.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3, msg=name)
    return rows, plain


def test_zero_staleness_equals_a_plain_loop(run: Run) -> None:
    compare(run, (), remax=False)


def test_remax_equals_a_plain_loop_whose_greedy_completions_only_give_the_baseline(run: Run) -> None:
    rows, plain = compare(run, (str(REMAX),), remax=True)
    assert [row["reward/baseline_mean"] for row in rows] == pytest.approx(plain.baselines, abs=1e-6)
    assert len(set(plain.baselines)) > 1
    rates = [
        row["throughput/baseline_tokens_per_s"] for row in run.metrics() if "throughput/baseline_tokens_per_s" in row
    ]
    assert sum(rates) > 0, "they were sampled by the fleet, and are counted apart"
