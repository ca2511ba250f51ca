"""Learner and coordinator are two processes: what a user sees when either is killed or cannot begin."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess

import psutil
import pytest

from async_rl.addresses import split_address
from tests.e2e.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def coordinator_of(learner: subprocess.Popen[str]) -> psutil.Process:
    """The learner's coordinator process."""
    found = [
        child for child in psutil.Process(learner.pid).children() if "async_rl.coordinator" in str(child.cmdline())
    ]
    assert len(found) == 1, found
    return found[0]


def test_a_killed_coordinator_ends_the_run_with_its_name(run: Run) -> None:
    generator = run.generator("g0", "run.steps=100000")
    learner = run.learner("run.steps=100000")
    run.until(lambda: len(run.metrics()) >= 2)
    coordinator_of(learner).kill()
    run.wait(learner, code=1)
    log = run.folder / "run" / "logs" / "coordinator.log"
    says = (
        rf"error: CoordinatorEnded: .*its process \d+ was killed by SIGKILL; the last lines of {re.escape(str(log))}: "
    )
    assert re.search(says + r".*coordinator of run \w+, process \d+", run.output()), run.output()
    assert generator.poll() is None, "a generator waits for the next learner"


def test_a_killed_learner_leaves_neither_coordinator_nor_port(run: Run) -> None:
    learner = run.learner()
    run.until((run.folder / "run" / "address").exists)
    coordinator = coordinator_of(learner)
    learner.send_signal(signal.SIGKILL)
    coordinator.wait(240)
    host, port = split_address(json.loads((run.folder / "run" / "address").read_text())["learner"])
    with socket.socket() as next_learner:
        next_learner.bind((host, port))


def test_a_port_in_use_ends_the_learner_with_one_line(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        learner = run.learner(f"transport.port={port}")
        run.wait(learner, code=1)
    assert f"error: TransportError: port {port} on 127.0.0.1 is in use; stop what listens there, or set" in run.output()
    assert "Traceback" not in run.output()


def test_a_bad_row_ends_the_learner_with_one_line(run: Run) -> None:
    (run.folder / "problems.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": 7, "answer": "2"}\n')
    run.wait(run.learner(), code=2)
    _, *lines = run.output().splitlines()
    assert len(lines) == 1 and re.match(r"error: .*problems\.jsonl.*prompt", lines[0]), run.output()
