"""Tokens per second of a whole generator against plain vLLM, on the same engine and prompts, in one run.

    python -m benchmarks.generator --model PATH --output benchmarks/results/generator.json

Plain: every request is given to AsyncLLM at once. Generator: a stand-in for the learner, in a process of its own,
leases members over the socket, one for each that comes back, as a coordinator does; each is sampled, decoded, scored
and sent. Both sample the same tokens (seeds decide them). Rounds alternate, so that a busy machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from async_rl import protocol as p
from async_rl.config import Config, build_config
from async_rl.engines import build_engine
from async_rl.engines.vllm import _parameters
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import load_tokenizer
from async_rl.generator import Generator
from async_rl.transport import Client, Server
from benchmarks.common import Headline, Repeated, add_result_arguments, check_clean, result_file

ROUND_TIMEOUT_S = 300.0


def stand_in(pipe: Any, leases: list[p.Lease], slots: int) -> None:
    """The learner's side: at each "go" lease everything once and report (seconds, tokens)."""
    server = Server(64 << 20)
    pipe.send(server.bind("127.0.0.1", 0))
    todo: list[p.Lease] = []
    outstanding, tokens, began, peer = 0, 0, 0.0, ""
    attempt = 0
    while True:
        if pipe.poll():
            if pipe.recv() == "stop":
                break
            attempt += 1
            todo = [p.Lease(**{**_fields(lease), "attempt": attempt}) for lease in reversed(leases)]
            outstanding, tokens, began = 0, 0, time.perf_counter()
        for identity, message in server.poll(0.01):
            match message:
                case p.Hello():
                    peer = identity
                    limits = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 60.0, "max_message_bytes": 64 << 20}
                    server.send(peer, p.Welcome(run_id="benchmark", policy_version=0, **limits))
                    pipe.send("welcomed")
                case p.Heartbeat():
                    server.send(peer, p.Alive(run_id="benchmark", policy_version=0))
                case p.Finished():
                    server.send(peer, _acknowledged(message))
                    tokens += len(message.trajectories.completion_ids)
                    outstanding -= len(message.keys)
                    if not todo and not outstanding:
                        pipe.send((time.perf_counter() - began, tokens))
        batch = [todo.pop() for _ in range(min(slots - outstanding, len(todo)))]
        if batch and peer:
            outstanding += len(batch)
            server.send(peer, p.Leases.of(batch))
    server.close()


def _acknowledged(message: p.Finished) -> p.Acknowledged:
    return p.Acknowledged(keys=message.keys, outcomes=("stored",) * len(message.keys))


def _fields(lease: p.Lease) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in lease.__struct_fields__}


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


async def plain(llm: Any, leases: list[p.Lease], round_: int) -> tuple[float, int]:
    """Give every request to AsyncLLM at once, as its users do; (seconds, tokens)."""
    from vllm.inputs import tokens_input

    async def one(lease: p.Lease) -> int:
        prompt, name = tokens_input(lease.problem.prompt_ids.tolist()), f"plain-{round_}-{lease.ticket}"
        outputs = [output async for output in llm.generate(prompt, _parameters(lease.sampling), name)]
        return len(outputs[-1].outputs[0].token_ids)

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, leases)))
    return time.perf_counter() - began, tokens


async def measure(config: Config, requests: int, rounds: int) -> list[dict[str, float]]:
    """Alternate both sides on one engine; the first round of each warms up and is left out."""
    leases = make_leases(config, requests)
    here, there = multiprocessing.get_context("spawn").Pipe()
    learner = multiprocessing.get_context("spawn").Process(
        target=stand_in, args=(there, leases, config.generator.slots), daemon=True
    )
    learner.start()
    engine, environment = build_engine(config, seed=0, threads=config.generator.threads or 1), build_environment(config)
    client = Client("benchmark", "1", 64 << 20)
    results = []
    try:
        await asyncio.gather(engine.start(), environment.start())
        client.connect(f"127.0.0.1:{await _answer(here)}")
        tokenizer = load_tokenizer(config.model.path)
        generator = Generator(config, engine, environment, tokenizer, client, "benchmark", "1")
        running = asyncio.create_task(generator.run())
        assert await _answer(here) == "welcomed"
        for round_ in range(rounds + 1):
            plain_s, plain_tokens = await plain(engine._llm, leases, round_)
            here.send("go")
            generator_s, generator_tokens = await _answer(here)
            assert plain_tokens == generator_tokens, "both sides sample the same tokens"
            if round_:
                rates = {"plain": plain_tokens / plain_s, "generator": generator_tokens / generator_s}
                results.append(rates | {"ratio": rates["generator"] / rates["plain"], "tokens": plain_tokens})
                print(json.dumps(results[-1]), flush=True)
        await generator.leave("benchmark done")
        await running
    finally:
        here.send("stop")
        client.close()
        await engine.close()
        await environment.close()
    learner.join(10)
    return results


async def _answer(pipe: Any) -> Any:
    if not await asyncio.to_thread(pipe.poll, ROUND_TIMEOUT_S):
        raise TimeoutError(f"the stand-in learner gave no answer for {ROUND_TIMEOUT_S:g} s")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model folder; default: a random tiny Qwen3")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from tests.tiny_models import tiny_model

            model = str(tiny_model(Path(folder), tied=True))
        config = build_config(
            {
                "model": {"path": model},
                "environment": {"type": "arithmetic"},
                "data": {"max_prompt_tokens": 64},
                "sampling": {"max_completion_tokens": arguments.max_tokens},
                "generator": {"slots": arguments.slots, "threads": 1, "engine": {"type": "vllm"}},
            }
        )
        rounds = asyncio.run(measure(config, arguments.requests, arguments.rounds))
    rates = {key: Repeated.of(r[key] for r in rounds) for key in ("plain", "generator", "ratio")}
    settings = {"slots": arguments.slots, "requests": arguments.requests, "max_tokens": arguments.max_tokens}
    figures = {"settings": settings, "tokens_per_s": rates, "rounds": rounds}
    found = [
        Headline("tokens/s of a whole generator, share of plain vLLM's", rates["ratio"]),
        Headline("plain vLLM", rates["plain"], "tokens/s"),
        Headline("whole generator", rates["generator"], "tokens/s"),
    ]
    result_file(arguments, "benchmarks.generator", figures, found)


if __name__ == "__main__":
    main()
