"""What a busy coordinator process costs the learner's step, and what it carries, in one run.

    python -m benchmarks.coordinator --output benchmarks/results/coordinator.json

One process trains a small model on its main thread; it holds the link to a coordinator process, which serves a
simulated fleet in a third. Rounds alternate between the fleet stopped (SIGSTOP) and busy, so that a busy machine hits
both alike; the cost is the median of the ratios of neighbouring rounds, minus 1. With fewer cores than busy processes
it includes what they take from each other, so the processor time of a step, and of both others, is reported too. Also
measured: the time from asking for a batch that lies ready to holding it, and for any other answer, coordinator busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from async_rl.config import Config, build_config
from async_rl.coordinator.handle import CoordinatorProcess
from async_rl.envs.rewards import RewardResult
from async_rl.protocol import Manifest, Problem
from async_rl.recipes.tiny_model import build_tokenizer
from benchmarks.common import Headline, Repeated, add_result_arguments, check_clean, result_file

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE, BATCH_GROUPS = 64, 256, 8, 8
COME_S = 120.0
"""For the fleet to come, to go, and to fill a batch."""


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
            "run": {"dir": folder, "steps": 1_000_000},
            "model": {"path": f"{folder}/model"},
            "data": {"path": f"{folder}/problems.jsonl", "eval_problems": 0},
            "environment": {"type": "exact_match"},
            "evaluation": {"every": 0},
            "sampling": {"group_size": GROUP_SIZE, "max_completion_tokens": COMPLETION_TOKENS},
            "staleness": {"max_staleness": 1_000_000, "overdue": "keep"},
            "learner": {"batch_groups": BATCH_GROUPS},
            "generator": {
                "slots": slots,
                "engine": {
                    "type": "simulated",
                    "median_tokens": float(COMPLETION_TOKENS),
                    "sigma": 0.0,
                    "tokens_per_s": rate,
                },
            },
            "transport": {"port": port, "heartbeat_timeout_s": 600.0},
        }
    )


def write_inputs(folder: str) -> None:
    """A tokenizer and problems of PROMPT_TOKENS tokens."""
    build_tokenizer().save_pretrained(f"{folder}/model")
    rows = [{"prompt": f"{i:0{PROMPT_TOKENS}}", "answer": "0"} for i in range(1000)]
    Path(folder, "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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

    def run(self, seconds: float) -> tuple[float, float]:
        """Train for `seconds`; returns seconds and seconds of processor time, of all threads, per step."""
        began, began_cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            self.optimizer.zero_grad()
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
            count += 1
        return (time.perf_counter() - began) / count, (time.process_time() - began_cpu) / count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one round")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="tokens/s of one simulated request")
    parser.add_argument("--fleet", help=argparse.SUPPRESS)
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.fleet:
        asyncio.run(generate(arguments.fleet, make_config("unused", 0, arguments.slots, arguments.rate)))
        return 0
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, folder)
    result_file(arguments, "benchmarks.coordinator", found, headlines(found))
    return 0


def headlines(found: dict[str, Any]) -> list[Headline]:
    """What stands for the result."""
    return [
        Headline("longer step beside a busy coordinator", found["step_cost_share"], "of a step"),
        Headline("more processor time of a step", found["step_cpu_cost_share"], "of a step"),
        Headline("trajectories through the coordinator", found["trajectories_per_s"], "per s"),
        Headline("processor time of the coordinator", found["coordinator_core_share"], "cores"),
        Headline("the same for 1,000 trajectories", found["coordinator_cpu_s_per_1000"], "s"),
        Headline("processor time of the generators' shells for 1,000 trajectories", found["fleet_cpu_s_per_1000"], "s"),
        Headline("a batch that lies ready, until it is held", found["batch_s"], "s"),
        Headline("any other answer of a busy coordinator", found["answer_s"], "s"),
    ]


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Alternate idle and busy rounds."""
    write_inputs(folder)
    coordinator = CoordinatorProcess(make_config(folder, 0, arguments.slots, arguments.rate), "benchmark", print)
    address = coordinator.start(NoTransfer())["learner"]
    publish(coordinator, 0)
    argv = [sys.executable, "-m", "benchmarks.coordinator", "--fleet", address]
    argv += ["--slots", str(arguments.slots), "--rate", str(arguments.rate)]
    fleet = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + COME_S
        while not any(member["state"] == "active" for member in coordinator.status()["generators"]):
            assert time.monotonic() < deadline, f"the fleet did not come within {COME_S:g} s"
            time.sleep(0.1)
        return alternate(arguments, coordinator, fleet)
    finally:
        fleet.send_signal(signal.SIGCONT)
        coordinator.stop("done")
        fleet.wait(COME_S)


