"""The coordinator as a process: the same run as in a thread, whoever of the two is killed, and all that is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from async_rl import protocol as p
from async_rl.config import Config
from async_rl.coordinator import CoordinatorEnded, StallError
from async_rl.coordinator.calls import GetStatus
from async_rl.coordinator.core import TELL_GAP_S
from async_rl.coordinator.handle import CoordinatorProcess
from async_rl.coordinator.resumed import Resumed
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import load_tokenizer
from async_rl.errors import InputError
from async_rl.transport import Client, TransportError
from async_rl.weights.errors import WeightsError
from tests.conftest import Spawn
from tests.envs.settings import character_tokenizer
from tests.loop.rig import Learner, NoTransfer, fleet, make_config, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., CoordinatorProcess]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """config(section={...}): settings of a small run whose model folder holds nothing but a tokenizer."""
    character_tokenizer().save_pretrained(tmp_path / "model")

    def make(**sections: dict[str, Any]) -> Config:
        # Two processes that share a busy core may each wait for seconds.
        transport = {"heartbeat_timeout_s": 30.0, **sections.pop("transport", {})}
        return make_config(tmp_path, model={"path": str(tmp_path / "model")}, transport=transport, **sections)

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """Start coordinator processes; those that still run after the test are killed."""
    started: list[CoordinatorProcess] = []

    def begin(config: Config, notify: Callable[[str], None] = print, **options: Any) -> CoordinatorProcess:
        started.append(CoordinatorProcess(config, "run-1", notify, **options))
        return started[-1]

    yield begin
    for coordinator in started:
        coordinator._process.kill()
        coordinator.stop("the test is over")


class ProcessLearner(Learner):
    """The learner of the rig with its coordinator in a process."""

    def __init__(self, config: Config, begin: Start, resumed: Resumed | None = None) -> None:
        self._begin, self._resumed = begin, resumed
        super().__init__(config)

    def make_coordinator(self, draw: Any) -> Any:
        self.process = self._begin(self.config, self.notes.append, resumed=self._resumed)
        return self.process

    def start(self, port: int | None = None) -> str:
        address = self.process.start(NoTransfer())["learner"]
        self._thread.start()
        return address


async def test_a_run_through_the_process(config: Callable[..., Config], start: Start) -> None:
    """Batches, evaluations, metrics and lines for people arrive; every problem is trained once, within the bound."""
    learner = ProcessLearner(config(data={"eval_problems": 4}, evaluation={"every": 1}), start)
    async with fleet(learner.config, learner.start(), "g0", "g1"):
        await learner.until(3)
        counts = learner.process.collect(1.0).resolve()
        await learner.done()
    assert learner.process._process.returncode == 0
    assert len(learner.batches) == 12
    check_order([(group.ticket, group.problem.id) for batch in learner.batches for group in batch], learner.config)
    assert max(learner.staleness()) <= 2
    members = [member for batch in learner.batches for group in batch for member in group.members]
    assert len(members) == 48 * 4
    for member in members:
        p.check_trajectory(member)
    assert [(result.version, result.scored, len(result.samples)) for result in learner.results] == [
        (0, 4, 4),
        (4, 4, 4),
    ]
    assert 12 <= counts["ledger/trained"] <= 48 and counts["generator/count"] == 2
    assert any(note.startswith("generator g0 joined (simulated, 8 slots") for note in learner.notes), learner.notes


async def test_a_killed_coordinator_is_named_with_the_end_of_its_log(
    config: Callable[..., Config], start: Start
) -> None:
    learner = ProcessLearner(config(run={"steps": 1000}), start)
    async with fleet(learner.config, learner.start(), "g0"):
        await learner.until(2)
        os.kill(learner.process.pid, signal.SIGKILL)
        with pytest.raises(
            CoordinatorEnded, match=r"was killed by SIGKILL; the last lines of .*coordinator\.log: .*run-1"
        ):
            await learner.done()
    with pytest.raises(CoordinatorEnded, match="was killed by SIGKILL"):
        learner.process.status()
    learner.process.stop("a second end changes nothing")


async def test_what_ends_the_coordinator_is_raised_by_the_learner(config: Callable[..., Config], start: Start) -> None:
    learner = ProcessLearner(config(run={"stall_timeout_s": 0.5}), start)
    address = learner.start()
    with pytest.raises(StallError, match=f"no generator is connected to {address}") as raised:
        await learner.done()
    assert "_watch_progress" in raised.value.__notes__[0], "the traceback of the process is kept"
    with pytest.raises(CoordinatorEnded, match=r"has stopped: nothing moved for 0\.5 s"):
        learner.process.status()


def test_a_port_in_use_and_an_open_address_are_refused_as_in_one_process(
    config: Callable[..., Config], start: Start
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=rf"^port {port} on 127\.0\.0\.1 is in use; stop what listens there"):
            start(config(transport={"port": port})).start(NoTransfer())
    with pytest.raises(InputError, match=r"^transport\.host=192\.0\.2\.1 can be reached by other machines"):
        start(config(transport={"host": "192.0.2.1"})).start(NoTransfer())


def test_problems_that_cannot_be_used_are_refused(config: Callable[..., Config], start: Start, tmp_path: Path) -> None:
    missing = config(environment={"type": "math"}, data={"path": str(tmp_path / "none.jsonl"), "answer_column": "a"})
    with pytest.raises(InputError, match=r"none\.jsonl"):
        start(missing)


def test_signals_of_a_terminal_or_a_scheduler_leave_it_to_the_learner(
    config: Callable[..., Config], start: Start
) -> None:
    coordinator = start(config())
    coordinator.start(NoTransfer())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(coordinator.pid, number)
    assert coordinator.status()["published"] is None
    coordinator.stop("the run is over")
    assert coordinator._process.returncode == 0


def test_a_stopped_coordinator_is_noticed(config: Callable[..., Config], start: Start) -> None:
    coordinator = start(config())
    coordinator.start(NoTransfer())
    os.kill(coordinator.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="the coordinator did not answer GetStatus for 1 s"):
        coordinator.ask(GetStatus(), timeout_s=1.0)
    coordinator.stop("it hangs", timeout_s=0.2)
    assert coordinator._process.returncode == -signal.SIGKILL


def test_a_coordinator_that_goes_on_after_a_stop_says_how_long_it_stood(
    config: Callable[..., Config], start: Start
) -> None:
    notes: list[str] = []
    coordinator = start(config(), notes.append)
    coordinator.start(NoTransfer())
    coordinator.status()  # It has begun to turn.
    os.kill(coordinator.pid, signal.SIGSTOP)
    time.sleep(TELL_GAP_S + 0.5)
    os.kill(coordinator.pid, signal.SIGCONT)
    deadline = time.monotonic() + 120
    while not any("the coordinator stood still for" in note for note in notes):
        assert time.monotonic() < deadline, notes
        time.sleep(0.05)
    coordinator.stop("the test is over")


@pytest.mark.parametrize("opened", [False, True])
def test_it_does_not_outlive_a_killed_learner(config: Callable[..., Config], spawn: Spawn, opened: bool) -> None:
    code = (
        "import msgspec, sys, time\nfrom async_rl.config import Config\n"
        "from async_rl.coordinator.handle import CoordinatorProcess\nfrom tests.loop.rig import NoTransfer\n"
        "c = CoordinatorProcess(msgspec.json.decode(sys.argv[1], type=Config), 'run-1', print)\n"
        f"{opened} and c.start(NoTransfer())\nprint(c.pid, flush=True)\ntime.sleep(600)"
    )
    learner = spawn([sys.executable, "-c", code, msgspec.json.encode(config()).decode()])
    assert learner.stdout is not None
    coordinator = psutil.Process(int(learner.stdout.readline()))
    os.kill(learner.pid, signal.SIGKILL)  # The process alone, not its group.
    try:
        coordinator.wait(150)
    except psutil.TimeoutExpired:
        pytest.fail("the coordinator outlived its learner")


async def test_a_second_process_continues_from_a_state(config: Callable[..., Config], start: Start) -> None:
    """Taken with a batch in flight, which counts as not taken; together every ticket is trained, none twice."""
    first = ProcessLearner(config(run={"steps": 1000}), start)
    address = first.process.start(NoTransfer())["learner"]
    first._publish(0)
    async with fleet(first.config, address, "g0"):
        before = await asyncio.to_thread(take_batches, first.process, 3)
        request = first.process.request_batch()
        await asyncio.to_thread(request.wait, 60.0)
        resumed = Resumed(np.frombuffer(first.process.snapshot_state(), np.uint8), version=3)
    first.process.stop("it is continued elsewhere")
    second = ProcessLearner(config(run={"steps": 1000}), start, resumed=resumed)
    address = second.process.start(NoTransfer())["learner"]
    second.process.publish(manifest("run-1", 3), evaluate=False)
    async with fleet(second.config, address, "g0"):
        after = await asyncio.to_thread(take_batches, second.process, 3)
    assert len(before) == len(after) == 12
    check_order(before + after, second.config)
    second.process.stop("done")
    with pytest.raises(InputError, match=r"the checkpoint's problems .* are not those of this configuration"):
        start(config(run={"steps": 1000, "seed": 7}), resumed=resumed)


def check_order(trained: list[tuple[int, str]], config: Config) -> None:
    """Every ticket from 0 was trained once, and holds the problem that stands there in the order of the problems."""
    problems = build_environment(config).problems(load_tokenizer(config.model.path))
    order = [problem.id for _ in trained if (problem := problems.draw()) is not None]
    assert sorted(trained) == list(enumerate(order))


def take_batches(coordinator: CoordinatorProcess, count: int) -> list[tuple[int, str]]:
    """Train on `count` batches, every version published; returns (ticket, problem id) of their groups."""
    taken = []
    for _ in range(count):
        request = coordinator.request_batch()
        assert request.wait(150.0), coordinator.status()
        groups = request.result()
        assert groups is not None
        coordinator.trained()
        coordinator.wait_for_publication()
        version = coordinator.status()["ledger"]["trained"] // len(groups)
        coordinator.publish(manifest("run-1", version), evaluate=False)
        taken += [(group.ticket, group.problem.id) for group in groups]
    return taken


class Recorder(NoTransfer):
    """Transfers nothing and remembers what it was asked for; the first join fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[Any, ...]] = []
        self.sending: Future[float] = Future()

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        self.asked.append(("join", epoch, size, deadline_s))
        if len([entry for entry in self.asked if entry[0] == "join"]) > 1:
            return self._done()
        failed: Future[float] = Future()
        failed.set_exception(WeightsError("no such luck"))
        return failed

    def abandon(self, epoch: int, reason: str) -> None:
        self.asked.append(("abandon", epoch, reason))
        self.sending.set_exception(WeightsError(reason))

    def send(self, manifest: p.Manifest, deadline_s: float) -> Future[float]:
        self.asked.append(("send", manifest.version, deadline_s))
        return self._done() if manifest.version == 1 else self.sending

    def snapshot(self, manifest: p.Manifest) -> Future[Path]:
        self.asked.append(("snapshot", manifest.version))
        path: Future[Path] = Future()
        path.set_result(self.folder / "a.safetensors")
        return path


