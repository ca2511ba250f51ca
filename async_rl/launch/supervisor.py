"""The rules of a supervised run, wherever its processes are: restarts, back-off, exit codes, signals, an orderly end.

A generator that dies is started again, up to generator.max_restarts times; the end of the learner is the end of the
run. How a process is started, asked and ended is a `Child`'s own: `local.py` for this machine, `ray.py` for a cluster.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

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
class Child(ABC):
    """One process to supervise."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    log: Path | None = None
    """None: the process writes to the supervisor's own terminal."""
    restarts: int = field(default=0, kw_only=True)
    restart_at: float | None = field(default=None, kw_only=True)
    """When it is started again (monotonic seconds); None: not waiting for that."""
    started: bool = field(default=False, kw_only=True)
    """Between `start` and `clean_up`."""
    lost: str | None = field(default=None, kw_only=True)
    """How it ended, where that was not by an exit code of its own."""

    @abstractmethod
    def start(self) -> None:
        """Start the process; returns at once."""

    @abstractmethod
    def poll(self) -> int | None:
        """Its exit code as a shell counts (128 + N if signal N ended it), None while it runs; returns at once."""

    @abstractmethod
    def terminate(self) -> None:
        """SIGTERM to the process."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to the process and all that it started, and a wait, at most guard.KILL_S."""

    @abstractmethod
    def clean_up(self) -> None:
        """End what an ended process left behind."""

    @property
    def running(self) -> bool:
        return self.started and self.poll() is None

    def end(self, code: int) -> str:
        """How it ended, for people."""
        return self.lost or f"ended with exit code {code}"

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
    _shown: bool = field(default=False, init=False)

    def run(self) -> int:
        """Supervise until the run ends; returns the exit code of what ended it.

        That is 128 + N for signal N, but 0 for a SIGTERM after which the learner ended well: what it did is saved.
        """
        with caught_signals() as signals:
            return self.supervise(signals)

    def supervise(self, signals: list[int]) -> int:
        """`run`, for a caller that catches the signals itself."""
        self._signals = signals
        try:
            for child in (self.learner, *self.generators):
                child.start()
            code = self._watch()
        finally:
            saved = self._stop_all() == 0
        return 0 if code == 128 + signal.SIGTERM and self._signals and saved else code

    def _watch(self) -> int:
        while not self._signals:
            if not self.learner.running:
                return self._learner_ended()
            for child in self.generators:
                code = self._tend(child)
                if code is not None:
                    return code
            time.sleep(_POLL_S)
        say(f"{signal.Signals(self._signals[0]).name}: stopping; once more kills at once")
        return 128 + self._signals[0]

    def _learner_ended(self) -> int:
        code = _exit_code(self.learner)
        if code:
            lost = "the same command goes on from the last checkpoint"
            say(f"the learner {self.learner.end(code)}; {lost if self.learner.lost else 'its error stands above'}")
            return code
        self._wait_for(self.generators, self.deadlines.leave_s)
        return 0

    def _tend(self, child: Child) -> int | None:
        """Restart a generator that died; returns an exit code if the run cannot go on for it."""
        if child.restart_at is not None:
            if time.monotonic() >= child.restart_at:
                child.restart_at = None
                child.start()
            return None
        if not child.started or child.running:
            return None
        code = _exit_code(child)
        child.clean_up()
        if code in LEFT:
            say(f"{child.name} left the run")
            return None
        self._show_error(child, code)
        if code != SETTINGS_ERROR and child.restarts < self.max_restarts:
            wait_s = min(self.deadlines.first_restart_s * 2**child.restarts, self.deadlines.longest_restart_s)
            child.restarts += 1
            child.restart_at = time.monotonic() + wait_s
            say(f"{child.name}: restart {child.restarts} of {self.max_restarts} in {wait_s:g} s")
            return None
        if any(other.running or other.restart_at is not None for other in self.generators):
            say(f"{child.name} is not started again; the run goes on with the other generators")
            return None
        say(f"no generator is left (generator.max_restarts={self.max_restarts}); stopping the run")
        return code

    def _show_error(self, child: Child, code: int) -> None:
        """The first error in full, later ones by the name of their log."""
        say(f"{child.name} {child.end(code)}; log: {child.log}")
        if not self._shown:
            print(child.last_lines(), file=sys.stderr, flush=True)
        self._shown = True

    def _stop_all(self) -> int | None:
        """SIGTERM to each process, SIGKILL after the deadline or at a second signal; nothing of them is left then.

        Returns how the learner ended; None when it had ended before, or was killed.
        """
        children = [child for child in (self.learner, *self.generators) if child.started]
        for child in children:
            if child.running:
                child.terminate()
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
                say(f"{child.name} did not stop within {limit:g} s after SIGTERM; killing it")
                child.kill()
            child.clean_up()
        return code

    def _wait_for(self, children: Sequence[Child], timeout_s: float) -> None:
        """Until all have ended, the time is over, or a (further) signal comes."""
        deadline, signals = time.monotonic() + timeout_s, len(self._signals)
        while (
            any(child.running for child in children) and time.monotonic() < deadline and len(self._signals) == signals
        ):
            time.sleep(_POLL_S)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP are noted in the list instead of ending the process."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(child: Child) -> int:
    code = child.poll()
    assert code is not None, f"{child.name} runs"
    return code


def shell_code(code: int) -> int:
    """An exit code as a shell counts, out of one of `subprocess`, where -N is signal N."""
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    """One line on the supervisor's terminal."""
    print(f"async-rl train: {text}", file=sys.stderr, flush=True)
