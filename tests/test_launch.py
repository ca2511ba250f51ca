"""The supervisor with small fake processes: restarts, errors, exit codes, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.config import build_config
from async_rl.config.threads import generator_threads, learner_threads, sleep_at_barriers
from async_rl.launch.local import LocalSupervisor, Process, children_of
from async_rl.launch.supervisor import Deadlines, Supervisor
from tests.conftest import Spawn

PATIENCE_S = 120.0
"""Deadline of every wait; a pass never needs it."""
FAST = Deadlines(stop_s=PATIENCE_S, leave_s=PATIENCE_S, first_restart_s=0.01, longest_restart_s=0.02)
FAST_LEAVE = Deadlines(stop_s=PATIENCE_S, leave_s=0.05, first_restart_s=0.01, longest_restart_s=0.02)

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
def note(name): (folder / name).write_text(str(os.getpid()))
def count(name):
    file = folder / name
    number = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(number))
    return number
def wait_for(name):
    while not (folder / name).exists(): time.sleep(0.01)
def sleep_long(): time.sleep(120)
"""


def child(folder: Path, name: str, code: str) -> Process:
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    log = None if name == "learner" else folder / "logs" / f"{name}.log"
    return Process(name, argv, {**os.environ, "FOLDER": str(folder)}, log)


def supervisor(
    folder: Path, learner: str, *generators: str, restarts: int = 3, deadlines: Deadlines = FAST
) -> Supervisor:
    children = [child(folder, f"generator-{i}", code) for i, code in enumerate(generators)]
    return LocalSupervisor(child(folder, "learner", learner), children, restarts, deadlines)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.01)


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text() != "", file.name)
    return int(file.read_text())


