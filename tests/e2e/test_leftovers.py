"""However a run ends, nothing of it is left: no process, listening port, shared memory or temporary file."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.conftest import Run
from tests.e2e.traces import Traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def learner_of(supervisor: int) -> int:
    """Pid of the learner that a supervisor started."""
    (found,) = (c.pid for c in psutil.Process(supervisor).children() if "learner" in c.cmdline())
    return found


def kill_learner(supervisor: int) -> None:
    os.kill(learner_of(supervisor), signal.SIGKILL)


def with_signal(number: int) -> Callable[[int], None]:
    return lambda supervisor: os.kill(supervisor, number)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(with_signal(signal.SIGINT), 130, id="ctrl-c"),
        pytest.param(with_signal(signal.SIGTERM), 0, id="sigterm"),
        pytest.param(with_signal(signal.SIGKILL), -signal.SIGKILL, id="launcher-killed"),
        pytest.param(kill_learner, 128 + signal.SIGKILL, id="learner-killed"),
    ],
)
def test_nothing_is_left_of_a_run_that_was_ended(run: Run, end: Callable[[int], None], code: int) -> None:
    traces = Traces(run)
    train = run.start("train", str(run.config), "run.steps=100000", "evaluation.every=0")
    run.until(lambda: len(run.metrics()) >= 1)
    traces.look()
    assert len(traces.pids) >= 5, "supervisor, guard, learner, coordinator, generator"
    assert len(traces.ports) >= 2, "messages and status"
    end(train.pid)
    run.wait(train, code)
    traces.assert_nothing_left()


def test_nothing_is_left_of_a_run_that_is_done(run: Run) -> None:
    traces = Traces(run)
    train = run.start("train", str(run.config), "run.steps=2", "evaluation.every=0")
    run.until(lambda: traces.look() or train.poll() is not None)
    run.wait(train)
    assert traces.ports
    traces.assert_nothing_left()


def test_nothing_is_left_of_a_run_that_cannot_begin(run: Run) -> None:
    """Settings that are refused, and a port that another program has."""
    traces = Traces(run)
    run.wait(run.start("train", str(run.config), "learner.lr=-1"), code=2)
    traces.assert_nothing_left()
    assert not (run.folder / "run").exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run.wait(run.start("train", str(run.config), f"transport.port={taken.getsockname()[1]}"), code=1)
    traces.assert_nothing_left()
