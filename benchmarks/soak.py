"""Two hundred simulated generators against one coordinator: rate, processor time, memory, and the account at the end.

    python -m benchmarks.soak --output benchmarks/results/soak.json
    python -m benchmarks.soak --draw benchmarks/results/soak.json

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import (
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    result_file,
)
from benchmarks.soak_figure import draw
from tests.loop.rig import Learner, Worker, make_config

PARTS = 10
"""Of the time measured: a rate is that of each part, as median and range."""
FIRST_STEPS = 3
"""Before measuring: the first groups take longest, all having begun at once."""
COME_S = 300.0
"""For the whole fleet to come, and to go."""


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
        self.steps = 0
        self.messages = 0
        """Received by the coordinator and accepted."""
        self._poll = self.coordinator.server.poll
        self.coordinator.server.poll = self._counted  # type: ignore[method-assign]

    def _counted(self, timeout_s: float) -> list[tuple[str, Any]]:
        found = self._poll(timeout_s)
        self.messages += len(found)
        return found

    def train(self) -> None:
        self._publish(0)
        while not self.over:
            request = self.coordinator.request_batch()
            assert request.wait(COME_S), self.coordinator.status()["wait"]
            groups = request.result()
            assert groups is not None, "the data has no end"
            for group in groups:
                self.twice += group.problem.id in self.seen
                self.seen.add(group.problem.id)
            self.coordinator.trained()
            self.steps += 1
            self._publish(self.steps)
            time.sleep(self.step_s)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, wait until all have come and batches are trained, measure for --seconds."""
    learner = Soak(settings(folder, arguments), arguments.step_s)
    argv = [sys.executable, "-m", "benchmarks.soak", "--fleet", learner.start()]
    argv += [f"--{name}={getattr(arguments, name)}" for name in ("generators", "rate")]
    process = subprocess.Popen(argv)
    try:
        deadline = time.monotonic() + COME_S
        while len(learner.coordinator.status()["generators"]) < arguments.generators or learner.steps < FIRST_STEPS:
            assert time.monotonic() < deadline and process.poll() is None, f"no fleet at work within {COME_S:g} s"
            time.sleep(0.5)
        found = figures(learner, watch(learner, arguments.seconds))
    finally:
        learner.over = True
        learner._thread.join(COME_S)
        learner.coordinator.stop("done")
        end(process)
    if learner.error is not None:
        raise learner.error
    learner.ledger.check()
    counts = learner.ledger.counts()
    assert counts.trained == len(learner.seen) and learner.twice == 0, "a problem was trained twice or lost"
    events = {name: number for name, number in learner.ledger.events.items() if number}
    return found | {"trained_problems": counts.trained, "trained_twice": learner.twice, "events": events}


def end(process: subprocess.Popen[bytes]) -> None:
    """The fleet goes by itself when the learner has said stop; killed if it does not."""
    try:
        process.wait(COME_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
        raise


@dataclass(frozen=True)
class Sample:
    """Totals at one moment."""

    at_s: float
    messages: int
    trajectories: int
    """Trained."""
    cpu_s: float
    """Of this process, in which the coordinator is the only one with much to do."""
    rss_mb: float

    @classmethod
    def take(cls, learner: Soak, began: float) -> Sample:
        me = psutil.Process()
        trained = learner.coordinator.status()["ledger"]["trained"] * learner.config.sampling.group_size
        cpu_s, rss = sum(me.cpu_times()[:2]), me.memory_info().rss
        return cls(time.monotonic() - began, learner.messages, trained, cpu_s, rss / 1e6)


def watch(learner: Soak, seconds: float) -> list[Sample]:
    """A sample at the beginning and at the end, and one every second, or more often if there is little time."""
    began = time.monotonic()
    samples = [Sample.take(learner, began)]
    while samples[-1].at_s < seconds:
        time.sleep(min(1.0, seconds / (2 * PARTS)))
        samples.append(Sample.take(learner, began))
    return samples


def figures(learner: Soak, samples: Sequence[Sample]) -> dict[str, Any]:
    """Rates, memory, what was refused; and the samples themselves, for the figure."""
    last = learner.coordinator.status()
    members = len(last["generators"])
    return summary(samples) | {
        "generators": members,
        "gone": last["gone"],
        "heartbeats_per_s": members / learner.config.transport.heartbeat_s,
        "refused": last["refused"],
        "undelivered": dict(learner.coordinator.server.undelivered),
        "samples": [asdict(sample) for sample in samples],
    }


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rates of each of PARTS parts; the most memory in either half."""
    every = max(1, (len(samples) - 1) // PARTS)
    marks = samples[::every]
    rates: dict[str, list[float]] = {}
    for before, after in pairwise(marks):
        for name in ("messages", "trajectories", "cpu_s"):
            rate = (getattr(after, name) - getattr(before, name)) / (after.at_s - before.at_s)
            rates.setdefault(name, []).append(rate)
    half = len(samples) // 2
    first, second = (max(sample.rss_mb for sample in part) for part in (samples[:half], samples[half:]))
    return {
        "seconds": samples[-1].at_s - samples[0].at_s,
        "messages_per_s": Repeated.of(rates["messages"]),
        "trajectories_per_s": Repeated.of(rates["trajectories"]),
        "coordinator_cpu_share": Repeated.of(rates["cpu_s"]),
        "rss_mb": {"first_half_max": first, "second_half_max": second},
    }


def headlines(found: dict[str, Any]) -> list[Headline]:
    """What stands for the result."""
    memory = found["rss_mb"]
    return [
        Headline("generators", found["generators"]),
        Headline("messages received", found["messages_per_s"], "per s"),
        Headline("trajectories trained", found["trajectories_per_s"], "per s"),
        Headline("processor time of the coordinator's process", found["coordinator_cpu_share"], "cores"),
        Headline("most memory, first half", memory["first_half_max"], "MB"),
        Headline("most memory, second half", memory["second_half_max"], "MB"),
        Headline("problems trained", found["trained_problems"]),
        Headline("of them twice", found["trained_twice"], "", "0"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=400.0, help="tokens/s of one simulated request")
    parser.add_argument("--batch-groups", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds that the learner takes for a step")
    parser.add_argument("--fleet", help=argparse.SUPPRESS)
    add_draw_argument(parser)
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.fleet:
        asyncio.run(fleet(arguments.fleet, arguments))
        return 0
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    result_file(arguments, "benchmarks.soak", found, headlines(found))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
