"""The sides of the suite `transport`: what stands in the middle, who loads it and who takes from it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq

from async_rl.config import Config, build_config
from async_rl.coordinator.handle import CoordinatorProcess
from benchmarks.coordinator import NoTransfer, publish, write_inputs
from benchmarks.transport_peers import GROUP_SIZE, MEMBER_TOKENS, MEMBERS, RUN_ID, whole_group
from benchmarks.transport_raw import QUEUED

BATCH_GROUPS = 32
START_S = 120.0
"""For the first groups to come through a side."""
QUEUE_GROUPS = 64
"""Of the Ray queue."""
WINDOW = 8
"""Groups that one Ray producer, and the consumer, have under way at once."""


@dataclass(frozen=True)
class Reading:
    """Totals at one moment."""

    at: float
    groups: int
    cpu_s: dict[str, float]
    """By who takes part: middle, makers, consumer."""


@dataclass(frozen=True)
class Load:
    """Who sends what."""

    peers: int
    makers: int
    """Processes that the peers share."""
    slots: int
    bundle: int
    """Finished members in one message."""


class Side(ABC):
    """One way from peers to the consumer."""

    name: str

    def __init__(self) -> None:
        self.groups = 0
        """Taken by the consumer."""
        self.pids: dict[str, list[int]] = {"middle": [], "makers": [], "consumer": [os.getpid()]}

    def reading(self) -> Reading:
        cpu_s = {who: sum(cpu_seconds(pid) for pid in pids) for who, pids in self.pids.items()}
        return Reading(time.monotonic(), self.count(), cpu_s)

    def count(self) -> int:
        return self.groups

    def pause(self) -> None:
        """Makers stand still until `resume`."""
        for pid in self.pids["makers"]:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # What is under way comes through.

    def resume(self, seconds: float) -> None:
        for pid in self.pids["makers"]:
            os.kill(pid, signal.SIGCONT)

    def complete(self) -> bool:
        """Whether all peers have come."""
        return True

    @abstractmethod
    def close(self) -> None: ...

    def settle(self) -> None:
        """Wait for the first groups, then stand still."""
        deadline = time.monotonic() + START_S
        while self.count() < BATCH_GROUPS or not self.complete():
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"no groups came through the side {self.name!r} within {START_S:g} s")
            self.go_on()
            time.sleep(0.05)
        self.pause()

    def go_on(self) -> None:  # noqa: B027
        """Called while the first groups are awaited: makers that work for a time only are given more of it."""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads, to a nanosecond where the kernel says it."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError, ValueError):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))


def start_makers(side: Side, address: str, load: Load) -> list[subprocess.Popen[bytes]]:
    """The processes of the peers."""
    names = [f"peer{number}" for number in range(load.peers)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.transport_peers",
        side.name,
        address,
        str(load.slots),
        str(load.bundle),
    ]
    processes = [subprocess.Popen([*command, *names[number :: load.makers]]) for number in range(load.makers)]
    side.pids["makers"] = [process.pid for process in processes]
    return processes


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)


class CoordinatorSide(Side):
    """The real process, its learner's end, and peers that speak the protocol."""

    name = "coordinator"

    def __init__(self, folder: Path, load: Load) -> None:
        super().__init__()
        write_inputs(str(folder))
        self.coordinator = CoordinatorProcess(settings(folder), RUN_ID, lambda _: None)
        address = self.coordinator.start(NoTransfer())["learner"]
        publish(self.coordinator, 0)
        self.pids["middle"] = [self.coordinator.pid]
        self.makers = start_makers(self, address, load)
        self._peers = load.peers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._consume, daemon=True)
        self._thread.start()
        self.settle()

    def complete(self) -> bool:
        active = [one for one in self.coordinator.status()["generators"] if one["state"] == "active"]
        return len(active) == self._peers

    def _consume(self) -> None:
        """Take batch after batch, as a learner that trains in no time."""
        while not self._over.is_set():
            request = self.coordinator.request_batch()
            while not request.wait(0.5):
                if self._over.is_set():
                    return
            groups = request.result() or ()
            assert all(len(group.members) == GROUP_SIZE for group in groups), "a group lost members"
            self.groups += len(groups)
            self.coordinator.trained()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)
        end(self.makers)
        self.coordinator.stop("done", dismiss=False)


