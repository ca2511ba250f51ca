"""One point of the sweep: the real coordinator, ledger, sockets, publications and generators, a learner that sleeps.

A step sleeps for the batch's tokens over the learner's rate, masked tokens included: a forward pass reads them too.
Everything else of a step is what the learner does: it asks for a batch, says that it has trained, fills the send
buffers and lets the coordinator publish them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config, build_config
from async_rl.coordinator.handle import CoordinatorProcess
from async_rl.learner.publisher import Publisher
from async_rl.metrics import Metrics
from async_rl.staleness import token_staleness
from benchmarks.sweep_fleet import JobEnd

SLOTS, GROUP_SIZE, MEDIAN_TOKENS, MAX_TOKENS = 16, 8, 100.0, 4096
EQUAL_GENERATORS = 2
"""Generators whose rate together is the learner's."""
WAIT_S = 300.0
"""Longest wait for a batch or for the fleet; a heavy tail's longest completion takes 20 s."""
PUBLICATION = ("time/wire_s", "time/load_s", "time/pause_s", "time/publication_s")


@dataclass(frozen=True)
class Point:
    """Settings of one point."""

    overdue: str
    max_staleness: int
    sigma: float
    batch_per_slots: int
    """Members of a batch over the slots of EQUAL_GENERATORS."""
    publish_every: int = 1
    generators: int = EQUAL_GENERATORS

    @property
    def batch_groups(self) -> int:
        """Groups of a batch."""
        return self.batch_per_slots * EQUAL_GENERATORS * SLOTS // GROUP_SIZE


@dataclass(frozen=True)
class Pace:
    """How fast everything goes and how long a point is measured."""

    tokens_per_s: float = 200.0
    """Of one slot."""
    load_s: float = 0.01
    seconds: float = 60.0
    min_steps: int = 3
    parameters: int = 250_000
    """float32, published after every step or every few."""

    @property
    def learner_rate(self) -> float:
        """Tokens/s: that of EQUAL_GENERATORS."""
        return self.tokens_per_s * SLOTS * EQUAL_GENERATORS


