"""What an actor on a node does for the launcher: start one command by a keeper, hand on its output and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import NamedTuple

import msgspec

from async_rl.addresses import free_port
from async_rl.errors import InputError
from async_rl.launch.keeper import Order

MAX_LINES = 10_000
"""Lines of output that wait for the launcher; older ones are dropped, and their number is told."""
MAX_TAKEN = 1_000
START_S = 300.0
"""Longest wait for a command to be there once its keeper has been started."""


class Line(NamedTuple):
    """A line of output, without its end."""

    text: bytes
    is_error: bool
    """Written to standard error."""


class News(NamedTuple):
    """What happened since the launcher asked last."""

    lines: list[Line]
    taken: int
    """Give this back with the next question: lines up to here need not be told again."""
    code: int | None
    """Exit code as a shell counts, once the command has ended and all its lines are told."""


class Runner:
    """One command on this node; its methods are called from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque()
        self._first = 0
        """Number of the first line that is kept."""
        self._dropped = 0
        self._pid: int | None = None
        self._code: int | None = None
        self._failure: str | None = None
        self._ended = False
        self._keeper: subprocess.Popen[bytes] | None = None

    def free_port(self, host: str) -> int:
        """A free port of this node."""
        return free_port(host)

    def start(self, words: tuple[str, ...], order: Order) -> int:
        """Start this node's Python with `words`; returns the pid.

        Raises InputError where the order cannot be followed here.
        """
        order = msgspec.structs.replace(order, argv=[sys.executable, *words])
        if order.cwd is not None and not os.path.isdir(order.cwd):
            raise InputError(
                f"{os.uname().nodename} has no folder {order.cwd}, in which the run was started; share it with all "
                "nodes, or name a working_dir in launcher.runtime_env"
            )
        argv = [sys.executable, "-m", "async_rl.launch.keeper"]
        self._keeper = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=order.cwd
        )
        self._write(msgspec.json.encode(order))
        threading.Thread(target=self._read, daemon=True, name="keeper").start()
        with self._changed:
            self._changed.wait_for(lambda: self._pid is not None or self._ended, START_S)
            if self._pid is None:
                raise InputError(
                    f"{' '.join(argv)} on {os.uname().nodename} started nothing: "
                    f"{self._failure or 'async_rl must be installed there'}"
                )
            return self._pid

    def news(self, taken: int, wait_s: float) -> News:
        """Output after line number `taken` and, after all output, the exit code; waits until there is any."""
        with self._changed:
            while self._first < taken and self._lines:
                self._lines.popleft()
                self._first += 1
            self._changed.wait_for(lambda: bool(self._lines) or self._ended, wait_s)
            lines = [*self._lines][:MAX_TAKEN]
            told = len(lines) == len(self._lines)
            taken = self._first + len(lines)
            if self._dropped:
                lines.insert(0, Line(b"... %d lines were dropped: the launcher took none" % self._dropped, True))
                self._dropped = 0
            return News(lines, taken, self._code if self._ended and told else None)

    def send(self, number: int) -> None:
        """Send the command a signal; SIGKILL reaches all that it started."""
        self._write(b"%d" % number)

    def _write(self, line: bytes) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            data = line + b"\n"
            while data:
                data = data[os.write(self._keeper.stdin.fileno(), data) :]

    def _read(self) -> None:
        """Take the keeper's reports until it ends."""
        assert self._keeper is not None and self._keeper.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(START_S)
        for report in self._keeper.stdout:
            with self._changed:
                self._take(report[:1], report[1:].rstrip(b"\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            # A keeper that was killed itself has left its command to the kernel.
            self._code = 128 + signal.SIGKILL if self._code is None else self._code
            self._changed.notify_all()

    def _take(self, letter: bytes, text: bytes) -> None:
        match letter:
            case b"p":
                self._pid = int(text)
            case b"x":
                self._code = int(text)
            case b"f":
                self._failure = text.decode(errors="replace")
            case _:
                self._lines.append(Line(text, letter == b"e"))
                if len(self._lines) > MAX_LINES:
                    self._lines.popleft()
                    self._first += 1
                    self._dropped += 1