def settings(folder: Path) -> Config:
    """Groups of GROUP_SIZE x MEMBER_TOKENS tokens; nothing is ever too old, nobody falls silent."""
    return build_config(
        {
            "run": {"dir": str(folder), "steps": 1_000_000, "stall_timeout_s": 3600.0},
            "model": {"path": f"{folder}/model"},
            "data": {"path": f"{folder}/problems.jsonl", "eval_problems": 0},
            "environment": {"type": "exact_match"},
            "evaluation": {"every": 0},
            "sampling": {"group_size": GROUP_SIZE, "max_completion_tokens": MEMBER_TOKENS},
            "staleness": {"max_staleness": 1_000_000, "overdue": "keep"},
            "learner": {"batch_groups": BATCH_GROUPS},
            "generator": {"slots": GROUP_SIZE, "engine": {"type": "simulated"}},
            "transport": {"port": 0, "heartbeat_timeout_s": 3600.0},
            "weights": {"deadline_s": 600.0},
        }
    )


class ZmqSide(Side):
    """A ROUTER that receives the frames of groups and drops them (raw) or passes them on (relay)."""

    def __init__(self, name: str, folder: Path, load: Load) -> None:
        super().__init__()
        self.name = name
        self._messages = len(whole_group(load.bundle))
        self._context = zmq.Context()
        self._count_file = folder / f"{name}.count"
        self._count_file.write_bytes(bytes(8))
        command = [sys.executable, "-m", "benchmarks.transport_raw", str(self._count_file)]
        if name == "relay":
            pull = self._context.socket(zmq.PULL)
            pull.rcvhwm = QUEUED
            command.append(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
            threading.Thread(target=self._pull, args=(pull,), daemon=True).start()
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.server.stdout is not None
        port = int(self.server.stdout.readline())
        self.pids["middle"] = [self.server.pid]
        self.makers = start_makers(self, f"127.0.0.1:{port}", load)
        self.settle()

    def _pull(self, pull: zmq.Socket) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                pull.recv_multipart()
        pull.close(linger=0)

    def count(self) -> int:
        return int.from_bytes(self._count_file.read_bytes(), "little") // self._messages

    def close(self) -> None:
        end([*self.makers, self.server])
        self._context.term()


class RaySide(Side):
    """One queue actor; producer actors put whole groups, the consumer gets them, WINDOW calls under way each."""

    name = "ray"

    def __init__(self, makers: int) -> None:
        super().__init__()
        import ray
        from ray.util.queue import Queue

        self.ray = ray
        ray.init(
            # Actors that ask for no CPU need none of the processes that Ray starts in advance for each.
            address="local", num_cpus=0, include_dashboard=False, log_to_driver=False,
            object_store_memory=512 << 20, configure_logging=False,
            # By default Ray's workers give way to everything else; the other sides' processes do not.
            _system_config={"worker_niceness": 0},
        )  # fmt: skip
        self.queue = Queue(QUEUE_GROUPS, actor_options={"num_cpus": 0})
        middle = ray.get(self.queue.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=START_S)
        producer = ray.remote(num_cpus=0)(Producer)
        self.producers = [producer.remote(self.queue.actor) for _ in range(makers)]
        self.pids["middle"] = [middle]
        self.pids["makers"] = ray.get([one.pid.remote() for one in self.producers], timeout=START_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._consume, daemon=True)
        self._thread.start()
        self._round: list[Any] = []
        self.settle()

    def resume(self, seconds: float) -> None:
        self._round = [one.produce.remote(seconds) for one in self.producers]

    def go_on(self) -> None:
        """Rounds of a second until enough has come: on a busy machine the first one may carry a few groups."""
        if self._round and self.ray.wait(self._round, num_returns=len(self._round), timeout=0)[1]:
            return
        self.ray.get(self._round, timeout=START_S)  # raises what a producer raised
        self.resume(1.0)

    def pause(self) -> None:
        self.ray.get(self._round, timeout=START_S)
        time.sleep(0.3)

    def _consume(self) -> None:
        waiting = [self.queue.actor.get.remote() for _ in range(WINDOW)]
        while not self._over.is_set():
            ready, waiting = self.ray.wait(waiting, timeout=0.5)
            for one in ready:
                assert len(self.ray.get(one)) == GROUP_SIZE
                self.groups += 1
                waiting.append(self.queue.actor.get.remote())

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)
        self.ray.shutdown()


class Producer:
    """A Ray actor that puts groups."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def pid(self) -> int:
        return os.getpid()

    def produce(self, seconds: float) -> None:
        import ray

        until = time.monotonic() + seconds
        waiting: list[Any] = []
        while time.monotonic() < until:
            waiting.append(self.queue.put.remote(list(MEMBERS)))
            if len(waiting) == WINDOW:
                _, waiting = ray.wait(waiting, timeout=30)
        ray.get(waiting, timeout=60)
