"""Learner and generators as child processes of one supervisor on this machine: `async-rl train`.

They are the same two commands that a user starts by hand. The learner owns the terminal; each generator writes to
<run.dir>/logs/generator-N.log. A generator that dies is started again, up to generator.max_restarts times; the end of
the learner is the end of the run. Whatever happens, no process outlives the supervisor (`guard.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from async_rl import leftovers
from async_rl.addresses import free_port, join_address
from async_rl.config import Config, load_config
from async_rl.config.threads import VARIABLE, generator_threads, learner_threads
from async_rl.launch import guard
from async_rl.logs import last_lines

SETTINGS_ERROR = 2
"""Exit code of a process that refused its settings: starting it again cannot help."""
LEFT = (0, 130)
"""Exit codes of a generator that was told to leave, by its learner or by a person."""
LOG_LINES = 20
_POLL_S = 0.05


@dataclass(frozen=True)
class Deadlines:
    """Seconds of every wait of the supervisor."""

    stop_s: float = 30.0
    """After SIGTERM, before SIGKILL."""
    save_s: float = 600.0
    """The same for the learner, which ends its step and saves it first; a second signal kills it at once."""
    leave_s: float = 15.0
    """For generators to end by themselves once the learner has ended well."""
    first_restart_s: float = 1.0
    """Before the first restart of a generator; doubled for each further one."""
    longest_restart_s: float = 30.0
    orphan_s: float = 5.0
    """For what a dead process, or a dead supervisor, left behind: after SIGTERM, before SIGKILL."""


@dataclass
class Child:
    """One process to supervise, with its own session so that a signal reaches all that it started."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    log: Path | None = None
    """None: the process writes to the supervisor's own terminal."""
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    restart_at: float | None = None
    """When it is started again (monotonic seconds); None: not waiting for that."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> int:
        """Start the process; returns its pid, which is also its process group."""
        self.restart_at = None
        with self._output() as output:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.environ),
                start_new_session=True,
            )
        return self.process.pid

    @contextlib.contextmanager
    def _output(self) -> Iterator[IO[bytes] | None]:
        if self.log is None:
            yield None
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            yield file

    def last_lines(self) -> str:
        """The end of its log, for people."""
        lines = [] if self.log is None else last_lines(self.log, LOG_LINES)
        return "\n".join(f"  {self.name} | {line}" for line in lines)


@dataclass
class Supervisor:
    """Starts the children, restarts generators, and stops everything when the learner ends or a signal comes."""

    learner: Child
    generators: Sequence[Child]
    max_restarts: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    _signals: list[int] = field(default_factory=list, init=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _shown: bool = field(default=False, init=False)

    def run(self) -> int:
        """Supervise until the run ends; returns the exit code of what ended it.

        That is 128 + N for signal N, but 0 for a SIGTERM after which the learner ended well: what it did is saved.
        """
        with self._catch_signals(), self._guarded():
            try:
                for child in (self.learner, *self.generators):
                    self._start(child)
                code = self._supervise()
            finally:
                saved = self._stop_all() == 0
        return 0 if code == 128 + signal.SIGTERM and self._signals and saved else code

    def _supervise(self) -> int:
        while not self._signals:
            if not self.learner.running:
                return self._learner_ended()
            for child in self.generators:
                code = self._tend(child)
                if code is not None:
                    return code
            time.sleep(_POLL_S)
        _say(f"{signal.Signals(self._signals[0]).name}: stopping; once more kills at once")
        return 128 + self._signals[0]

    def _learner_ended(self) -> int:
        code = _exit_code(self.learner)
        if code:
            _say(f"the learner ended with exit code {code}; its error stands above")
            return code
        self._wait_for(self.generators, self.deadlines.leave_s)
        return 0

    def _tend(self, child: Child) -> int | None:
        """Restart a generator that died; returns an exit code if the run cannot go on for it."""
        if child.restart_at is not None:
            if time.monotonic() >= child.restart_at:
                self._start(child)
            return None
        if child.running or child.process is None:
            return None
        code = _exit_code(child)
        self._ended(child)
        if code in LEFT:
            _say(f"{child.name} left the run")
            return None
        self._show_error(child, code)
        if code != SETTINGS_ERROR and child.restarts < self.max_restarts:
            wait_s = min(self.deadlines.first_restart_s * 2**child.restarts, self.deadlines.longest_restart_s)
            child.restarts += 1
            child.restart_at = time.monotonic() + wait_s
            _say(f"{child.name}: restart {child.restarts} of {self.max_restarts} in {wait_s:g} s")
            return None
        if any(other.running or other.restart_at is not None for other in self.generators):
            _say(f"{child.name} is not started again; the run goes on with the other generators")
            return None
        _say(f"no generator is left (generator.max_restarts={self.max_restarts}); stopping the run")
        return code

    def _show_error(self, child: Child, code: int) -> None:
        """The first error in full, later ones by the name of their log."""
        _say(f"{child.name} ended with exit code {code}; log: {child.log}")
        if not self._shown:
            print(child.last_lines(), file=sys.stderr, flush=True)
        self._shown = True

    # --- processes ------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        group = child.start()
        self._tell_guard(group)

    def _ended(self, child: Child) -> None:
        """Clean up after a process that ended: what it left in its group is ended too."""
        assert child.process is not None
        group, child.process = child.process.pid, None
        guard.end_groups([group], self.deadlines.orphan_s)
        self._tell_guard(-group)

    def _stop_all(self) -> int | None:
        """SIGTERM to each process, SIGKILL after the deadline or at a second signal; their groups are empty then.

        Returns how the learner ended; None when it had ended before, or was killed.
        """
        children = [child for child in (self.learner, *self.generators) if child.process is not None]
        for child in children:
            assert child.process is not None
            if child.running:
                child.process.send_signal(signal.SIGTERM)
        started, signals = time.monotonic(), len(self._signals)
        self._wait_for(children, self.deadlines.stop_s)
        code = None
        for child in reversed(children):  # The learner is the first, and may take longest.
            limit = self.deadlines.stop_s
            if child is self.learner:
                if len(self._signals) == signals:
                    limit = max(limit, self.deadlines.save_s)
                    self._wait_for([child], limit - (time.monotonic() - started))
                code = None if child.running else _exit_code(child)
            if child.running:
                _say(f"{child.name} did not stop within {limit:g} s after SIGTERM; killing it")
            self._ended_or_killed(child)
        return code

    def _ended_or_killed(self, child: Child) -> None:
        process = child.process
        assert process is not None
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(guard.KILL_S)
        self._ended(child)

    def _wait_for(self, children: Sequence[Child], timeout_s: float) -> None:
        """Until all have ended, the time is over, or a (further) signal comes."""
        deadline, signals = time.monotonic() + timeout_s, len(self._signals)
        while (
            any(child.running for child in children) and time.monotonic() < deadline and len(self._signals) == signals
        ):
            time.sleep(_POLL_S)

    # --- the supervisor's own end ---------------------------------------------------------------

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        argv = [sys.executable, "-I", guard.__file__, str(self.deadlines.orphan_s), leftovers.__file__]
        self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield
        finally:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(self.deadlines.orphan_s + 2 * guard.KILL_S)

    def _tell_guard(self, group: int) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{group}\n".encode())
            self._guard.stdin.flush()


def _exit_code(child: Child) -> int:
    """As a shell counts: the process's own code, or 128 + N if signal N ended it."""
    assert child.process is not None and child.process.returncode is not None
    code = child.process.returncode
    return code if code >= 0 else 128 - code


