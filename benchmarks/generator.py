"""Tokens per second of a whole generator against plain vLLM: what streaming, rewards and in-flight updates cost.

    python -m benchmarks.generator --output benchmarks/results/generator.json
    python -m benchmarks.generator --model models/smollm2-135m-instruct --output FILE
    python -m benchmarks.generator --draw benchmarks/results/generator.json

All sides run on one engine and sample the same completions (seeds decide them), in turns, each round begun by another
side, so that a busy machine hits all alike:

- plain: every request is given to AsyncLLM at once.
- streaming: a whole generator without rewards; a stand-in for the learner, in a process of its own, leases members
  over the socket, one for each that comes back, as a coordinator does; each is sampled, decoded and sent.
- rewards: the same, scored in the generator's own process.
- rewards in workers: scored by math-verify in worker processes instead (`math`'s reward), on the same cores.
- updates: as rewards, while the stand-in publishes weights evenly over the round: received during sampling, loaded in
  a pause; then every running request is computed anew (`generator.running_requests = "recompute"`).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from async_rl import protocol as p
from async_rl.config import Config, build_config
from async_rl.engines import build_engine
from async_rl.engines.base import Engine
from async_rl.engines.vllm import VllmEngine, _parameters
from async_rl.envs.arithmetic import Arithmetic
from async_rl.envs.base import Environment, build_environment
from async_rl.envs.reward_worker import RewardSpec
from async_rl.envs.rewards import RewardResult
from async_rl.envs.tokenize import load_tokenizer
from async_rl.generator import Generator
from async_rl.transport import Client
from benchmarks.common import (
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    result_file,
)
from benchmarks.generator_figure import draw
from benchmarks.generator_learner import LIMIT_BYTES, Round, serve

ROUND_TIMEOUT_S = 300.0
PLAIN, STREAMING, REWARDS, WORKERS, UPDATES = "plain", "streaming", "rewards", "rewards in workers", "updates"
OVER = {STREAMING: PLAIN, REWARDS: STREAMING, WORKERS: STREAMING, UPDATES: REWARDS}
"""Which side each is compared with, besides plain."""


class Unscored(Arithmetic):
    """No rewards."""

    async def score(self, problem: p.Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        return RewardResult(0.0, None)


class InWorkers(Arithmetic):
    """Scored as `math` does it, by math-verify in worker processes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pool = self.make_pool(RewardSpec(path="async_rl.envs.math_score:score"))

    async def score(self, problem: p.Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        return await Environment.score(self, problem, completion, truncated=truncated)


def make_leases(config: Config, requests: int) -> list[p.Lease]:
    """Members as a coordinator would lease them; every request has its own seed."""
    source = build_environment(config).problems(load_tokenizer(config.model.path))
    leases = []
    for ticket in range(requests):
        problem = source.draw()
        assert problem is not None
        sampling = p.SamplingParams(max_tokens=config.sampling.max_completion_tokens, temperature=1.0, seed=ticket)
        leases.append(p.Lease(kind="train", ticket=ticket, member=0, attempt=1, problem=problem, sampling=sampling))
    return leases


async def plain(llm: Any, leases: Sequence[p.Lease], number: int) -> Round:
    """Give every request to AsyncLLM at once, as its users do."""
    from vllm.inputs import tokens_input

    async def one(lease: p.Lease) -> int:
        prompt, name = tokens_input(lease.problem.prompt_ids.tolist()), f"plain-{number}-{lease.ticket}"
        outputs = [output async for output in llm.generate(prompt, _parameters(lease.sampling), name)]
        return len(outputs[-1].outputs[0].token_ids)

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, leases)))
    return Round(time.perf_counter() - began, tokens)


