"""What a busy coordinator thread costs the learner's step, and what it carries, in one run.

    python -m benchmarks.coordinator --output benchmarks/results/coordinator.json

One process trains a small model on its main thread (one core); the coordinator's thread beside it serves a simulated
fleet in another process (the other core). Rounds alternate between the coordinator idle (no leases are out) and busy,
so that a busy machine hits both alike; the cost is the median of the ratios of neighbouring rounds, minus 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer import Ledger, LedgerSettings
from async_rl.config import Config, build_config
from async_rl.coordinator import Coordinator
from async_rl.envs.rewards import RewardResult
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.leasing import Leasing
from async_rl.protocol import Manifest, Problem
from benchmarks.common import add_result_arguments, check_clean, result_file

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 64, 256, 8


class NoTransfer:
    """Simulated engines load no weights."""

    store = ("127.0.0.1", 1)
    backend = "gloo"

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        raise AssertionError("nothing joins")

    def send(self, manifest: Manifest, deadline_s: float) -> Future[float]:
        raise AssertionError("nothing is sent")

    def snapshot(self, manifest: Manifest) -> Future[Path]:
        raise AssertionError("no snapshots")


class Arithmetic:
    """A reward that costs nothing."""

    async def score(self, problem: Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        return RewardResult(value=0.0, error=None, seconds=0.0)


class Numbers:
    """Stands in for a tokenizer."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "text"


def make_config(folder: str, port: int, slots: int, rate: float) -> Config:
    """A fleet of one process whose requests take COMPLETION_TOKENS / rate seconds."""
    return build_config(
        {
            "run": {"dir": folder},
            "model": {"path": "none"},
            "environment": {"type": "arithmetic"},
            "sampling": {"group_size": GROUP_SIZE, "max_completion_tokens": COMPLETION_TOKENS},
            "staleness": {"max_staleness": 1_000_000, "overdue": "keep"},
            "learner": {"batch_groups": 8},
            "generator": {
                "slots": slots,
                "engine": {
                    "type": "simulated",
                    "median_tokens": float(COMPLETION_TOKENS),
                    "sigma": 0.0,
                    "tokens_per_s": rate,
                },
            },
            "transport": {"port": port},
        }
    )


async def generate(address: str, config: Config) -> None:
    """The fleet's process."""
    from async_rl.engines import build_engine
    from async_rl.generator import Generator
    from async_rl.transport import Client

    engine = build_engine(config, seed=0, threads=1)
    await engine.start()
    client = Client("fleet", "1", config.transport.max_message_bytes)
    client.connect(address)
    await Generator(config, engine, Arithmetic(), Numbers(), client, "fleet", "1").run()  # type: ignore[arg-type]
    client.close()


class Steps:
    """A training step of about 50 ms on one thread."""

    def __init__(self) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = torch.randint(0, 512, (16, 64))

    def run(self, seconds: float) -> float:
        """Train for `seconds`; returns seconds per step."""
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            self.optimizer.zero_grad()
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
            count += 1
        return (time.perf_counter() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one round")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="tokens/s of one simulated request")
    parser.add_argument("--fleet", help=argparse.SUPPRESS)
    add_result_arguments(parser)
    arguments = parser.parse_args()
    if arguments.fleet:
        asyncio.run(generate(arguments.fleet, make_config("unused", 0, arguments.slots, arguments.rate)))
        return
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result_file(arguments, "benchmarks.coordinator", measure(arguments, folder))


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Alternate idle and busy rounds."""
    config = make_config(folder, 0, arguments.slots, arguments.rate)
    allowed = {"work": False}
    numbers = iter(range(1 << 40))

    def draw() -> Problem | None:
        ids = np.zeros(PROMPT_TOKENS, dtype=np.int32)
        return Problem(id=str(next(numbers)), prompt="", prompt_ids=ids)

    ledger = Ledger(
        LedgerSettings(batch_groups=8, group_size=GROUP_SIZE, max_staleness=1_000_000, overdue="keep"), draw
    )
    evaluations = Evaluations(EvaluationSettings(samples=1, deadline_s=60))
    leasing = Leasing(config, ledger, evaluations, ())
    free = leasing.free
    leasing.free = lambda member: free(member) if allowed["work"] else 0  # type: ignore[method-assign]
    coordinator = Coordinator(
        config=config,
        run_id="benchmark",
        ledger=ledger,
        evaluations=evaluations,
        eval_problems=[],
        leasing=leasing,
        transfer=NoTransfer(),
    )
    address = coordinator.start()["learner"]
    coordinator.publish(
        Manifest(run_id="benchmark", version=0, tensors=(), num_bytes=0, digest="", checksum="", bucket_bytes=1),
        evaluate=False,
    )
    argv = [sys.executable, "-m", "benchmarks.coordinator", "--fleet", address]
    argv += ["--slots", str(arguments.slots), "--rate", str(arguments.rate)]
    fleet = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + 60
        while not coordinator.status()["generators"]:
            assert time.monotonic() < deadline, "the fleet did not come within 60 s"
            time.sleep(0.1)
        return alternate(arguments, coordinator, allowed)
    finally:
        coordinator.stop("done")
        fleet.wait(20)


def alternate(arguments: argparse.Namespace, coordinator: Coordinator, allowed: dict[str, bool]) -> dict[str, Any]:
    """Pairs of an idle and a busy round."""
    steps = Steps()
    steps.run(1.0)
    costs, rates = [], []
    for _ in range(arguments.rounds):
        allowed["work"] = False
        time.sleep(1.5)
        idle = steps.run(arguments.seconds)
        allowed["work"] = True
        time.sleep(1.5)
        before, began = coordinator.status()["ledger"], time.monotonic()
        busy = steps.run(arguments.seconds)
        after, seconds = coordinator.status()["ledger"], time.monotonic() - began
        costs.append(busy / idle - 1)
        rates.append((after["buffered"] - before["buffered"]) * GROUP_SIZE / seconds)
        drain(coordinator)
    return {
        "n": arguments.rounds,
        "step_cost_share": {"median": statistics.median(costs), "min": min(costs), "max": max(costs)},
        "trajectories_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "tokens_per_trajectory": COMPLETION_TOKENS,
    }


def drain(coordinator: Coordinator) -> None:
    """Take and forget what lies in the buffer, so that memory stays flat."""
    while coordinator.status()["ledger"]["buffered"] >= 8:
        request = coordinator.request_batch()
        if not request.wait(10.0):
            raise TimeoutError("a batch lay in the buffer and was not given out within 10 s")
        coordinator.trained()


if __name__ == "__main__":
    main()