def publish(coordinator: CoordinatorProcess, version: int) -> None:
    """Publish nothing."""
    coordinator.wait_for_publication()
    manifest = {"tensors": (), "num_bytes": 0, "digest": "", "checksum": "", "bucket_bytes": 1}
    coordinator.publish(Manifest(run_id="benchmark", version=version, **manifest), evaluate=False)  # type: ignore[arg-type]


def alternate(
    arguments: argparse.Namespace, coordinator: CoordinatorProcess, fleet: subprocess.Popen[bytes]
) -> dict[str, Any]:
    """Pairs of an idle and a busy round."""
    steps = Steps()
    steps.run(1.0)
    samples: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        fleet.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        idle, idle_cpu = steps.run(arguments.seconds)
        fleet.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        before = Reading(coordinator, fleet)
        busy, busy_cpu = steps.run(arguments.seconds)
        figures = {"step_cost_share": busy / idle - 1, "step_cpu_cost_share": busy_cpu / idle_cpu - 1}
        figures |= Reading(coordinator, fleet).since(before) | drain(coordinator)
        for name, value in figures.items():
            samples.setdefault(name, []).append(value)
    spread = {name: Repeated.of(values) for name, values in samples.items()}
    return {"n": arguments.rounds, "tokens_per_trajectory": COMPLETION_TOKENS, "step_idle_s": idle} | spread


class Reading:
    """What was done so far, and the processor time that it took."""

    def __init__(self, coordinator: CoordinatorProcess, fleet: subprocess.Popen[bytes]) -> None:
        self.at = time.monotonic()
        counts = coordinator.status()["ledger"]
        self.trajectories = (counts["buffered"] + counts["trained"]) * GROUP_SIZE
        self.cpu_s = {
            name: sum(psutil.Process(pid).cpu_times()[:2])
            for name, pid in (("coordinator", coordinator.pid), ("fleet", fleet.pid))
        }

    def since(self, before: Reading) -> dict[str, float]:
        """Rates between two readings."""
        seconds = self.at - before.at
        shares = {f"{name}_core_share": (cpu_s - before.cpu_s[name]) / seconds for name, cpu_s in self.cpu_s.items()}
        done = self.trajectories - before.trajectories
        if done <= 0:
            raise RuntimeError(f"no trajectory came within {seconds:.1f} s: raise --seconds, --slots or --rate")
        per_thousand = {
            f"{name}_cpu_s_per_1000": 1000 * (cpu_s - before.cpu_s[name]) / done for name, cpu_s in self.cpu_s.items()
        }
        return {"trajectories_per_s": done / seconds, **shares, **per_thousand}


def drain(coordinator: CoordinatorProcess) -> dict[str, float]:
    """Take and forget what lies in the buffer, so that memory stays flat; returns how long things took."""
    batches_s, answers_s = [], []
    deadline = time.monotonic() + COME_S
    while coordinator.status()["ledger"]["buffered"] < BATCH_GROUPS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no batch was complete within {COME_S:g} s: raise --slots or --rate")
        time.sleep(0.05)
    while coordinator.status()["ledger"]["buffered"] >= BATCH_GROUPS:
        began = time.perf_counter()
        request = coordinator.request_batch()
        if not request.wait(COME_S):
            raise TimeoutError("a batch lay in the buffer and was not given out")
        batches_s.append(time.perf_counter() - began)
        coordinator.trained()
        began = time.perf_counter()
        coordinator.collect(1.0)
        answers_s.append(time.perf_counter() - began)
    return {"batch_s": statistics.median(batches_s), "answer_s": statistics.median(answers_s)}


if __name__ == "__main__":
    raise SystemExit(main())
