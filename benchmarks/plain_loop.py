"""The loop that people write first: synchronous GRPO with transformers' generate, in 60 lines, on the same problems.

    python -m benchmarks.plain_loop configs/real.toml 'environment.kinds=["sum"]' --output RESULT.json

A peer for the real run: same model, problems, batch, learning rate and held-out set, all cores for both halves.
It ends when held-out accuracy reaches --goal; the result is the time until then.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from async_rl.config import Config, load_config
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import completion_text, load_tokenizer
from async_rl.protocol import Problem
from benchmarks.common import add_result_arguments, check_clean, result_file


class PlainLoop:
    """One model that samples and trains in turn."""

    def __init__(self, config: Config) -> None:
        self.config, self.tokenizer = config, load_tokenizer(config.model.path)
        self.environment = build_environment(config)
        self.source = self.environment.problems(self.tokenizer)
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learner.lr, weight_decay=0.0)
        self.pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    @torch.no_grad()
    def sample(self, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, a mask over completion tokens (end token included) and rewards."""
        longest = max(len(p.prompt_ids) for p in problems)
        ids = torch.full((len(problems), longest), self.pad)
        mask = torch.zeros_like(ids)
        for row, problem in enumerate(problems):
            ids[row, longest - len(problem.prompt_ids) :] = torch.from_numpy(problem.prompt_ids).long()
            mask[row, longest - len(problem.prompt_ids) :] = 1
        limit = self.config.sampling.max_completion_tokens
        out = self.model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=limit)
        done = (out[:, longest:] == self.model.generation_config.eos_token_id).cumsum(1)
        kept = (done == 0) | ((done == 1) & (out[:, longest:] == self.model.generation_config.eos_token_id))
        texts = [completion_text(self.tokenizer, row[m].numpy()) for row, m in zip(out[:, longest:], kept, strict=True)]
        rewards = torch.tensor([self.score(p, t) for p, t in zip(problems, texts, strict=True)])
        return out, torch.cat([mask, kept.long()], 1), rewards

    def score(self, problem: Problem, text: str) -> float:
        """The environment's reward of one completion."""
        return float(asyncio.run(self.environment.score(problem, text)).value or 0.0)

    def step(self) -> float:
        """One batch, one update; returns the mean reward."""
        size = self.config.sampling.group_size
        posed = [self.source.draw() for _ in range(self.config.learner.batch_groups)]
        ids, mask, rewards = self.sample([p for p in posed for _ in range(size) if p is not None])
        groups = rewards.view(-1, size)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        length = self.config.sampling.max_completion_tokens
        logits = self.model(ids, attention_mask=mask, position_ids=positions).logits[:, -length - 1 : -1]
        taken = torch.log_softmax(logits, -1).gather(-1, ids[:, -length:, None])[..., 0]
        kept = mask[:, -length:]
        loss = -(advantages[:, None] * torch.exp(taken - taken.detach()) * kept).sum() / kept.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(rewards.mean())

    def evaluate(self) -> float:
        """Accuracy on the held-out problems at temperature 1."""
        problems = [p for p in self.source.eval_problems() for _ in range(self.config.evaluation.samples)]
        return float(torch.cat([self.sample(problems[i : i + 64])[2] for i in range(0, len(problems), 64)]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations, whose time does not count")
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    torch.manual_seed(0)
    began, spent_evaluating = time.monotonic(), 0.0
    loop = PlainLoop(load_config(arguments.config, arguments.overrides))
    curve = []
    for step in range(arguments.steps + 1):
        reward = loop.step() if step else None
        if step % arguments.every == 0:
            now = time.monotonic()
            accuracy = loop.evaluate()
            spent_evaluating += time.monotonic() - now
            curve.append({"step": step, "seconds": now - began - spent_evaluating, "accuracy": accuracy})
            print(f"step {step}: reward {reward}, accuracy {accuracy:.3f}, {curve[-1]['seconds']:.0f} s", flush=True)
            if accuracy >= arguments.goal:
                break
    result_file(arguments, "benchmarks.plain_loop", {"goal": arguments.goal, "curve": curve})


if __name__ == "__main__":
    main()
