"""Learner and generators as child processes of one supervisor on this machine.

They are the same two commands that a user starts by hand. The learner owns the terminal; each generator writes to
<run.dir>/logs/generator-N.log. Whatever happens, no process outlives the supervisor (`guard.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from async_rl import leftovers
from async_rl.addresses import free_port
from async_rl.config import Config, load_config
from async_rl.config.threads import VARIABLE, generator_threads, learner_threads
from async_rl.launch import guard
from async_rl.launch.commands import commands_of
from async_rl.launch.supervisor import Child, Supervisor, shell_code


@dataclass
class Process(Child):
    """A child of this process, with its own session so that a signal reaches all that it started."""

    tell_guard: Callable[[int], None] | None = None
    """Takes the process group when it starts, and its negative when it has ended."""
    orphan_s: float = 5.0
    """Patience with what it leaves behind, between SIGTERM and SIGKILL."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        with self._output() as output:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.environ),
                start_new_session=True,
            )
        self.started = True
        self._tell(self._process.pid)

    def poll(self) -> int | None:
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else shell_code(code)

    def terminate(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(guard.KILL_S)

    def clean_up(self) -> None:
        assert self._process is not None
        self.started = False
        guard.end_groups([self._process.pid], self.orphan_s)
        self._tell(-self._process.pid)

    def _tell(self, group: int) -> None:
        if self.tell_guard is not None:
            self.tell_guard(group)

    @contextlib.contextmanager
    def _output(self) -> Iterator[IO[bytes] | None]:
        if self.log is None:
            yield None
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            yield file


@dataclass
class LocalSupervisor(Supervisor):
    """A supervisor whose processes are ended by a guard if it vanishes."""

    def supervise(self, signals: list[int]) -> int:
        with guarded(self.deadlines.orphan_s) as tell:
            for child in (self.learner, *self.generators):
                assert isinstance(child, Process)
                child.tell_guard, child.orphan_s = tell, self.deadlines.orphan_s
            return super().supervise(signals)


@contextlib.contextmanager
def guarded(orphan_s: float) -> Iterator[Callable[[int], None]]:
    """A guard process for as long as this block; yields what tells it of process groups."""
    argv = [sys.executable, "-I", guard.__file__, str(orphan_s), leftovers.__file__]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    pipe = process.stdin

    def tell(group: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{group}\n".encode())
            pipe.flush()

    try:
        yield tell
    finally:
        pipe.close()
        process.wait(orphan_s + 2 * guard.KILL_S)


# --- from settings to processes -----------------------------------------------------------------


def run_local(config_path: Path | str, overrides: Sequence[str] = ()) -> int:
    """Run learner and generators of a config on this machine; returns the exit code. Raises ConfigError."""
    config = load_config(config_path, overrides)
    if config.transport.port == 0:
        overrides = [*overrides, f"transport.port={free_port(config.transport.host)}"]
        config = load_config(config_path, overrides)
    learner, generators = children_of(config, [str(config_path), *overrides])
    return LocalSupervisor(learner, generators, config.generator.max_restarts).run()


def children_of(config: Config, arguments: Sequence[str]) -> tuple[Process, list[Process]]:
    """The processes of a run; `arguments` are the config file and overrides that each is given."""
    learner, generators = commands_of(config, arguments)
    environ = _environment(generator_threads(config))
    return (
        Process(learner.name, [sys.executable, *learner.words], _environment(learner_threads(config))),
        [Process(name, [sys.executable, *words], environ, log) for name, words, log in generators],
    )


def _environment(threads: int) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **os.environ, VARIABLE: str(threads)}
