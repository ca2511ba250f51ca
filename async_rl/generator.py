"""A generator: takes leases, samples with an engine, scores, sends trajectories, takes new weights while it runs.

It is stateless: everything that must survive lives in the learner. What it has finished it keeps until the
coordinator acknowledges it, also across a lost connection, so a restarted learner of the same run loses nothing.

One asyncio loop owns the socket. Tasks: `_listen` (every message), `_beat` (heartbeats, reconnect), `_take_weights`
(joins, receives and loads, strictly in order) and one `_work` per lease.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from async_rl import protocol as p
from async_rl.addresses import join_address, split_address
from async_rl.config import Config, ConfigError, prefetch
from async_rl.config.threads import generator_threads
from async_rl.engines import build_engine
from async_rl.engines.base import Engine, EngineError, Sample, SampleRequest
from async_rl.envs.base import Environment, build_environment
from async_rl.envs.tokenize import completion_text, load_tokenizer
from async_rl.keys import Keys, keys_of
from async_rl.tasks import end_tasks
from async_rl.transport import Client
from async_rl.weights.errors import WeightsError

log = logging.getLogger(__name__)

BUNDLE_S = 0.002
"""What finishes within this time travels in one message."""
BUNDLE_BYTES = 1 << 20
"""Of one message, roughly, unless a single result is larger."""
END_S = 30.0
"""For what still runs at the end to stop."""
LEAVE_DEADLINE_S = 10.0
"""Seconds that a leaving generator waits for its last messages to be acknowledged."""


@dataclass
class SlotClock:
    """Integrates slot-seconds, busy and idle, so that idle shares are exact and not sampled."""

    slots: int
    clock: Callable[[], float]
    started: float = field(init=False)
    busy: int = 0
    """Requests that the engine has; those beyond the slots wait inside it."""
    busy_slot_s: float = 0.0
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self._last = self.clock()

    def change(self, delta: int) -> None:
        """The engine has `delta` more requests from now on."""
        now = self.clock()
        self.busy_slot_s += min(self.busy, self.slots) * (now - self._last)
        self._last = now
        self.busy += delta

    def totals(self) -> tuple[float, float, float]:
        """(uptime_s, slot_s, idle_slot_s) up to now."""
        self.change(0)
        uptime = self._last - self.started
        return uptime, uptime * self.slots, uptime * self.slots - self.busy_slot_s


class Generator:
    """The state of one generator process; `run` returns when the run is over or the generator leaves."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        environment: Environment,
        tokenizer: Any,
        client: Client,
        name: str,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.engine = engine
        self.environment = environment
        self.tokenizer = tokenizer
        self.client = client
        self.name = name
        self.clock = clock
        self.incarnation = incarnation
        self.run_id: str | None = None
        self.work: dict[p.LeaseKey, asyncio.Task[None]] = {}
        self.unacknowledged: dict[p.LeaseKey, p.Trajectory] = {}
        self._unsent: dict[p.LeaseKey, None] = {}
        """Of these, what `_deliver` has not sent yet."""
        self._has_results = asyncio.Event()
        self.slot_clock = SlotClock(config.generator.slots, clock)
        self.counts = {"generated_tokens": 0, "finished": 0, "failed": 0, "discarded": 0, "round_trips": 0}
        self.round_trip_s = 0.0
        self._timed: tuple[p.LeaseKey, float] | None = None
        """A finished member under way to the learner, and when it was sent."""
        self.paused_s = 0.0
        self.welcomed = False
        self.leaving = False
        self._num_requests = 0
        self._line: dict[str, int] = {}
        """Runs before the present one that it continues -> last version of each that belongs to it."""
        self._shared_version = -1
        """Last version of the run before that the present one continues; -1: none."""
        self.last_heard = clock()
        self.heartbeat_s = config.transport.heartbeat_s
        self.heartbeat_timeout_s = config.transport.heartbeat_timeout_s
        self._weight_work: asyncio.Queue[tuple[str | None, p.Message]] = asyncio.Queue()
        """(run, message) in the order in which they came."""
        self._weights_of: str | None = None
        """Run whose message is being worked on."""
        self._unanswered: frozenset[p.LeaseKey] = frozenset()
        """What was unacknowledged at the last look for lost messages."""
        self._looked_at = self.last_heard
        self._was_silent = False
        """Whether the learner was given up for gone since it last said Welcome."""
        self._over: asyncio.Future[str] | None = None

    # --- life -------------------------------------------------------------------------------

    async def run(self) -> str:
        """Work until the learner says stop or `leave` is called; returns the reason.

        Raises EngineError, ConnectionError, ConfigError (refused for good).
        """
        self._over = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(t) for t in (self._listen(), self._beat(), self._take_weights(), self._deliver())]
        ends: list[asyncio.Future[Any]] = [self._over, *tasks]
        try:
            await self._hello()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return await self._over
        finally:
            await end_tasks([*tasks, *self.work.values()], END_S)

    async def leave(self, reason: str) -> None:
        """Leave cleanly: return unfinished leases, wait (bounded) for the last acknowledgements, say goodbye."""
        if self.leaving or self._over is None or self._over.done():
            return
        self.leaving = True
        keys = tuple(self.work)
        for key in keys:
            self._drop(key)  # At once: a heartbeat that still listed it would take the lease back.
        try:
            if self.run_id is not None and self.welcomed:
                await self.client.send(p.Returned(run_id=self.run_id, keys=keys))
                deadline = self.clock() + LEAVE_DEADLINE_S
                while self.unacknowledged and self.clock() < deadline:
                    await asyncio.sleep(0.05)
                await self.client.send(p.Goodbye(reason=reason))
        except TimeoutError as error:
            log.warning("leaving without a word: %s", error)
        finally:
            self._finish(reason)

    def _finish(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    def _fail(self, error: BaseException) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    # --- connection -------------------------------------------------------------------------

    async def _hello(self) -> None:
        self.welcomed = False
        await self.client.send(
            p.Hello(
                protocol=p.PROTOCOL_VERSION,
                name=self.name,
                incarnation=self.incarnation,
                run_id=self.run_id,
                policy_version=self.engine.policy_version if self.run_id else None,
                slots=self.config.generator.slots,
                prefetch=prefetch(self.config.generator),
                receivers=self.engine.receivers,
                engine=str(self.config.generator.engine.__struct_config__.tag),
                host=socket.gethostname(),
                pid=os.getpid(),
                holding=self._holding(),
            )
        )

    def _holding(self) -> tuple[p.LeaseKey, ...]:
        return (*self.work, *self.unacknowledged)

    async def _beat(self) -> None:
        """Heartbeats; a learner that was silent for too long gets a new socket and a new Hello, with work going on."""
        silent_since = self.last_heard
        tries = 0
        while True:
            await asyncio.sleep(self._pause_s(tries))
            silent = self.clock() - self.last_heard
            if silent > self.heartbeat_timeout_s:
                if self.last_heard != silent_since:
                    log.warning("no word from the learner at %s for %.0f s; reconnecting", self.client.address, silent)
                    silent_since = self.last_heard
                    self._was_silent = True
                if silent > max(self.config.transport.connect_timeout_s, self.heartbeat_timeout_s):
                    raise ConnectionError(
                        f"no learner answered at {self.client.address} for {silent:.0f} s "
                        f"(transport.connect_timeout_s = {self.config.transport.connect_timeout_s:g}); "
                        "start one there, name another with --learner HOST:PORT, or see that both ends have key files "
                        "of the same pair (transport.keys)"
                    )
            tries = tries + 1 if not self.welcomed or silent > self.heartbeat_timeout_s else 0
            if tries:
                if silent > self.heartbeat_timeout_s:
                    self.client.reset()
                await self._hello()
                continue
            await self.client.send(
                p.Heartbeat(
                    accepting=not self.leaving,
                    holding=self._holding(),
                    policy_version=self.engine.policy_version,
                    stats=self.stats(),
                )
            )
            await self._repeat_unanswered()

    def _pause_s(self, tries: int) -> float:
        """Until the next beat; longer and longer (to a third of the timeout) and scattered while nobody answers.

        A fleet that lost its learner would otherwise come back all at once.
        """
        longest = max(self.heartbeat_s, self.heartbeat_timeout_s / 3)
        pause = min(self.heartbeat_s * 2.0 ** min(tries, 16), longest)
        return pause * random.uniform(0.5, 1.0) if tries else pause

    async def _repeat_unanswered(self) -> None:
        """Send again what has waited long for its acknowledgement: a connection mended below us loses messages."""
        now = self.clock()
        if now - self._looked_at < self.heartbeat_timeout_s:
            return
        for key in self._unanswered:
            if key in self.unacknowledged:
                # One by one: a result that is refused must not hold up others for good.
                await self._send_results([key])
        self._unanswered, self._looked_at = frozenset(self.unacknowledged), now

    def stats(self) -> p.GeneratorStats:
        """Totals since the process started."""
        uptime_s, slot_s, idle_slot_s = self.slot_clock.totals()
        return p.GeneratorStats(
            uptime_s=uptime_s,
            slot_s=slot_s,
            idle_slot_s=idle_slot_s,
            paused_s=self.paused_s,
            round_trip_s=self.round_trip_s,
            **self.counts,
        )

    async def _listen(self) -> None:
        while True:
            message = await self.client.receive(self.heartbeat_s)
            if message is None:
                continue
            self.last_heard = self.clock()
            await self._handle(message)

    async def _handle(self, message: p.Message) -> None:
        match message:
            case p.Welcome():
                await self._welcome(message)
            case p.Refused():
                self._refused(message)
            case p.Alive():
                # A learner that restarted answers heartbeats of strangers with another run or an older version.
                if message.run_id != self.run_id:
                    await self._hello()
            case p.Leases():
                for lease in message.leases:
                    self._begin(lease)
            case p.Acknowledged():
                for key in message.keys:
                    self._acknowledged(key)
            case p.Cancelled():
                for key in message.keys:
                    self._drop(key)
            case p.JoinEpoch() | p.Publish() | p.LoadSnapshot() | p.RelabelVersion():
                self._weight_work.put_nowait((self.run_id, message))
            case p.Stop():
                self._finish(message.reason)
            case _:
                raise p.ProtocolError(f"unexpected message {type(message).__name__} from the learner")

    def _acknowledged(self, key: p.LeaseKey) -> None:
        self.unacknowledged.pop(key, None)
        if self._timed is not None and self._timed[0] == key:
            self.counts["round_trips"] += 1
            self.round_trip_s += self.clock() - self._timed[1]
            self._timed = None

    def _refused(self, message: p.Refused) -> None:
        """Say Hello again at the next beat, unless that cannot help."""
        text = f"the learner at {self.client.address} refused this generator: {message.reason}"
        if message.restart:
            raise EngineError(text)
        if not message.retry:
            raise ConfigError(text)
        log.warning("%s; saying Hello again", text)
        self.welcomed = False

    async def _welcome(self, message: p.Welcome) -> None:
        if message.run_id != self.run_id:
            self._change_run(message)
        self.heartbeat_s = message.heartbeat_s
        self.heartbeat_timeout_s = message.heartbeat_timeout_s
        self.welcomed = True
        if self._was_silent:
            self._was_silent = False
            log.warning(
                "the learner at %s is back (run %s, version %d): %d finished members are sent again, %d go on",
                self.client.address, message.run_id, message.policy_version, len(self.unacknowledged), len(self.work),
            )  # fmt: skip
        await self._send_results(tuple(self.unacknowledged))

    def _change_run(self, message: p.Welcome) -> None:
        """Another learner answers: keep what its run shares with ours.

        It may continue ours, or a run that ours continued too: a learner that ended before its first checkpoint has no
        descendants, and the next one starts from where it had started.
        """
        last = -1
        if self.run_id is not None:
            ours = {**self._line, self.run_id: sys.maxsize}
            last = max((min(ours[run], end) for run, end in message.ancestors.items() if run in ours), default=-1)
            # The learner may have resumed from before the version loaded here: that future no longer exists.
            went_back = f"the learner went back to version {last}"
            self._discard(last, went_back if last >= 0 else f"run {message.run_id} is another run")
        self.run_id, self._shared_version, self._line = message.run_id, last, dict(message.ancestors)

    def _discard(self, last: int, why: str) -> None:
        """Throw away work that a version after `last` took part in, or takes part in while it is running."""
        lost = [
            key
            for key, trajectory in self.unacknowledged.items()
            if last < 0 or any(span.version > last for span in trajectory.versions)
        ]
        for key in lost:
            del self.unacknowledged[key]
        running = list(self.work) if last < 0 or (self.engine.policy_version or 0) > last else []
        for key in running:
            self._drop(key)
        if lost or running:
            self.counts["discarded"] += len(lost)
            log.warning("discarded %d finished and %d running members: %s", len(lost), len(running), why)

    def _drop(self, key: p.LeaseKey) -> None:
        # Forgotten at once: the same key may be leased again by the next message, and is then another request.
        self.unacknowledged.pop(key, None)
        task = self.work.pop(key, None)
        if task is not None:
            task.cancel()

    # --- work -------------------------------------------------------------------------------

    def _begin(self, lease: p.Lease) -> None:
        key = p.LeaseKey(kind=lease.kind, ticket=lease.ticket, member=lease.member, attempt=lease.attempt)
        if key in self.work or key in self.unacknowledged or self.leaving:
            return
        task = asyncio.create_task(self._work(key, lease))
        self.work[key] = task
        task.add_done_callback(lambda t: self._ended(key, t))

    def _ended(self, key: p.LeaseKey, task: asyncio.Task[None]) -> None:
        if self.work.get(key) is task:
            del self.work[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _work(self, key: p.LeaseKey, lease: p.Lease) -> None:
        trajectory = await self._rollout(key, lease)
        self.counts["finished" if trajectory.status != "failed" else "failed"] += 1
        if self._timed is None or self._timed[0] not in self.unacknowledged:
            self._timed = (key, self.clock())
        self.unacknowledged[key] = trajectory
        self._unsent[key] = None
        self._has_results.set()

    async def _deliver(self) -> None:
        """Send what has finished, all of the last few milliseconds in one message; Welcome sends the rest."""
        while True:
            await self._has_results.wait()
            await asyncio.sleep(BUNDLE_S)
            self._has_results.clear()
            keys, self._unsent = tuple(self._unsent), {}
            if self.welcomed:
                await self._send_results(keys)

    async def _send_results(self, keys: Sequence[p.LeaseKey]) -> None:
        """Send finished members that are still unacknowledged, as many in one message as its size allows."""
        for bundle in self._bundles(keys):
            # Looked up now: what was discarded while the one before was on its way must not go out.
            results = {key: self.unacknowledged[key] for key in bundle if key in self.unacknowledged}
            if results:
                # Of the run of now: what goes on after a change of runs belongs to the new one.
                assert self.run_id is not None, "leases come after Welcome"
                await self.client.send(p.Finished.of(self.run_id, results))

    def _bundles(self, keys: Sequence[p.LeaseKey]) -> list[list[p.LeaseKey]]:
        limit = min(BUNDLE_BYTES, self.config.transport.max_message_bytes // 4)
        bundles: list[list[p.LeaseKey]] = []
        room = 0
        for key in keys:
            if (trajectory := self.unacknowledged.get(key)) is None:
                continue
            size = _num_bytes(trajectory)
            if not bundles or size > room:
                bundles.append([])
                room = limit
            bundles[-1].append(key)
            room -= size
        return bundles

    async def _rollout(self, key: p.LeaseKey, lease: p.Lease) -> p.Trajectory:
        started = self.clock()
        self._num_requests += 1
        request_id = f"{key.kind}-{key.ticket}-{key.member}-{key.attempt}-{self._num_requests}"
        request = SampleRequest(request_id=request_id, prompt_ids=lease.problem.prompt_ids, sampling=lease.sampling)
        self.slot_clock.change(+1)
        try:
            sample = await self.engine.sample(request)
        except ValueError as error:
            # The engine refuses this request and is well: the member fails, with the reason, and all others go on.
            why = f"the engine refused the request: {' '.join(str(error).split())}"
            return _trajectory(_NOTHING, "failed", None, why, "", self.clock() - started, 0.0)
        finally:
            self.slot_clock.change(-1)
        sampled = self.clock()
        self.counts["generated_tokens"] += len(sample.completion_ids)
        text = completion_text(self.tokenizer, sample.completion_ids)
        if sample.finish == "aborted":
            why = "sampling was aborted by the engine"
            return _trajectory(sample, "failed", None, why, text, sampled - started, 0.0)
        truncated = sample.finish == "length"
        result = await self.environment.score(lease.problem, text, truncated=truncated)
        status: p.TrajectoryStatus = "truncated" if truncated else "complete"
        if result.value is None:
            status = "failed"
        return _trajectory(sample, status, result.value, result.error, text, sampled - started, self.clock() - sampled)

    # --- weights ----------------------------------------------------------------------------

    async def _take_weights(self) -> None:
        """Joins, publications and snapshots in order; transfer errors are reported, engine errors are fatal."""
        while True:
            self._weights_of, message = await self._weight_work.get()
            if self._weights_of != self.run_id:
                continue  # Of a learner that is gone.
            try:
                match message:
                    case p.JoinEpoch():
                        await self._join(message)
                    case p.Publish():
                        await self._publication(message)
                    case p.LoadSnapshot():
                        await self._snapshot(message)
                    case p.RelabelVersion():
                        await self.engine.relabel(message.version)
                        await self._loaded(message.version, None, 0.0, 0.0, "none")
                if self._weights_of != self.run_id and (self.engine.policy_version or 0) > self._shared_version:
                    # The run changed while its weights were loaded: what went on running has tokens of them.
                    self._discard(self._shared_version, "the engine had loaded a version that is lost")
            except EngineError as error:
                raise EngineError(f"taking weights failed ({type(message).__name__}): {error}") from error

    async def _join(self, message: p.JoinEpoch) -> None:
        try:
            await self.engine.join_epoch(message.info)
        except WeightsError as error:
            log.warning("could not join epoch %d: %s", message.info.epoch, error)
            await self._report(p.EpochJoined(epoch=message.info.epoch, error=str(error)))
            return
        await self._report(p.EpochJoined(epoch=message.info.epoch))

    async def _publication(self, message: p.Publish) -> None:
        version = message.manifest.version
        started = self.clock()
        try:
            checksum = await self.engine.receive(message.epoch, message.manifest, message.deadline_s)
        except WeightsError as error:
            log.warning("could not receive version %d: %s", version, error)
            await self._report(
                p.Received(
                    version=version,
                    epoch=message.epoch,
                    checksum=None,
                    receive_s=self.clock() - started,
                    error=str(error),
                )
            )
            return
        await self._report(
            p.Received(version=version, epoch=message.epoch, checksum=checksum, receive_s=self.clock() - started)
        )
        if checksum != message.manifest.checksum:
            return
        report = await self.engine.load(message.manifest)
        await self._loaded(version, report.checksum, report.load_s, report.paused_s, "broadcast")

    async def _snapshot(self, message: p.LoadSnapshot) -> None:
        from async_rl.weights.snapshot import fetch_snapshot

        version = message.manifest.version
        into = Path(self.config.run.dir) / "downloads" / self.name
        try:
            path = await asyncio.to_thread(
                fetch_snapshot, Path(message.path), message.url, message.manifest, message.deadline_s, into
            )
            try:
                report = await self.engine.load_snapshot(path, message.manifest)
            finally:
                if path.parent == into:
                    path.unlink(missing_ok=True)  # Ours alone; one for each join would fill the disk.
        except WeightsError as error:
            log.warning("could not load the snapshot of version %d: %s", version, error)
            await self._loaded(version, None, 0.0, 0.0, "snapshot", error=str(error))
            return
        await self._loaded(version, report.checksum, report.load_s, report.paused_s, "snapshot")

    async def _loaded(
        self, version: int, checksum: str | None, load_s: float, paused_s: float, source: str, error: str | None = None
    ) -> None:
        self.paused_s += paused_s
        await self._report(
            p.Loaded(
                version=version,
                checksum=checksum,
                load_s=load_s,
                paused_s=paused_s,
                source=source,  # type: ignore[arg-type]
                error=error,
            )
        )

    async def _report(self, message: p.Message) -> None:
        """Tell the learner that asked; one that has taken its place would believe that its own weights were meant."""
        if self._weights_of == self.run_id:
            await self.client.send(message)


_NOTHING = Sample(
    completion_ids=np.zeros(0, dtype=np.int32), logprobs=np.zeros(0, dtype=np.float32), versions=(), finish="aborted"
)


def _num_bytes(trajectory: p.Trajectory) -> int:
    """Of a result on the wire, roughly and rather too many."""
    return 9 * trajectory.completion_ids.size + 4 * len(trajectory.text or "") + 64 * len(trajectory.versions) + 1024


def _trajectory(
    sample: Sample,
    status: p.TrajectoryStatus,
    reward: float | None,
    error: str | None,
    text: str,
    sample_s: float,
    reward_s: float,
) -> p.Trajectory:
    return p.Trajectory(
        status=status,
        completion_ids=sample.completion_ids,
        completion_mask=np.ones(len(sample.completion_ids), dtype=np.uint8),
        behavior_logprobs=sample.logprobs,
        versions=sample.versions,
        reward=reward,
        error=error,
        text=text,
        sample_s=sample_s,
        reward_s=reward_s,
    )


# --- process -------------------------------------------------------------------------------------


def default_name() -> str:
    """host-pid: unique on a cluster, readable in logs."""
    return f"{socket.gethostname()}-{os.getpid()}"


def run_generator(config: Config, learner: str | None, name: str | None) -> int:
    """Run one generator until its learner ends the run (0) or it is told to leave (130).

    Raises ConfigError when the learner refuses it, ConnectionError when none answers, EngineError when the engine dies.
    """
    address = learner or join_address(config.transport.host, config.transport.port)
    split_address(address)  # Before an engine is started for nothing.
    keys = keys_of(config, "generator")
    return asyncio.run(_serve(config, address, name or default_name(), keys))


async def _serve(config: Config, address: str, name: str, keys: Keys | None) -> int:
    incarnation = uuid.uuid4().hex
    tokenizer = load_tokenizer(config.model.path)
    environment = build_environment(config)
    await environment.start()
    engine = build_engine(config, seed=config.run.seed, threads=generator_threads(config))
    client = Client(name, incarnation, config.transport.max_message_bytes, keys)
    try:
        log.info("starting the %s engine", type(engine).__name__)
        await engine.start()
        client.connect(address)
        generator = Generator(config, engine, environment, tokenizer, client, name, incarnation)
        interrupted = _leave_on_signals(generator)
        log.info("generator %s works for %s", name, address)
        reason = await generator.run()
        log.info("generator %s ends: %s", name, reason)
        return 130 if interrupted else 0
    finally:
        client.close()
        await engine.close()
        await environment.close()


def _leave_on_signals(generator: Generator) -> list[str]:
    """SIGINT and SIGTERM make the generator leave cleanly; the returned list names the first that came."""
    loop = asyncio.get_running_loop()
    came: list[str] = []
    leaving: set[asyncio.Task[None]] = set()

    def leave(number: signal.Signals) -> None:
        came.append(number.name)
        leaving.add(loop.create_task(generator.leave(f"{number.name} on {generator.name}")))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave, number)
    return came
