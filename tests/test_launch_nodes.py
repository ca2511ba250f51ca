"""What a cluster launcher does on a node and before it has one, without any cluster: keeper, runner, placement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.config import Config, ConfigError, build_config
from async_rl.config.schema import RayLauncher, RayResources
from async_rl.errors import InputError
from async_rl.launch import runner as runner_module
from async_rl.launch.keeper import Order
from async_rl.launch.placement import (
    amounts_of,
    asks_of,
    can_ever_fit,
    describe_asks,
    describe_nodes,
    host_for,
    threads,
)
from async_rl.launch.runner import Line, Runner
from async_rl.launch.train import run_train
from tests.test_launch import lives, pid_in

PATIENCE_S = 120.0
"""Deadline of every wait; a pass never needs it."""
ROOT = Path(__file__).parents[1]

# --- placement ----------------------------------------------------------------------------------


def config(**launcher: object) -> tuple[Config, RayLauncher]:
    data = {
        "model": {"path": "m"},
        "environment": {"type": "arithmetic"},
        "generator": {"count": 2},
        "launcher": {"type": "ray", **launcher},
    }
    found = build_config(data)
    assert isinstance(found.launcher, RayLauncher)
    return found, found.launcher


def test_a_bundle_for_the_learner_and_one_for_each_generator() -> None:
    asks = asks_of(
        *config(
            learner_resources={"cpus": 4, "gpus": 2},
            generator_resources={"gpus": 0.5, "custom": ["node:10.0.0.5=0.01", "fast=2"]},
        )
    )
    assert [ask.name for ask in asks] == ["learner", "generator-0", "generator-1"]
    assert asks[0].amounts == {"CPU": 4, "GPU": 2}
    assert asks[2].amounts == {"CPU": 1, "GPU": 0.5, "node:10.0.0.5": 0.01, "fast": 2}


def test_amounts_of_zero_are_left_out() -> None:
    assert amounts_of(RayResources(custom=("x=0",))) == {"CPU": 1}


@pytest.mark.parametrize("text", ["fast", "=1", "fast=", "fast=much", "a b=1", "fast=-1"])
def test_a_custom_resource_is_a_name_and_an_amount(text: str) -> None:
    with pytest.raises(ConfigError, match=r"launcher\.learner_resources\.custom"):
        config(learner_resources={"custom": [text]})


SMALL, BIG = {"CPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("strategy", "learner", "nodes", "fits"),
    [
        ("PACK", {}, [SMALL, SMALL, SMALL], True),
        ("PACK", {}, [SMALL, SMALL], False),
        ("PACK", {"cpus": 2}, [SMALL, SMALL, SMALL, SMALL], False),
        ("PACK", {"cpus": 2}, [BIG], True),
        ("PACK", {"gpus": 1}, [SMALL, SMALL, SMALL], False),
        ("PACK", {"gpus": 1}, [BIG], True),
        ("STRICT_PACK", {}, [SMALL, SMALL, SMALL], False),
        ("STRICT_PACK", {"cpus": 2}, [SMALL, BIG], True),
        ("STRICT_SPREAD", {}, [BIG, BIG], False),
        ("STRICT_SPREAD", {}, [BIG, SMALL, SMALL], True),
        ("SPREAD", {}, [BIG], True),
        ("PACK", {"custom": ["fast=1"]}, [BIG], False),
    ],
)
def test_what_can_never_fit_is_known(strategy: str, learner: dict, nodes: list[dict], fits: bool) -> None:
    cfg, launcher = config(strategy=strategy, learner_resources=learner)
    assert can_ever_fit(asks_of(cfg, launcher), nodes, launcher.strategy) is fits


def test_what_was_asked_and_what_is_there_in_words() -> None:
    asks = asks_of(*config(learner_resources={"cpus": 2}, generator_resources={"gpus": 1}))
    assert describe_asks(asks, "PACK") == (
        "a learner with 2 CPU and 2 generators with 1 CPU, 1 GPU each (strategy PACK)"
    )
    assert describe_asks(asks[:2], "SPREAD") == (
        "a learner with 2 CPU and a generator with 1 CPU, 1 GPU (strategy SPREAD)"
    )
    nodes = [{"CPU": 2.0, "memory": 9e9}, {"CPU": 2.0, "memory": 8e9}, {"CPU": 1.0, "GPU": 1.0}]
    assert describe_nodes(nodes, None, ["CPU", "GPU", "CPU"]) == "3 nodes (2 x 2 CPU, 0 GPU, 1 x 1 CPU, 1 GPU)"
    assert describe_nodes(nodes, {"CPU": 3.0}, ["CPU"]).endswith(", of which 3 CPU are free")


def test_the_learner_binds_loopback_on_one_machine_and_its_nodes_address_elsewhere() -> None:
    loopback = "127.0.0.1"
    assert host_for(loopback, loopback, "10.0.0.2", ["10.0.0.2", "10.0.0.2"]) == loopback
    assert host_for(loopback, loopback, "10.0.0.2", ["10.0.0.2", "10.0.0.3"]) == "10.0.0.2"
    assert host_for("10.1.0.2", loopback, "10.0.0.2", ["10.0.0.2", "10.0.0.3"]) == "10.1.0.2"


def test_the_cpus_of_a_bundle_are_the_threads_of_its_processes() -> None:
    assert threads(None, RayResources(cpus=8), 2) == 4
    assert threads(3, RayResources(cpus=8), 2) == 3
    assert threads(None, RayResources(cpus=0.5), 1) == 1


# --- without ray --------------------------------------------------------------------------------


def test_a_missing_ray_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n[environment]\ntype = "arithmetic"\n')
    for name in ("async_rl.launch.ray", "async_rl.launch.ray_child"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[ray\]'"):
        run_train(file, ["launcher.type=ray"])


# --- on a node ----------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[Runner]:
    found = Runner()
    yield found
    if found._keeper is not None:
        found.send(signal.SIGKILL)


def start(runner: Runner, code: str, **order: object) -> int:
    return runner.start(("-c", code), Order(**{"cwd": str(ROOT), "orphan_s": PATIENCE_S, **order}))  # type: ignore[arg-type]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def collected(runner: Runner) -> tuple[list[Line], int]:
    """All output until the end, and the exit code."""
    lines: list[Line] = []
    taken, deadline = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        news = runner.news(taken, 1.0)
        lines, taken = lines + news.lines, news.taken
        if news.code is not None:
            return lines, news.code
    raise AssertionError(f"no end after {PATIENCE_S} s: {lines}")


def test_output_and_exit_code_come_in_order(runner: Runner) -> None:
    code = """
