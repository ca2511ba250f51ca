"""`async-rl train launcher.type=ray` on a Ray cluster of several nodes on this machine: real processes, lost nodes."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from async_rl.checkpoints.names import MARKER
from tests.e2e.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG_S = 400.0
"""Deadline of every wait; a pass never needs it."""
STORE_BYTES = 80 << 20
HEAD = {
    "num_cpus": 0,
    "include_dashboard": False,
    "object_store_memory": STORE_BYTES,
    # A lost node is noticed in some seconds; a slow machine does not lose one.
    "_system_config": {
        "health_check_initial_delay_ms": 2000,
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 5,
        "health_check_timeout_ms": 60000,
        # By default Ray's workers, and so the learner, get little of a busy machine.
        "worker_niceness": 0,
    },
}


class Cluster:
    """A Ray cluster with a head without room and workers of one kind each; the driver lives beside the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self.ray = RayCluster(initialize_head=True, head_node_args=HEAD)
        self.address: str = self.ray.address
        self.workers: dict[str, Any] = {}

    def add(self, name: str, cpus: int = 1, **resources: float) -> None:
        """A node with a resource of its own name."""
        self.workers[name] = self.ray.add_node(
            num_cpus=cpus, object_store_memory=STORE_BYTES, resources={name: 1, **resources}
        )

    def lose(self, name: str) -> None:
        """Kill all of a node's processes."""
        self.ray.remove_node(self.workers.pop(name), allow_graceful=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests: `home`, for learners, and `first`, for generators; a test may add and lose others."""
    found = Cluster()
    found.add("home")
    found.add("first", generators=2)
    yield found
    with contextlib.suppress(Exception):
        found.ray.shutdown()


@pytest.fixture
def train(run: Run, cluster: Cluster) -> Any:
    """Starts a run with its learner on `home`."""

    def start(*overrides: str) -> Any:
        return run.start(
            "train", str(run.config), "launcher.type=ray", f"launcher.address={cluster.address}",
            "launcher.learner_resources.custom=home=0.5", "transport.port=0", "launcher.placement_timeout_s=200",
            "run.save_model=false", "metrics.report=false", "run.stall_timeout_s=300", "weights.deadline_s=60",
            "transport.heartbeat_timeout_s=20", *overrides,
        )  # fmt: skip

    return start


@pytest.fixture(autouse=True)
def nothing_left(run: Run, cluster: Cluster) -> Iterator[None]:
    """After every test no process of its run is left, and no placement group holds any room."""
    yield
    run.until(lambda: not processes_of(run), LONG_S)
    groups = cluster.ray.global_state.placement_group_table() or {}
    assert {group["state"] for group in groups.values()} <= {"REMOVED"}


def processes_of(run: Run, words: str = "") -> list[psutil.Process]:
    """Processes, on whatever node, that work on this run: its commands and their keepers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if str(run.folder) in text and words in text and "launcher.type=ray" in text:
            found.append(process)
    return found


def generators(run: Run) -> list[psutil.Process]:
    return processes_of(run, "async_rl.cli generator")


def step(run: Run) -> int:
    return max((row["step"] for row in run.metrics()), default=-1)


def log(run: Run, name: str) -> str:
    path = run.folder / "run" / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_a_whole_run_with_killed_generators(run: Run, train: Any) -> None:
    """Both are killed, and the run comes to its end with what replaces them; logs are where they always are."""
    process = train("run.steps=12", "generator.count=2", "launcher.generator_resources.custom=generators=1",
                    "launcher.generator_resources.cpus=0.5")  # fmt: skip
    run.until(lambda: step(run) >= 1 and len(generators(run)) == 2, LONG_S)
    for victim in generators(run):
        victim.send_signal(signal.SIGKILL)
    run.wait(process, timeout_s=LONG_S)
    for name in ("generator-0", "generator-1"):
        assert f"async-rl train: {name} ended with exit code 137; log: " in run.output()
        assert f"async-rl train: {name}: restart 1 of 3 in 1 s" in run.output()
    listens = r"learner \d+ listens on 127\.0\.0\.1:"
    assert re.search(listens, run.output()), "the learner's lines are shown"
    assert re.search(listens, log(run, "learner"))
    assert step(run) == 12


def test_a_lost_node_moves_its_generator_and_ctrl_c_ends_all(run: Run, train: Any, cluster: Cluster) -> None:
    cluster.add("doomed", moving=1)
    process = train("run.steps=100000", "launcher.generator_resources.custom=moving=1")
    run.until(lambda: step(run) >= 1, LONG_S)
    cluster.lose("doomed")
    cluster.add("second", moving=1)
    run.until(lambda: "generator-0: restart 1 of 3" in run.output() and bool(generators(run)), LONG_S)
    assert "async-rl train: generator-0 was lost with its actor on " in run.output()
    before = step(run)
    run.until(lambda: step(run) >= before + 8, LONG_S)
    process.send_signal(signal.SIGINT)
    run.wait(process, code=130, timeout_s=LONG_S)
    cluster.lose("second")


def test_a_lost_learner_is_one_line_and_the_same_command_resumes(run: Run, train: Any, cluster: Cluster) -> None:
    cluster.add("island", cpus=2)
    here = ("launcher.learner_resources.custom=island=0.5", "launcher.generator_resources.custom=island=0.5")
    process = train(*here, "run.steps=100000", "checkpoint.every=1")
    run.until(lambda: any((run.folder / "run" / "checkpoints").glob(f"*/{MARKER}")), LONG_S)
    cluster.lose("island")
    run.wait(process, code=1, timeout_s=LONG_S)
    last = [line for line in run.output().splitlines() if line.startswith("async-rl train: the learner ")]
    assert len(last) == 1 and "was lost with its actor on " in last[0] and "the same command goes on" in last[0]
    cluster.add("island", cpus=2)
    resumed = train(*here, "run.steps=100000", "checkpoint.every=1")
    run.until(lambda: "listens on" in run.output().partition("resumed from ")[2], LONG_S)
    resumed.send_signal(signal.SIGTERM)
    run.wait(resumed, code=0, timeout_s=LONG_S)
    cluster.lose("island")


BIG = ("launcher.generator_resources.gpus=8",)
NOWHERE = ("launcher.learner_resources.custom=nowhere=1",)
FULL = (
    "launcher.learner_resources.cpus=0.6", "launcher.generator_resources.cpus=0.6", "generator.count=2",
    "launcher.generator_resources.custom=generators=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "code", "part"),
    [
        (BIG, 2, r"^error: .*a generator with 1 CPU, 8 GPU .*: \d nodes \(.*0 GPU.*or add nodes$"),
        (NOWHERE, 2, r"^error: .*a learner with 1 CPU, 1 nowhere .*\(.*0 nowhere.*or add nodes$"),
        (
            FULL,
            1,
            r"^error: TimeoutError: .*2 generators with 0\.6 CPU, 1 generators each .*of which .* are free; wait",
        ),
    ],
    ids=["big", "nowhere", "full"],
)
def test_no_room_is_one_line(run: Run, train: Any, overrides: tuple[str, ...], code: int, part: str) -> None:
    process = train(*overrides, "launcher.placement_timeout_s=1")
    run.wait(process, code=code, timeout_s=LONG_S)
    errors = [line for line in run.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(part, errors[0]), run.output()
    assert "Traceback" not in run.output()


def test_no_cluster_is_one_line(run: Run) -> None:
    process = run.start("train", str(run.config), "launcher.type=ray", "launcher.address=127.0.0.1:1")
    run.wait(process, code=1, timeout_s=LONG_S)
    assert "no Ray cluster at launcher.address = '127.0.0.1:1'" in run.output().splitlines()[-1]