def lives(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    for file in tmp_path.glob("*.pid"):
        wait_until(lambda file=file: not lives(int(file.read_text())), f"{file.name} to be gone")


pytestmark = pytest.mark.usefixtures("no_leftovers")


def test_the_learners_end_is_the_end_and_generators_leave_by_themselves(tmp_path: Path) -> None:
    generator = "note('g.pid'); wait_for('over'); note('left')"
    assert supervisor(tmp_path, "note('l.pid'); wait_for('g.pid'); note('over')", generator).run() == 0
    assert (tmp_path / "left").exists(), "a generator that ends by itself must not be killed"


def test_the_learners_exit_code_is_the_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = supervisor(
        tmp_path, "print('out of data', file=sys.stderr); sys.exit(7)", "note('g.pid'); sleep_long()"
    ).run()
    assert code == 7
    assert "out of data" in capfd.readouterr().err, "the learner writes to the supervisor's own terminal"


def test_a_killed_learner_counts_as_a_shell_counts(tmp_path: Path) -> None:
    assert supervisor(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)").run() == 128 + 9


def test_a_dead_generator_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generator = """
        print("start", count("starts"), flush=True)
        if count("tries") < 3: sys.exit("engine died")
        note("third"); sleep_long()
    """
    assert supervisor(tmp_path, "wait_for('third')", generator, deadlines=FAST_LEAVE).run() == 0
    assert (tmp_path / "starts").read_text() == "3"
    log = (tmp_path / "logs" / "generator-0.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("start")] == ["start 1", "start 2", "start 3"]
    errors = capfd.readouterr().err
    assert "restart 1 of 3" in errors and "restart 2 of 3" in errors
    assert errors.count("generator-0 | engine died") == 1, "the first error is shown in full, later ones by their log"


def test_the_run_ends_with_the_code_of_the_last_generator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generator = "count('starts'); print('ValueError: no such model', flush=True); sys.exit(3)"
    assert supervisor(tmp_path, "note('l.pid'); sleep_long()", generator, restarts=2).run() == 3
    assert (tmp_path / "starts").read_text() == "3"
    errors = capfd.readouterr().err
    assert "generator-0 | ValueError: no such model" in errors
    assert "no generator is left (generator.max_restarts=2)" in errors


def test_a_refused_setting_is_not_tried_again(tmp_path: Path) -> None:
    code = supervisor(tmp_path, "note('l.pid'); sleep_long()", "count('starts'); sys.exit(2)", restarts=5).run()
    assert (code, (tmp_path / "starts").read_text()) == (2, "1")


@pytest.mark.parametrize("code", [0, 130])
def test_a_generator_that_left_is_not_called_back(tmp_path: Path, code: int) -> None:
    generator = f"count('starts'); note('left'); sys.exit({code})"
    assert supervisor(tmp_path, "wait_for('left'); time.sleep(0.3)", generator).run() == 0
    assert (tmp_path / "starts").read_text() == "1"


def test_the_run_goes_on_with_the_other_generators(tmp_path: Path) -> None:
    survivor = "wait_for('dead'); note('working'); wait_for('over')"
    learner = "wait_for('working'); time.sleep(0.2); note('over')"
    assert supervisor(tmp_path, learner, "note('dead'); sys.exit(1)", survivor, restarts=0).run() == 0


def test_what_a_generator_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    generator = """
        engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        (folder / "engine.pid").write_text(str(engine.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert supervisor(tmp_path, "note('l.pid'); sleep_long()", generator, restarts=0).run() == 128 + 9
    assert not lives(pid_in(tmp_path / "engine.pid"))


SUPERVISE = """
import sys
from pathlib import Path
from tests.test_launch import FAST, Deadlines, supervisor
learner, generator, stop_s = sys.argv[2], sys.argv[3], float(sys.argv[4])
sys.exit(supervisor(Path(sys.argv[1]), learner, generator, deadlines=Deadlines(stop_s=stop_s, orphan_s=0.5)).run())
"""
PATIENT = "signal.signal(signal.SIGTERM, lambda *a: (note('{0}.clean'), sys.exit(0))); note('{0}.pid'); sleep_long()"
STUBBORN = "signal.signal(signal.SIGTERM, lambda *a: note('{0}.asked')); note('{0}.pid')\nwhile True: time.sleep(1)"


def started(spawn: Spawn, folder: Path, learner: str, generator: str, stop_s: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", SUPERVISE, str(folder), learner.format("l"), generator.format("g"), str(stop_s)]
    process = spawn(argv)
    for name in ("l.pid", "g.pid"):
        pid_in(folder / name)
    return process


@pytest.mark.parametrize(
    ("number", "learner", "code"),
    [(signal.SIGINT, 0, 130), (signal.SIGTERM, 0, 0), (signal.SIGTERM, 130, 143)],
    ids=["ctrl_c", "saved", "not_saved"],
)
def test_a_signal_stops_all_cleanly(spawn: Spawn, tmp_path: Path, number: int, learner: int, code: int) -> None:
    """SIGTERM is a success when the learner says that everything is saved."""
    process = started(spawn, tmp_path, PATIENT.replace("exit(0)", f"exit({learner})"), PATIENT, PATIENCE_S)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    assert (tmp_path / "l.clean").exists() and (tmp_path / "g.clean").exists()


def test_what_does_not_stop_is_killed_after_the_deadline(spawn: Spawn, tmp_path: Path) -> None:
    process = started(spawn, tmp_path, PATIENT, STUBBORN, 0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "generator-0 did not stop within 0.2 s after SIGTERM; killing it" in errors
    assert (tmp_path / "g.asked").exists()


def test_a_second_signal_kills_at_once(spawn: Spawn, tmp_path: Path) -> None:
    process = started(spawn, tmp_path, STUBBORN, STUBBORN, 10 * PATIENCE_S)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "g.asked").exists() and (tmp_path / "l.asked").exists(), "SIGTERM to arrive")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


def test_nothing_outlives_a_killed_supervisor(spawn: Spawn, tmp_path: Path) -> None:
    process = started(spawn, tmp_path, PATIENT, STUBBORN, PATIENCE_S)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    for name in ("l.pid", "g.pid"):
        wait_until(lambda name=name: not lives(pid_in(tmp_path / name)), f"{name} to be gone")
    assert (tmp_path / "l.clean").exists(), "it was asked first"


def test_what_a_killed_generator_left_in_the_temporary_folder_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    generator = """
    from async_rl.leftovers import OwnedFolder
    owned = OwnedFolder()
    (folder / "path").write_text(str(owned.path))
    note("owned")
    os.killpg(0, signal.SIGKILL)
    """
    learner = "wait_for('owned')"
    assert supervisor(tmp_path, learner, generator, restarts=0, deadlines=FAST_LEAVE).run() in (0, 128 + signal.SIGKILL)
    owned = Path((tmp_path / "path").read_text())
    assert owned.parent == tmp_path and not owned.exists()


def config(**sections: dict) -> object:
    base = {"model": {"path": "m"}, "environment": {"type": "arithmetic"}}
    return build_config(base | sections)


def test_the_commands_are_those_of_a_user(tmp_path: Path) -> None:
    cfg = config(run={"dir": str(tmp_path)}, generator={"count": 2}, transport={"port": 4242})
    learner, generators = children_of(cfg, ["c.toml", "run.steps=3"])
    assert list(learner.argv)[1:] == ["-m", "async_rl.cli", "learner", "c.toml", "run.steps=3"]
    assert list(generators[1].argv)[3:] == [
        "generator", "c.toml", "run.steps=3", "--learner", "127.0.0.1:4242", "--name", "generator-1",
    ]  # fmt: skip
    assert (learner.log, generators[1].log) == (None, tmp_path / "logs" / "generator-1.log")


def test_cores_are_shared_evenly_unless_said_otherwise() -> None:
    cfg = config(generator={"count": 3})
    assert [learner_threads(cfg, cores, {}) for cores in (1, 2, 8, 9)] == [1, 1, 2, 2]
    assert generator_threads(cfg, 8, {}) == 2
    assert generator_threads(cfg, 8, {"OMP_NUM_THREADS": "5"}) == 5
    assert generator_threads(cfg, 8, {"OMP_NUM_THREADS": "many"}) == 2
    fixed = config(generator={"threads": 3}, learner={"threads": 6})
    assert (learner_threads(fixed, 8, {"OMP_NUM_THREADS": "5"}), generator_threads(fixed, 8, {})) == (6, 3)


def test_threads_sleep_at_barriers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = {"OMP_WAIT_POLICY": "active"}
    sleep_at_barriers(own)
    assert own == {"OMP_WAIT_POLICY": "active"}
    # Every command that computes sets it before torch is loaded; children inherit it.
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = """
import os, sys
from async_rl import cli
cli._load("c.toml", [], "x")
print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""
    (tmp_path / "c.toml").write_text('[model]\npath = "m"\n[environment]\ntype = "arithmetic"\n')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.split() == ["passive", "False"], done.stderr


def test_a_child_gets_its_share_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    learner, (generator,) = children_of(config(learner={"threads": 2}, generator={"threads": 5}), ["c.toml"])
    assert (learner.environ["OMP_NUM_THREADS"], generator.environ["OMP_NUM_THREADS"]) == ("2", "5")
