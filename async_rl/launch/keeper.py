"""Runs one command on a node for a launcher elsewhere, and ends it when the launcher's end of the pipe is gone.

`python -m async_rl.launch.keeper` reads an `Order` as one line of JSON, leaves its parent (Ray kills the children of a
worker that ends, which would leave no time to save), and runs the command in a process group of its own. It then reads
signal numbers, one a line, and writes reports, one a line, whose first letter says what they are: `o` and `e` a line of
the command's output and of its errors, `p` its pid, `x` its exit code as a shell counts, `f` why it could not start.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from async_rl import leftovers
from async_rl.launch import guard
from async_rl.launch.supervisor import shell_code

DRAIN_S = 2.0
"""For the last output of a command that has ended, where something that it left behind holds its pipes."""
_POLL_S = 0.05
_LINE_BYTES = 64 << 10


class Order(msgspec.Struct, frozen=True):
    """What a keeper is to run."""

    argv: Sequence[str] = ()
    environ: Mapping[str, str] = {}
    """On top of the environment of the node."""
    cwd: str | None = None
    """None: the keeper's own folder."""
    orphan_s: float = 5.0
    """Between SIGTERM and SIGKILL for what is still there when the launcher is gone or the command has ended."""


class Keeper:
    """One command, from its start to the end of all that it started."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.process = subprocess.Popen(
            order.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **order.environ},
            cwd=order.cwd,
            start_new_session=True,
            preexec_fn=_forget_signals,
        )
        self.kill_at: float | None = None
        """When the launcher is gone: the end of patience (monotonic seconds)."""
        self._rest: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the command and its group have ended."""
        assert self.process.stdout is not None and self.process.stderr is not None
        outputs = {self.process.stdout.fileno(): b"o", self.process.stderr.fileno(): b"e"}
        report(b"p%d" % self.process.pid)
        self._selector.register(0, selectors.EVENT_READ)
        for fd in outputs:
            self._selector.register(fd, selectors.EVENT_READ, outputs[fd])
        while self.process.poll() is None:
            self._serve(_POLL_S)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                self._signal_group(signal.SIGKILL)
        guard.end_groups([self.process.pid], self.order.orphan_s)
        leftovers.sweep()
        deadline = time.monotonic() + DRAIN_S
        while set(outputs) & set(self._selector.get_map()) and time.monotonic() < deadline:
            self._serve(_POLL_S)
        report(b"x%d" % shell_code(self.process.returncode))

    def _serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _LINE_BYTES)
            if key.fd == 0:
                self._obey(data)
            else:
                self._forward(key.fd, key.data, data)

    def _obey(self, data: bytes) -> None:
        for word in data.split():
            number = int(word)
            if number == signal.SIGKILL:
                self._signal_group(number)
            elif self.process.poll() is None:
                self.process.send_signal(number)
        if not data:
            self._selector.unregister(0)
            self.kill_at = time.monotonic() + self.order.orphan_s
            self._signal_group(signal.SIGTERM)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _forward(self, fd: int, letter: bytes, data: bytes) -> None:
        *lines, rest = (self._rest.get(fd, b"") + data).split(b"\n")
        if not data:
            self._selector.unregister(fd)
        if rest and (not data or len(rest) >= _LINE_BYTES):
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        for line in lines:
            report(letter + line)


def _forget_signals() -> None:
    """A command starts as from a shell, whatever the worker of a cluster ignores or blocks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def report(line: bytes) -> None:
    """Tell the launcher, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        data = line + b"\n"
        while data:
            data = data[os.write(1, data) :]


def main() -> None:
    """Read the order, leave the parent, keep the command."""
    with os.fdopen(0, "rb", buffering=0, closefd=False) as orders:
        order = msgspec.json.decode(orders.readline(), type=Order)
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        keeper = Keeper(order)
    except OSError as error:
        report(f"f{error.strerror}: {error.filename}".encode())
        sys.exit(1)
    keeper.run()


if __name__ == "__main__":
    main()