def _say(text: str) -> None:
    print(f"async-rl train: {text}", file=sys.stderr, flush=True)


# --- from settings to processes -----------------------------------------------------------------


def run_train(config_path: Path | str, overrides: Sequence[str] = ()) -> int:
    """Run learner and generators of a config on this machine; returns the exit code. Raises ConfigError."""
    config = load_config(config_path, overrides)
    if config.transport.port == 0:
        overrides = [*overrides, f"transport.port={free_port(config.transport.host)}"]
        config = load_config(config_path, overrides)
    learner, generators = children_of(config, [str(config_path), *overrides])
    return Supervisor(learner, generators, config.generator.max_restarts).run()


def children_of(config: Config, arguments: Sequence[str]) -> tuple[Child, list[Child]]:
    """The processes of a run; `arguments` are the config file and overrides that each is given."""
    command = [sys.executable, "-m", "async_rl.cli"]
    logs = Path(config.run.dir) / "logs"
    address = join_address(config.transport.host, config.transport.port)
    learner = Child("learner", [*command, "learner", *arguments], _environment(learner_threads(config)))
    generators = [
        Child(
            name=f"generator-{index}",
            argv=[*command, "generator", *arguments, "--learner", address, "--name", f"generator-{index}"],
            environ=_environment(generator_threads(config)),
            log=logs / f"generator-{index}.log",
        )
        for index in range(config.generator.count)
    ]
    return learner, generators


def _environment(threads: int) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **os.environ, VARIABLE: str(threads)}
