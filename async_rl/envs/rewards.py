"""Rewards in worker processes that are killed at their timeout, so that no reward can stop a generator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace

import msgspec

from async_rl.envs.reward_worker import LENGTH, RewardItem, RewardSpec, Value, describe
from async_rl.errors import InputError

START_DEADLINE_S = 120.0
"""A worker must have imported the reward function by then (it may load a model)."""
EXIT_DEADLINE_S = 5.0


@dataclass(frozen=True)
class RewardResult:
    """What scoring one completion gave: a finite value, or the reason why there is none."""

    value: float | None
    error: str | None = None
    """One line that names the problem; set exactly when value is None."""
    seconds: float = 0.0
    """Wall time of the call that scored it."""


class WorkerDied(Exception):
    """The worker process ended, or was killed at a deadline; the message says how."""


@dataclass(frozen=True)
class _Job:
    problem_id: str
    body: msgspec.Raw
    """The encoded RewardItem."""
    future: asyncio.Future[RewardResult]
    alone: bool = False
    """Its batch failed as a whole: scored again by itself, so that the innocent are not failed with the guilty."""


class RewardPool:
    """Worker processes that run one reward function.

    What a completion gets does not depend on the number of workers or on who shares its batch: a batch call that
    raises, hangs, dies or returns the wrong count is repeated one completion at a time. N completions that hang take
    at most N * timeout_s / workers, plus the start of a worker each (with a batch function, plus one timeout a batch).
    """

    def __init__(self, spec: RewardSpec, workers: int, timeout_s: float, max_batch: int = 1):
        self.spec = spec
        self.timeout_s = timeout_s
        self.max_batch = max_batch if spec.batch else 1
        self.restarts = 0
        """Workers replaced since the start."""
        self._workers = [_Worker(spec) for _ in range(workers)]
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers; raises InputError when the function cannot be imported."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
        except* WorkerDied as errors:
            await self.close()
            raise InputError(f"environment.reward: {errors.exceptions[0]}") from None
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    async def score(self, item: RewardItem) -> RewardResult:
        """Score one completion; every failure is a result with an error."""
        assert self._tasks, "RewardPool.start() comes before score()"
        body = msgspec.Raw(msgspec.msgpack.encode(item))
        job = _Job(item.problem_id, body, asyncio.get_running_loop().create_future())
        await self._put([job])
        return await job.future

    async def close(self) -> None:
        """Kill the workers; callable more than once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _put(self, jobs: list[_Job]) -> None:
        async with self._arrived:
            self._jobs.extend(jobs)
            self._arrived.notify(len(jobs))

    async def _take(self) -> list[_Job]:
        """Wait for work: one job, or as many as one batch call takes."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._jobs)
            jobs = [self._jobs.popleft()]
            while self._jobs and len(jobs) < self.max_batch and not (jobs[0].alone or self._jobs[0].alone):
                jobs.append(self._jobs.popleft())
        # A caller that was cancelled wants no result.
        return [job for job in jobs if not job.future.done()]

    async def _serve(self, worker: _Worker) -> None:
        while True:
            if jobs := await self._take():
                await self._run(worker, jobs)

    async def _run(self, worker: _Worker, jobs: list[_Job]) -> None:
        begun = time.monotonic()
        try:
            if not worker.alive:
                self.restarts += 1
                await worker.start()
                begun = time.monotonic()
            values = await worker.call([job.body for job in jobs], self.timeout_s)
        except WorkerDied as error:
            values = [Value(error=str(error))] * len(jobs)
        except Exception as error:  # the task's boundary: were it to end here, later jobs would wait for ever
            await worker.kill()
            values = [Value(error=describe(error))] * len(jobs)
        seconds = time.monotonic() - begun
        if len(jobs) > 1 and all(value.error is not None for value in values):
            await self._put([replace(job, alone=True) for job in jobs])
            return
        for job, value in zip(jobs, values, strict=True):
            if not job.future.done():
                job.future.set_result(self._result(job.problem_id, value, seconds))

    def _result(self, problem_id: str, value: Value, seconds: float) -> RewardResult:
        if value.error is None:
            return RewardResult(value.value, None, seconds)
        return RewardResult(None, f"problem {problem_id!r}: reward {self.spec.path}: {value.error}", seconds)


@dataclass
class _Worker:
    """One worker process: the parent's end of its pipes."""

    spec: RewardSpec
    process: asyncio.subprocess.Process | None = field(default=None)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start a new process and wait until it has imported the function; raises WorkerDied."""
        # A session of its own: killing it takes along what the reward started, and Ctrl-C does not reach it.
        try:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "async_rl.envs.reward_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except OSError as error:
            raise WorkerDied(f"cannot start a worker process: {error}") from None
        ready = msgspec.msgpack.decode(await self._exchange(self.spec, START_DEADLINE_S, "import"), type=Value)
        if ready.error is not None:
            await self.kill()
            raise WorkerDied(f"cannot import {self.spec.path!r}: {ready.error}")

    async def call(self, items: list[msgspec.Raw], timeout_s: float) -> list[Value]:
        """Score the items in one message; raises WorkerDied when it ends or takes longer than the timeout."""
        values = msgspec.msgpack.decode(await self._exchange(items, timeout_s, "return"), type=list[Value])
        assert len(values) == len(items), f"the worker returned {len(values)} values for {len(items)} completions"
        return values

    async def kill(self) -> str:
        """Kill the process and everything in its session, and return how it ended.

        One that does not end (it is in uninterruptible sleep, say) is left behind: the next start makes another.
        """
        if (process := self.process) is None:
            return "it was killed before"
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(EXIT_DEADLINE_S):
                await process.wait()
        except OSError as error:
            self.process = None
            why = str(error) or f"it was killed {EXIT_DEADLINE_S:g} s ago"
            return f"process {process.pid} has not ended ({why}) and is left behind"
        return _ending(process.returncode)

    async def _exchange(self, message: object, deadline_s: float, verb: str) -> bytes:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        body = msgspec.msgpack.encode(message)
        try:
            async with asyncio.timeout(deadline_s):
                self.process.stdin.write(LENGTH.pack(len(body)) + body)
                await self.process.stdin.drain()
                (size,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
                return await self.process.stdout.readexactly(size)
        except TimeoutError:
            ending = await self.kill()
            left = "" if self.process else f"; {ending}"
            raise WorkerDied(f"did not {verb} within {deadline_s:g} s and was killed{left}") from None
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDied(f"the worker process died ({await self.kill()})") from None
        except asyncio.CancelledError:
            await self.kill()
            raise


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"signal {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"
