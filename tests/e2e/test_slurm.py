"""configs/deploy/slurm.sbatch as Slurm would run it: stubs stand for its commands, tasks are processes here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from async_rl.addresses import free_port
from tests.e2e.conftest import Run
from tests.test_deploy import SLURM, executable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
"$@" &
task=$!
touch "$STUBS/task-$task"
wait $task; code=$?
rm "$STUBS/task-$task"
exit $code
"""
SCANCEL = """#!/bin/sh
[ "$*" = "--signal=TERM 17" ] || exit 1
for file in "$STUBS"/task-*; do kill -TERM "${file##*-}"; done
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show hostnames") printf 'localhost\\nlocalhost\\n' ;;
    "requeue 17") touch "$STUBS/requeued" ;;
    *) exit 1 ;;
esac
"""
ASYNC_RL = """#!/bin/sh
[ "$1" = generator ] && [ ! -e "$STUBS/failed" ] && touch "$STUBS/failed" && exit 1
exec PYTHON -m async_rl.cli "$@"
"""


class Slurm:
    """Submits the script; its learner and its generator both have this node, and a generator fails once."""

    def __init__(self, run: Run, command: str = ASYNC_RL) -> None:
        self.run, self.stubs = run, run.folder / "stubs"
        self.stubs.mkdir()
        stubs = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
        for name, text in {**stubs, "async-rl": command.replace("PYTHON", sys.executable)}.items():
            executable(self.stubs / name, text)

    def submit(self, *overrides: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{self.stubs}:{os.environ['PATH']}", "STUBS": str(self.stubs), "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "two", "ASYNC_RL_PORT": str(free_port()), "ASYNC_RL_HTTP_PORT": "0",
            "ASYNC_RL_WEIGHTS_PORT": "0", "ASYNC_RL_PAUSE_S": "0", "ASYNC_RL_KEYS": str(self.run.folder / "keys"),
        }  # fmt: skip
        log = (self.run.folder / f"process-{len(self.run.processes)}.log").open("w")
        argv = ["bash", str(SLURM), str(self.run.config), *overrides]
        process = self.run.spawn(argv, stdout=log, stderr=log, env=environment)
        self.run.processes.append(process)
        return process


def test_the_slurm_script_saves_is_queued_again_and_runs_to_its_end(run: Run) -> None:
    slurm = Slurm(run)
    patient = ("transport.heartbeat_timeout_s=60", "evaluation.every=0", "run.stall_timeout_s=300")
    job = slurm.submit("run.steps=100000", *patient)
    run.until(lambda: max((row["step"] for row in run.metrics()), default=0) >= 2, timeout_s=240)
    job.send_signal(signal.SIGTERM)
    run.wait(job, code=0)
    assert (slurm.stubs / "requeued").exists(), run.output()
    assert "generator-1 on localhost ended with exit code 1; started again in 0 s (1 of 20)" in run.output()
    assert not list(slurm.stubs.glob("task-*")), "everything has ended"
    last = max(row["step"] for row in run.metrics())
    (slurm.stubs / "requeued").unlink()
    again = slurm.submit(f"run.steps={last + 2}", *patient)
    run.wait(again, code=0)
    assert f"{last} steps are done" in run.output(), "it went on from the checkpoint"
    assert max(row["step"] for row in run.metrics()) == last + 2
    assert not (slurm.stubs / "requeued").exists(), "a run that is complete is not queued again"


FAILING = """#!/bin/sh
case $1 in
    keys) exit 0 ;;
    learner) while [ ! -e "$STUBS/generating" ]; do sleep 0.1; done; exit 3 ;;
    generator) trap 'touch "$STUBS/left"; exit 130' TERM; touch "$STUBS/generating"; while :; do sleep 0.1; done ;;
esac
"""


def test_the_slurm_script_ends_with_a_learner_that_failed(run: Run) -> None:
    slurm = Slurm(run, FAILING)
    run.wait(slurm.submit(), code=3)
    assert (slurm.stubs / "left").exists(), "generators would wait for a learner that does not come"
    assert not (slurm.stubs / "requeued").exists()
