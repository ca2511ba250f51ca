"""A learner without torch and generators without a model, over real sockets in one process: the protocol, fast."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.buffer import Ledger, LedgerSettings, TrajectoryGroup
from async_rl.config import Config
from async_rl.coordinator import Coordinator
from async_rl.engines.simulated import SimulatedEngine
from async_rl.envs.rewards import RewardResult
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.generator import Generator
from async_rl.leasing import Leasing
from async_rl.protocol import Manifest, Problem
from async_rl.staleness import trajectory_staleness
from async_rl.transport import Client


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    """Small and quick; `sections` override single settings.

    Deadlines are longer than a crowded machine holds up a thread: what waits for one sets a shorter one.
    """
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path / "run"), "steps": 12, "stall_timeout_s": 60.0},
        "model": {"path": "none"},
        "environment": {"type": "arithmetic"},
        "sampling": {"group_size": 4, "max_completion_tokens": 32},
        "staleness": {"max_staleness": 2, "overdue": "wait"},
        "learner": {"batch_groups": 4},
        "generator": {"slots": 8, "engine": {"type": "simulated", "median_tokens": 12.0, "tokens_per_s": 2000.0}},
        "transport": {"port": 0, "heartbeat_s": 0.05, "heartbeat_timeout_s": 60.0, "connect_timeout_s": 60.0},
        "weights": {"deadline_s": 60.0},
        "rewards": {"max_attempts": 2},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return msgspec.convert(base, Config)


def problem(number: int) -> Problem:
    """A problem whose answer is its number."""
    return Problem(id=f"p{number}", prompt=f"{number}", prompt_ids=np.arange(1, 5, dtype=np.int32), answer=number)


class NoTransfer:
    """Simulated engines load no weights: the blocking half of publication has nothing to do."""

    store = ("127.0.0.1", 1)
    backend = "gloo"

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        return self._done()

    def send(self, manifest: Manifest, deadline_s: float) -> Future[float]:
        return self._done()

    def abandon(self, epoch: int, reason: str) -> None:
        pass

    def snapshot(self, manifest: Manifest) -> Future[Path]:
        raise AssertionError("simulated engines take no snapshots")

    def _done(self) -> Future[float]:
        future: Future[float] = Future()
        future.set_result(0.0)
        return future


def manifest(run_id: str, version: int) -> Manifest:
    """A publication of nothing."""
    return Manifest(run_id=run_id, version=version, tensors=(), num_bytes=0, digest="", checksum="", bucket_bytes=1)


class Learner:
    """Takes batches and publishes, without a model; everything it saw is kept for the test."""

    def __init__(
        self,
        config: Config,
        draw: Callable[[], Problem | None] | None = None,
        run_id: str = "run-1",
        evaluates: bool = True,
    ) -> None:
        self.config, self.evaluates = config, evaluates
        self.notes: list[str] = []
        self.batches: list[tuple[TrajectoryGroup, ...]] = []
        self.results: list[Any] = []
        self.run_id = run_id
        self.error: BaseException | None = None
        self.version = 0
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        counter = iter(range(1_000_000))
        self.coordinator = self.make_coordinator(draw or (lambda: problem(next(counter))))

    def make_coordinator(self, draw: Callable[[], Problem | None]) -> Coordinator:
        """One that runs as a thread, with its ledger within reach."""
        self.ledger = Ledger(LedgerSettings.of(self.config), draw)
        evaluations = Evaluations(EvaluationSettings(samples=1, deadline_s=120.0))
        return Coordinator(
            config=self.config,
            run_id=self.run_id,
            ledger=self.ledger,
            evaluations=evaluations,
            eval_problems=[problem(10_000 + i) for i in range(6)],
            leasing=Leasing(self.config, self.ledger, evaluations, ()),
            transfer=NoTransfer(),
            notify=self.notes.append,
        )

    def start(self, port: int | None = None) -> str:
        """Open the port and begin to train; returns HOST:PORT."""
        address = self.coordinator.start()["learner"]
        self._thread.start()
        return address

    def _guarded(self) -> None:
        try:
            self.train()
        except BaseException as error:
            self.error = error

    def train(self) -> None:
        """All steps."""
        self._publish(0)
        for step in range(1, self.config.run.steps + 1):
            request = self.coordinator.request_batch()
            assert request.wait(150.0), "no batch within 150 s"
            groups = request.result()
            if groups is None:
                break
            self.coordinator.trained()
            self.batches.append(groups)
            if step % self.config.staleness.publish_every == 0:
                self._publish(step)
        self.coordinator.wait_for_publication()
        while self.coordinator.evaluating():
            time.sleep(0.01)
        self.results = self.coordinator.take_evaluations()
        self.coordinator.stop("complete")

    def _publish(self, version: int) -> None:
        self.coordinator.wait_for_publication()
        self.version = version
        self.coordinator.publish(manifest(self.run_id, version), evaluate=self.evaluates and version in (0, 4))

    async def done(self, timeout_s: float = 200.0) -> None:
        """Wait for the end of training; raises what ended it."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        assert not self._thread.is_alive(), self.coordinator.status()
        if self.error is not None:
            raise self.error

    async def until(self, num_batches: int) -> None:
        """Wait until so many batches were trained."""
        async with asyncio.timeout(150):
            while len(self.batches) < num_batches and self._thread.is_alive():
                await asyncio.sleep(0.01)

    def trained_problems(self) -> list[str]:
        """Ids in the order of training."""
        return [group.problem.id for batch in self.batches for group in batch]

    def staleness(self) -> list[int]:
        """Of every trajectory, by its oldest token."""
        return [
            trajectory_staleness(step, member.versions)
            for step, batch in enumerate(self.batches, start=1)
            for group in batch
            for member in group.members
        ]


class Numbers:
    """Stands in for a tokenizer."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


class Scorer:
    """Scores at once; problems named in `failing` have no reward."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.failing = failing

    async def score(self, problem: Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        if problem.id in self.failing:
            return RewardResult(value=None, error=f"no reward for {problem.id}", seconds=0.0)
        return RewardResult(value=float(len(completion) % 2), error=None, seconds=0.0)


class Worker:
    """One generator in this loop; `kill` ends it as SIGKILL would: no word, no socket."""

    def __init__(self, config: Config, address: str, name: str, scorer: Scorer | None = None) -> None:
        incarnation = uuid.uuid4().hex
        self.engine = SimulatedEngine(config.generator.engine)  # type: ignore[arg-type]
        self.client = Client(name, incarnation, config.transport.max_message_bytes)
        self.client.connect(address)
        self.generator = Generator(
            config,
            self.engine,
            scorer or Scorer(),
            Numbers(),
            self.client,
            name,
            incarnation,  # type: ignore[arg-type]
        )
        self.task = asyncio.create_task(self.generator.run())

    async def kill(self) -> None:
        self.client._socket.close(linger=0)  # type: ignore[union-attr]
        self.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.task

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.task
        self.client.close()


@asynccontextmanager
async def fleet(config: Config, address: str, *names: str, scorer: Scorer | None = None) -> AsyncIterator[list[Worker]]:
    """Workers that are closed at the end."""
    workers = [Worker(config, address, name, scorer) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.close()