import os, sys
print("one", flush=True)
print(os.environ["WORD"], file=sys.stderr, flush=True)
print("no end", end="", flush=True)
sys.exit(7)
"""
    start(runner, code, environ={"WORD": "two"})
    lines, exit_code = collected(runner)
    assert exit_code == 7
    assert [line.text for line in lines if not line.is_error] == [b"one", b"no end"]
    assert [line.text for line in lines if line.is_error] == [b"two"]


def test_lines_that_were_told_are_told_again_until_the_launcher_has_them(runner: Runner) -> None:
    start(runner, "print('a'); print('b')")
    until(lambda: len(runner.news(0, 1.0).lines) == 2)
    first = runner.news(0, 1.0)
    assert runner.news(0, 1.0).lines == first.lines == [Line(b"a", False), Line(b"b", False)]
    until(lambda: runner.news(first.taken, 1.0).code == 0)
    assert runner.news(first.taken, 1.0).lines == []


def test_a_launcher_that_takes_nothing_loses_old_lines_and_is_told(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_LINES", 3)
    start(runner, "for i in range(10): print(i)")
    until(lambda: runner._ended)
    lines, code = collected(runner)
    assert code == 0
    assert [line.text for line in lines] == [b"... 7 lines were dropped: the launcher took none", b"7", b"8", b"9"]


def test_a_signal_counts_as_a_shell_counts(runner: Runner) -> None:
    start(runner, "import time; print('up', flush=True); time.sleep(600)")
    assert runner.news(0, PATIENCE_S).lines == [Line(b"up", False)]
    runner.send(signal.SIGTERM)
    assert collected(runner)[1] == 128 + signal.SIGTERM


SAVES = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    print("saving", flush=True)
    (folder / "saved").write_text("yes")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "other.part").write_text(str(other.pid)); (folder / "other.part").rename(folder / "other.pid")
(folder / "me.part").write_text(str(os.getpid())); (folder / "me.part").rename(folder / "me.pid")
time.sleep(600)
"""
ACTOR = """
import sys, time
from async_rl.launch.runner import Runner
from async_rl.launch.keeper import Order
Runner().start(("-c", sys.argv[1], sys.argv[2]), Order(cwd=sys.argv[3], orphan_s=60.0))
time.sleep(600)
"""


def test_a_killed_actor_leaves_nothing_and_its_command_can_save(tmp_path: Path, spawn: Callable) -> None:
    """Its standard output is a broken pipe by then, which must not keep it from saving."""
    actor: subprocess.Popen[str] = spawn([sys.executable, "-c", ACTOR, SAVES, str(tmp_path), str(ROOT)])
    until(lambda: (tmp_path / "me.pid").exists() or actor.poll() is not None)
    pids = [pid_in(tmp_path / name) for name in ("me.pid", "other.pid")]
    assert all(map(lives, pids))
    os.kill(actor.pid, signal.SIGKILL)
    until(lambda: not any(map(lives, pids)))
    assert (tmp_path / "saved").exists()


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path: Path, runner: Runner) -> None:
    code = """
import os, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(other.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    start(runner, code, orphan_s=5.0)
    lines, exit_code = collected(runner)
    assert exit_code == 128 + signal.SIGKILL
    assert not lives(int(lines[0].text))


def test_a_folder_that_the_node_lacks_is_named(runner: Runner) -> None:
    with pytest.raises(InputError, match=r"has no folder /no/such/folder, in which the run was started"):
        start(runner, "pass", cwd="/no/such/folder")


def test_the_environment_of_all_processes_is_a_json_file(tmp_path: Path) -> None:
    ray = pytest.importorskip("async_rl.launch.ray")
    file = tmp_path / "env.json"
    file.write_text(json.dumps({"env_vars": {"A": "1"}}))
    assert ray.read_runtime_env(str(file)) == {"env_vars": {"A": "1"}}
    assert ray.read_runtime_env(None) == {}
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"holds a list, not an object"):
        ray.read_runtime_env(str(file))
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        ray.read_runtime_env(str(tmp_path / "none.json"))