async def test_the_learner_does_the_blocking_work_of_publications(
    config: Callable[..., Config], start: Start, tmp_path: Path
) -> None:
    """A snapshot for the joiner, a join that fails and is tried again, a send, an abandoned one: by message."""
    coordinator = start(config())
    transfer = Recorder(tmp_path)
    client = Client("g0", "1", 1 << 20)
    client.connect(coordinator.start(transfer)["learner"])
    coordinator.publish(manifest("run-1", 0), evaluate=False)
    hello = {"run_id": None, "policy_version": None, "slots": 1, "receivers": 1, "engine": "vllm", "host": "h"}
    await client.send(p.Hello(protocol=p.PROTOCOL_VERSION, name="g0", incarnation="1", pid=1, **hello))  # type: ignore[arg-type]
    load = await next_message(client, p.LoadSnapshot)
    assert load.path == str(tmp_path / "a.safetensors")
    done = {"checksum": "", "load_s": 0.0, "paused_s": 0.0}
    await client.send(p.Loaded(version=0, source="snapshot", **done))  # type: ignore[arg-type]
    await asyncio.to_thread(wait_until, lambda: coordinator.status()["generators"][0]["state"] == "active")
    coordinator.publish(manifest("run-1", 1), evaluate=False)
    for epoch in (1, 2):
        join = await next_message(client, p.JoinEpoch)
        assert (join.info.epoch, join.info.size, join.info.host, join.info.port) == (epoch, 2, "127.0.0.1", 1)
        await client.send(p.EpochJoined(epoch=epoch))
    assert (await next_message(client, p.Publish)).manifest.version == 1
    await client.send(p.Received(version=1, epoch=2, checksum="", receive_s=0.0))
    await client.send(p.Loaded(version=1, source="broadcast", **done))  # type: ignore[arg-type]
    await asyncio.to_thread(coordinator.wait_for_publication)
    assert coordinator.status()["published"] == 1
    assert [entry[:2] for entry in transfer.asked] == [("snapshot", 0), ("join", 1), ("join", 2), ("send", 1)]
    coordinator.publish(manifest("run-1", 2), evaluate=False)
    assert (await next_message(client, p.Publish)).manifest.version == 2
    await client.send(p.Goodbye(reason="enough"))
    await asyncio.to_thread(coordinator.wait_for_publication)
    assert coordinator.status()["published"] == 2
    assert transfer.asked[4:] == [("send", 2, config().weights.deadline_s), ("abandon", 2, "g0 is gone: enough")]
    client.close()


async def next_message(client: Client, kind: type) -> Any:
    """The next message of a kind; others are passed over."""
    while (message := await client.receive(60.0)) is not None:
        if isinstance(message, kind):
            return message
    pytest.fail(f"no {kind.__name__} within 60 s")


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come true within 60 s"
        time.sleep(0.02)
