"""The learner's end of the coordinator process: starts it, talks to it, ends it, and knows how it ended."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.coordinator import calls as c
from async_rl.coordinator.facade import STOP_S, Facade
from async_rl.coordinator.link import Link
from async_rl.coordinator.publishing import Transfer
from async_rl.coordinator.resumed import Resumed
from async_rl.frames import value_from_frames
from async_rl.logs import last_lines

log = logging.getLogger(__name__)

LOAD_S = 3600.0
"""Longest time that the problems may take to load."""
EXIT_S = 5.0
"""For a process that has closed its link, or was killed, to be gone."""
LOG_LINES = 8


class CoordinatorProcess(Facade):
    """A coordinator in a process of its own, which writes to <run.dir>/logs/coordinator.log."""

    def __init__(
        self, config: Config, run_id: str, notify: Callable[[str], None], resumed: Resumed | None = None
    ) -> None:
        """Start the process and wait until it has loaded the problems, and what the run before left.

        Raises InputError when the settings, the problems or the state were refused.
        """
        self.log = Path(config.run.dir) / "logs" / "coordinator.log"
        self._notify = notify
        self._transfer: Transfer | None = None
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[c.Call, Future[Any]]] = {}
        self._error: BaseException | None = None
        self._stop_reason: str | None = None
        self._process, end = _start(self.log)
        self._link = Link(end, c.FromProcess)
        self._reader = threading.Thread(target=self._listen, name="coordinator-link", daemon=True)
        self._reader.start()
        level = min(logging.INFO, logging.getLogger("async_rl").getEffectiveLevel())
        setup = c.Setup(config=config, run_id=run_id, log_level=level, resumed=resumed)
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop, "it could not begin")
            ready: c.Ready = self.ask(setup, LOAD_S)
            undo.pop_all()
        self.dropped = ready.dropped
        """Problems that are not used, by reason."""
        self.given_up = ready.given_up
        """In words, what of the run before was given up for changes that the user accepts."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, transfer: Transfer) -> dict[str, str]:
        """Open the ports and begin; `transfer` does the blocking work of publications.

        Returns the addresses {"learner": "host:port", "http": "host:port"}. Raises InputError for an address that
        must not be bound, TransportError or OSError for one that cannot.
        """
        self._transfer = transfer
        addresses: dict[str, str] = self.ask(c.Open(store=transfer.store, backend=transfer.backend))
        return addresses

    def post(self, call: c.Call) -> Future[Any]:
        """Send a call; see `Facade.post`."""
        self._raise_end()
        try:
            return self._send(call)
        except OSError as error:
            self._reader.join(2 * EXIT_S)  # It finds out how the process ended, and says so to everyone who waits.
            self._raise_end()
            raise c.CoordinatorEnded(f"the coordinator process {self.pid} takes no calls: {error}") from error

    def stop(self, reason: str, timeout_s: float = STOP_S, dismiss: bool = True) -> None:
        """End the process; see `Facade.stop`."""
        if self._stop_reason is None:
            self._stop_reason = reason
            with contextlib.suppress(OSError):  # It has ended already.
                self._send(c.Stop(reason=reason, dismiss=dismiss))
        if not _wait(self._process, timeout_s):
            log.error("the coordinator process %d did not end within %g s; killing it", self.pid, timeout_s)
            self._process.kill()
            _wait(self._process, EXIT_S)
        self._link.close()
        self._reader.join(EXIT_S)

    def _send(self, call: c.Call) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        self._pending[number] = call, answer
        self._link.send(c.Ask(number=number, call=call))  # type: ignore[arg-type]
        return answer

    def _end(self) -> tuple[BaseException | None, str | None]:
        return self._error, self._stop_reason

    # --- the thread that reads ------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (message := self._link.receive()) is not None:
                self._take(message)
        # The boundary of this thread: whatever it was, the learner's next call or wait raises it.
        except BaseException as error:
            log.exception("the link to the coordinator failed")
            self._error = self._error or error
            self._process.kill()
        self._gone()

    def _take(self, message: c.FromProcess) -> None:
        match message:
            case c.Answer():
                self._answered(message)
            case c.Job():
                self._begin(message)
            case c.Abandon():
                assert self._transfer is not None, "an epoch has jobs"
                self._transfer.abandon(message.epoch, message.reason)
            case c.Note():
                self._notify(message.text)
            case c.LogLine():
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            case c.Ended():
                self._error = message.error.to_error()

    def _answered(self, message: c.Answer) -> None:
        call, answer = self._pending.pop(message.number)
        if message.error is not None:
            answer.set_exception(message.error.to_error())
        else:
            assert message.frames is not None, "an answer is a value or an error"
            answer.set_result(call.unpack(value_from_frames([frame.data for frame in message.frames], call.answer)))

    def _begin(self, job: c.Job) -> None:
        """Have the publisher do a job; its thread reports the end."""
        assert self._transfer is not None, "no job comes before `start`"
        future: Future[Any]
        match job.work:
            case c.JoinJob(epoch=epoch, size=size, deadline_s=deadline_s):
                future = self._transfer.join(epoch, size, deadline_s)
            case c.SendJob(manifest=manifest, deadline_s=deadline_s):
                future = self._transfer.send(manifest, deadline_s)
            case c.SnapshotJob(manifest=manifest):
                future = self._transfer.snapshot(manifest)
        future.add_done_callback(lambda done: self._job_ended(job.number, done))

    def _job_ended(self, number: int, done: Future[Any]) -> None:
        if done.cancelled():
            return  # The publisher is closed, and with it the run.
        if (error := done.exception()) is not None:
            message = c.JobEnded(number=number, error=str(error))
        elif isinstance(done.result(), Path):
            message = c.JobEnded(number=number, path=str(done.result()))
        else:
            message = c.JobEnded(number=number, seconds=done.result())
        with contextlib.suppress(OSError):  # The thread that reads says how the coordinator ended.
            self._link.send(message)

    def _gone(self) -> None:
        """The link is at its end: find out why, and tell everyone who waits."""
        if not _wait(self._process, EXIT_S):
            self._process.kill()
            _wait(self._process, EXIT_S)
        if self._error is None and self._stop_reason is None:
            lines = " | ".join(line.strip() for line in last_lines(self.log, LOG_LINES)) or "nothing"
            self._error = c.CoordinatorEnded(
                f"its process {self.pid} {_how(self._process.returncode)}; the last lines of {self.log}: {lines}"
            )
        pending, self._pending = self._pending, {}
        for _, answer in pending.values():
            answer.set_exception(self._ended())


def _start(log_file: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, in this one's group, and our end of the link to it."""
    ours, theirs = socket.socketpair()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_rl.coordinator.process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether the process has ended after at most `timeout_s`; safe from several threads."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.poll() is not None


def _how(code: int | None) -> str:
    if code is None:
        return "closed its link and could not be killed"
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
