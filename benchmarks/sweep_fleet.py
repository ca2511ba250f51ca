"""The generator processes of the sweep: real `Generator`s with the simulated engine, which takes real weights.

    python -m benchmarks.sweep_fleet

One process holds one generator of each point under way, so that a point with four generators has them in four
processes, and importing torch is paid for once. Jobs come as lines of JSON on standard input, their ends go to
standard output.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from async_rl.config import Config
from async_rl.engines.base import EngineError, LoadReport, Sample, SampleRequest
from async_rl.engines.simulated import SimulatedEngine
from async_rl.generator import Generator
from async_rl.protocol import EpochInfo, Manifest
from async_rl.transport import Client
from async_rl.weights.base import ReceivedWeights
from async_rl.weights.broadcast import Receiver
from async_rl.weights.snapshot import read_snapshot
from benchmarks.coordinator import Arithmetic, Numbers

THREADS = 64
"""Blocking transfers at once: each point under way may have one, and a group needs all of its ranks."""
END_S = 30.0
"""For a process whose standard input has ended to be gone."""


class Job(msgspec.Struct, frozen=True):
    """One generator of one point."""

    number: int
    address: str
    name: str
    config: Config


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended; an empty error is a run that was told to stop."""

    number: int
    error: str = ""
    tokens: int = 0
    """Sampled by completed requests."""
    working_s: float = 0.0
    """Their time in a slot, without that in which weights were loaded: tokens / working_s is the rate of a slot."""


class ReceivingEngine(SimulatedEngine):
    """Sleeps instead of sampling, and receives the bytes of a publication as an engine with a model does."""

    receivers = 1

    def __init__(self, config: Config) -> None:
        engine = config.generator.engine
        super().__init__(engine, slots=config.generator.slots, running_requests=config.generator.running_requests)  # type: ignore[arg-type]
        self._receiver = Receiver()
        self._held: ReceivedWeights | None = None
        self.tokens, self.working_s = 0, 0.0

    async def _sample(self, request: SampleRequest) -> Sample:
        await self._resumed.wait()
        began = self._now()
        sample = await super()._sample(request)
        self.tokens += len(sample.completion_ids)
        self.working_s += self._now() - began
        return sample

    async def join_epoch(self, info: EpochInfo) -> None:
        """Join the group of an epoch in the background."""
        await asyncio.to_thread(self._receiver.join, info)

    async def receive(self, epoch: int, manifest: Manifest, deadline_s: float) -> str:
        """Receive in the background while requests run."""
        self._held = await asyncio.to_thread(self._receiver.receive, manifest, deadline_s)
        return self._held.checksum

    async def load(self, manifest: Manifest) -> LoadReport:
        """Stand still for load_s."""
        held, self._held = self._held, None
        if held is None or held.manifest != manifest:
            raise EngineError(f"version {manifest.version} was not received; it cannot be loaded")
        started = time.monotonic()
        await self.relabel(manifest.version)
        self._receiver.recycle(held)
        took = time.monotonic() - started
        return LoadReport(checksum=held.checksum, load_s=took, paused_s=took)

    async def load_snapshot(self, path: Path, manifest: Manifest) -> LoadReport:
        """Read and verify the file, then load it."""
        self._held = await asyncio.to_thread(read_snapshot, path, manifest)
        return await self.load(manifest)

    async def close(self) -> None:
        """Leave the group."""
        await super().close()
        self._receiver.close()


async def generate(job: Job) -> JobEnd:
    """Work until the point's learner says stop."""
    engine = ReceivingEngine(job.config)
    client = Client(job.name, str(job.number), job.config.transport.max_message_bytes)
    client.connect(job.address)
    try:
        generator = Generator(job.config, engine, Arithmetic(), Numbers(), client, job.name, str(job.number))  # type: ignore[arg-type]
        await generator.run()
        return JobEnd(job.number, tokens=engine.tokens, working_s=engine.working_s)
    finally:
        client.close()
        await engine.close()


async def serve() -> None:
    """Begin a job for every line until there are no more."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks = set()
    while line := await lines.readline():
        task = asyncio.create_task(_work(msgspec.json.decode(line, type=Job)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _work(job: Job) -> None:
    try:
        end = await generate(job)
    except Exception as failure:  # the boundary of this job: the point that it belongs to fails with it
        logging.exception("generator %s failed", job.name)
        end = JobEnd(job.number, f"{type(failure).__name__}: {failure}")
    sys.stdout.buffer.write(msgspec.json.encode(end) + b"\n")
    sys.stdout.buffer.flush()


class FleetProcess:
    """The other end: one process, and the ends of its jobs as futures."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.sweep_fleet"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._jobs: dict[int, Future[JobEnd]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="fleet", daemon=True)
        self._reader.start()

    def begin(self, job: Job) -> Future[JobEnd]:
        """Start a generator; the future gives how it ended."""
        end: Future[JobEnd] = Future()
        assert self._process.stdin is not None
        with self._lock:
            self._jobs[job.number] = end
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        return end

    def close(self) -> None:
        """No more jobs: the process ends, with those that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            end = msgspec.json.decode(line, type=JobEnd)
            self._jobs.pop(end.number).set_result(end)
        for number in list(self._jobs):
            self._jobs.pop(number).set_result(JobEnd(number, "its process ended"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve())