@dataclass
class Steps:
    """What was measured of the steps that count."""

    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Staleness -> tokens."""
    steps: int = 0
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    seconds: float = 0.0
    slot_rate: float = 0.0
    """Tokens/s of a slot that has a request, while no weights load."""
    fleet: Metrics = field(default_factory=Metrics)
    publications: dict[str, list[float]] = field(default_factory=dict)

    def add_publication(self, name: str, seconds: float) -> None:
        """One more part of a publication."""
        self.publications.setdefault(name, []).append(seconds)


def make_config(point: Point, pace: Pace, inputs: Path, run_dir: Path, seed: int) -> Config:
    """Settings of the run that a point is; `inputs` holds model and problems."""
    staleness: dict[str, Any] = {"max_staleness": point.max_staleness, "publish_every": point.publish_every}
    if point.max_staleness:
        staleness["overdue"] = point.overdue
    if staleness.get("overdue") == "wait":
        staleness["reorder_window"] = 1
    engine = {
        "type": "simulated",
        "median_tokens": MEDIAN_TOKENS,
        "sigma": point.sigma,
        "tokens_per_s": pace.tokens_per_s,
        "load_s": pace.load_s,
    }
    return build_config(
        {
            "run": {"dir": str(run_dir), "steps": 1_000_000, "seed": seed, "stall_timeout_s": WAIT_S},
            "model": {"path": str(inputs / "model")},
            "data": {"path": str(inputs / "problems.jsonl"), "eval_problems": 0},
            "environment": {"type": "exact_match"},
            "evaluation": {"every": 0},
            "sampling": {"group_size": GROUP_SIZE, "max_completion_tokens": MAX_TOKENS},
            "staleness": staleness,
            "learner": {"batch_groups": point.batch_groups},
            "generator": {"slots": SLOTS, "count": point.generators, "engine": engine},
            "transport": {"port": 0, "heartbeat_s": 0.5, "heartbeat_timeout_s": 120.0},
            "weights": {"deadline_s": 60.0},
        }
    )


class Learner:
    """Takes batches, sleeps, publishes; what it measures is in `steps`."""

    def __init__(self, config: Config, pace: Pace, run_id: str) -> None:
        self.config, self.pace, self.run_id = config, pace, run_id
        self.coordinator = CoordinatorProcess(config, run_id, lambda text: None)
        self.publisher = Publisher(config, run_id, torch.device("cpu"), "127.0.0.1")
        self.weights = torch.zeros(pace.parameters)
        self.step = 0
        self.steps = Steps()

    def open(self) -> str:
        """HOST:PORT for the generators."""
        return self.coordinator.start(self.publisher)["learner"]

    def await_fleet(self, size: int) -> None:
        """Return once all generators have come, with the first version loaded."""
        self._until(lambda: len(self._members()) == size, f"{size} generators")
        self._publish()
        self._until(lambda: all(m["state"] == "active" for m in self._members()), "generators that have version 0")

    def run(self, alive: Callable[[], None]) -> Steps:
        """Steps until the run has found its pace, then those that count; `alive` raises what ended a generator."""
        for _ in range(self.config.staleness.max_staleness + 2):
            self._step(alive)
        self.steps, began = Steps(), time.monotonic()
        while self.steps.seconds < self.pace.seconds or self.steps.steps < self.pace.min_steps:
            self._step(alive)
            self.steps.seconds = time.monotonic() - began
        return self.steps

    def close(self) -> None:
        """The fleet is dismissed; nothing of the run stays."""
        self.coordinator.stop("the point is measured")
        self.publisher.close()

    def _members(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.coordinator.status()["generators"]
        return found

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {WAIT_S:g} s: {self.coordinator.status()['wait']}")
            time.sleep(0.02)

    def _step(self, alive: Callable[[], None]) -> None:
        steps, began = self.steps, time.monotonic()
        groups = self._batch(alive)
        got = time.monotonic()
        self.step += 1
        tokens = self._count(groups)
        time.sleep(max(0.0, got + tokens / self.pace.learner_rate - time.monotonic()))
        trained = time.monotonic()
        self.coordinator.trained()
        if self.step % self.config.staleness.publish_every == 0:
            self._publish()
        ended = time.monotonic()
        steps.steps += 1
        steps.wait_s += got - began
        steps.train_s += trained - got
        steps.publish_s += ended - trained
        self._collect(ended - began)

    def _batch(self, alive: Callable[[], None]) -> Sequence[TrajectoryGroup]:
        request, deadline = self.coordinator.request_batch(), time.monotonic() + WAIT_S
        while not request.wait(1.0):
            alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch within {WAIT_S:g} s: {self.coordinator.status()['wait']}")
        groups = request.result()
        assert groups is not None, "the data has no end"
        return groups

    def _count(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Count the tokens of a batch by staleness; returns how many there are."""
        tokens = 0
        for group in groups:
            for member in group.members:
                tokens += len(member.completion_ids)
                for span in member.versions:
                    self.steps.ages[token_staleness(self.step, span.version)] += span.end - span.start
        self.steps.tokens += tokens
        return tokens

    def _publish(self) -> None:
        self.coordinator.wait_for_publication()
        began = time.monotonic()
        manifest = self.publisher.fill(self.step, [("weights", self.weights)], self.config.weights.deadline_s)
        self.steps.add_publication("time/gather_s", time.monotonic() - began)
        self.coordinator.publish(manifest, evaluate=False)

    def _collect(self, seconds: float) -> None:
        metrics = self.coordinator.collect(seconds)
        values = metrics.resolve()
        for name in PUBLICATION:
            if name in values:
                self.steps.add_publication(name, values[name])
        self.steps.fleet.merge(metrics)


def check_alive(generators: Sequence[Future[JobEnd]]) -> None:
    """Raise what ended a generator before its time."""
    for generator in generators:
        if generator.done():
            why = generator.result().error or "it was told to stop"
            raise RuntimeError(f"a generator ended while its point was measured: {why}")