class Bench:
    """One engine in one generator, with the stand-in learner beside it."""

    def __init__(self, config: Config, leases: Sequence[p.Lease], publications: int) -> None:
        self.config, self.leases, self.publications = config, leases, publications
        self.environments = {STREAMING: Unscored(config), REWARDS: Arithmetic(config), WORKERS: InWorkers(config)}
        self.environments[UPDATES] = self.environments[REWARDS]
        self.engine: Engine = build_engine(config, seed=0, threads=config.generator.threads or 1)
        self.client = Client("benchmark", "1", LIMIT_BYTES)
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        told = (there, leases, config.generator.slots, Path(config.model.path))
        self.learner = context.Process(target=serve, args=told, daemon=True)
        self.generator: Generator | None = None

    def sides(self) -> list[str]:
        """Those that this engine has: only vLLM is run plainly."""
        return [PLAIN, *self.environments] if isinstance(self.engine, VllmEngine) else [*self.environments]

    async def measure(self, rounds: int) -> list[dict[str, Round]]:
        """Every side in every round; the first round warms up and is left out."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self.learner.start()
            await asyncio.gather(self.engine.start(), *(one.start() for one in set(self.environments.values())))
            self.client.connect(f"127.0.0.1:{await self.answer()}")
            tokenizer, environment = load_tokenizer(self.config.model.path), self.environments[STREAMING]
            self.generator = Generator(self.config, self.engine, environment, tokenizer, self.client, "benchmark", "1")
            running = asyncio.create_task(self.generator.run())
            assert await self.answer() == "joined"
            taken = []
            for number in range(rounds + 1):
                taken.append(await self.round(number))
                rates = ", ".join(f"{side} {one.tokens / one.seconds:.0f}" for side, one in taken[-1].items())
                print(f"round {number}, tokens/s: {rates}", flush=True)
            await self.generator.leave("benchmark done")
            await running
        return taken[1:]

    async def round(self, number: int) -> dict[str, Round]:
        """Every side once."""
        sides = self.sides()
        first = number % len(sides)
        taken = {side: await self.run(side, number) for side in sides[first:] + sides[:first]}
        if len(tokens := {one.tokens for side, one in taken.items() if side != UPDATES}) != 1:
            raise RuntimeError(f"the sides do not sample the same tokens: {sorted(tokens)}; nothing is compared")
        return {side: taken[side] for side in sides}

    async def run(self, side: str, number: int) -> Round:
        """One side, once."""
        if side == PLAIN:
            assert isinstance(self.engine, VllmEngine)
            return await plain(self.engine._llm, self.leases, number)
        assert self.generator is not None
        self.generator.environment = self.environments[side]
        self.pipe.send(self.publications if side == UPDATES else 0)
        taken = await self.answer()
        assert isinstance(taken, Round)
        return taken

    async def answer(self) -> Any:
        """What the stand-in says next."""
        if not await asyncio.to_thread(self.pipe.poll, ROUND_TIMEOUT_S):
            raise TimeoutError(f"the stand-in learner gave no answer for {ROUND_TIMEOUT_S:g} s")
        return self.pipe.recv()

    async def close(self) -> None:
        """End everything that was started."""
        if self.learner.is_alive():
            self.pipe.send("stop")
        self.client.close()
        await self.engine.close()
        for one in set(self.environments.values()):
            await one.close()
        await asyncio.to_thread(self.learner.join, 10)
        if self.learner.exitcode:
            raise RuntimeError(f"the stand-in learner ended with exit code {self.learner.exitcode}; its error is above")


def summarize(rounds: Sequence[Mapping[str, Round]]) -> dict[str, Any]:
    """A row for each side: its rate, and its share of the rates of plain vLLM and of the side that it adds to."""
    rates = [{side: one.tokens / one.seconds for side, one in taken.items()} for taken in rounds]
    rows = {}
    for side in rates[0]:
        row = {"tokens_per_s": Repeated.of(rate[side] for rate in rates)}
        for base in dict.fromkeys((PLAIN, OVER.get(side, PLAIN))):
            if base in rates[0] and base != side:
                row[f"share_of_{base}"] = Repeated.of(rate[side] / rate[base] for rate in rates)
        rows[side] = row
    return rows


def updates(rounds: Sequence[Mapping[str, Round]]) -> dict[str, Any]:
    """What publications cost the generator, each by itself."""
    taken = [one[UPDATES] for one in rounds]
    return {
        "publications": sum(one.publications for one in taken),
        "while_sampling": sum(one.while_sampling for one in taken),
        "seconds_between": Repeated.of(one.seconds / (one.publications + 1) for one in taken),
        "paused_share": Repeated.of(sum(one.paused_s) / one.seconds for one in taken),
        "receive_s": Repeated.of(seconds for one in taken for seconds in one.receive_s),
        "load_s": Repeated.of(seconds for one in taken for seconds in one.load_s),
        "paused_s": Repeated.of(seconds for one in taken for seconds in one.paused_s),
    }


def headlines(sides: Mapping[str, Any], found: Mapping[str, Any]) -> list[Headline]:
    """Shares; the pause of an update."""
    rows = [Headline(f"{side}: tokens/s", row["tokens_per_s"], "1/s") for side, row in sides.items()]
    if PLAIN in sides:
        rows.append(Headline("whole generator, share of plain vLLM's tokens/s", sides[REWARDS]["share_of_plain"]))
    for side, base in OVER.items():
        if base in sides:
            rows.append(Headline(f"{side}, share of {base}'s tokens/s", sides[side][f"share_of_{base}"]))
    rows.append(Headline("seconds between updates", found["seconds_between"], "s"))
    rows.append(Headline("pause of an update", found["paused_s"], "s"))
    rows.append(Headline("share of a round in pauses", found["paused_share"]))
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model folder; default: a random tiny Qwen3")
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2, help="publications in a round of that side")
    parser.add_argument("--rounds", type=int, default=5)
    add_draw_argument(parser)
    add_result_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    with ExitStack() as stack:
        model = arguments.model
        if model is None:
            from tests.tiny_models import tiny_model

            model = str(tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), tied=True))
        config = build_config(
            {
                "model": {"path": model},
                "environment": {"type": "arithmetic"},
                "data": {"max_prompt_tokens": 64},
                "sampling": {"max_completion_tokens": arguments.max_tokens},
                "generator": {"slots": arguments.slots, "threads": 1, "engine": {"type": arguments.engine}},
            }
        )
        bench = Bench(config, make_leases(config, arguments.requests), arguments.updates)
        rounds = asyncio.run(bench.measure(arguments.rounds))
    kept = ("model", "engine", "slots", "requests", "max_tokens", "updates")
    settings = {key: getattr(arguments, key) for key in kept}
    sides, found = summarize(rounds), updates(rounds)
    figures = {"settings": settings, "sides": sides, "update": found, "rounds": rounds}
    result_file(arguments, "benchmarks.generator", figures, headlines(sides, found))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
