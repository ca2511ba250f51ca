"""Two hundred simulated generators against one coordinator: rate, processor time, memory, and the account at the end.

    python -m benchmarks.soak --output benchmarks/results/soak.json

The coordinator has a process of its own here, with a learner that takes batches and trains nothing; the fleet shares
another process, each generator with its own socket. The fleet is faster than the learner takes, so that work is held
back by admission: memory must stay flat. Members come back exactly once: nothing is lost and nothing counted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import add_result_arguments, check_clean, result_file
from tests.loop.rig import Learner, Worker, make_config

MEMORY_EVERY_S = 1.0


def settings(folder: Path, arguments: argparse.Namespace) -> Any:
    """Short completions: what is measured is messages, not sampling."""
    return make_config(
        folder,
        run={"steps": 1_000_000, "stall_timeout_s": 60.0},
        sampling={"group_size": 8, "max_completion_tokens": 128},
        staleness={"max_staleness": 4, "overdue": "mask"},
        learner={"batch_groups": arguments.batch_groups},
        generator={"slots": 4, "engine": {"type": "simulated", "median_tokens": 64.0, "tokens_per_s": arguments.rate}},
        transport={"heartbeat_s": 1.0, "heartbeat_timeout_s": 15.0},
    )


async def fleet(address: str, arguments: argparse.Namespace) -> None:
    """The fleet's process: all generators until the learner says stop."""
    config = settings(Path("unused"), arguments)
    workers = [Worker(config, address, f"g{number}") for number in range(arguments.generators)]
    await asyncio.gather(*(worker.task for worker in workers))
    for worker in workers:
        await worker.close()


class Soak(Learner):
    """Takes a batch every `step_s` seconds and keeps only counts: a test's list of batches would grow."""

    def __init__(self, config: Any, step_s: float) -> None:
        super().__init__(config)
        self.step_s = step_s
        self.seen: set[str] = set()
        self.twice = 0
        self.over = False

    def train(self) -> None:
        self._publish(0)
        step = 0
        while not self.over:
            request = self.coordinator.request_batch()
            assert request.wait(120.0), self.coordinator.status()["wait"]
            groups = request.result()
            assert groups is not None, "the data has no end"
            for group in groups:
                self.twice += group.problem.id in self.seen
                self.seen.add(group.problem.id)
            self.coordinator.trained()
            step += 1
            self._publish(step)
            time.sleep(self.step_s)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, wait until all have come, measure for --seconds."""
    learner = Soak(settings(folder, arguments), arguments.step_s)
    argv = [sys.executable, "-m", "benchmarks.soak", "--fleet", learner.start()]
    argv += [f"--{name}={getattr(arguments, name)}" for name in ("generators", "rate")]
    process = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + 120
        while len(learner.coordinator.status()["generators"]) < arguments.generators:
            assert time.monotonic() < deadline and process.poll() is None, "the fleet did not come within 120 s"
            time.sleep(0.5)
        figures = watch(learner, arguments.seconds)
    finally:
        learner.over = True
        learner._thread.join(130)
        learner.coordinator.stop("done")
        process.wait(60)
    if learner.error is not None:
        raise learner.error
    learner.ledger.check()
    counts = learner.ledger.counts()
    assert counts.trained == len(learner.seen) and learner.twice == 0, "a problem was trained twice or lost"
    events = {name: number for name, number in learner.ledger.events.items() if number}
    return figures | {"trained_problems": counts.trained, "trained_twice": learner.twice, "events": events}


def watch(learner: Soak, seconds: float) -> dict[str, Any]:
    """Rates and memory of this process, in which the coordinator is the only one with much to do."""
    me = psutil.Process()
    memory, cpu, began = [], sum(me.cpu_times()[:2]), time.monotonic()
    first = learner.coordinator.status()
    while time.monotonic() - began < seconds:
        time.sleep(MEMORY_EVERY_S)
        memory.append(me.memory_info().rss)
    took, busy = time.monotonic() - began, sum(me.cpu_times()[:2]) - cpu
    last = learner.coordinator.status()
    assert len(last["generators"]) == len(first["generators"]), last["gone"]
    groups = last["ledger"]["trained"] - first["ledger"]["trained"]
    half = len(memory) // 2
    return {
        "generators": len(last["generators"]),
        "seconds": round(took, 1),
        "trajectories_per_s": round(groups * learner.config.sampling.group_size / took, 1),
        "heartbeats_per_s": round(len(last["generators"]) / learner.config.transport.heartbeat_s, 1),
        "coordinator_cpu_share": round(busy / took, 3),
        "rss_mb": {"first_half_max": max(memory[:half]) / 1e6, "second_half_max": max(memory[half:]) / 1e6},
        "refused": last["refused"],
        "undelivered": dict(learner.coordinator.server.undelivered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=400.0, help="tokens/s of one simulated request")
    parser.add_argument("--batch-groups", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that the learner takes for a step")
    parser.add_argument("--fleet", help=argparse.SUPPRESS)
    add_result_arguments(parser)
    arguments = parser.parse_args()
    if arguments.fleet:
        asyncio.run(fleet(arguments.fleet, arguments))
        return
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result_file(arguments, "benchmarks.soak", measure(arguments, Path(folder)))


if __name__ == "__main__":
    main()
