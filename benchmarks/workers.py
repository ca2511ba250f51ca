"""Processes that measure when told to: a line of JSON in, a line of JSON out, so that rounds of several can alternate.

A worker is a module of benchmarks/ that takes its settings as one argument of JSON; it may run in another environment,
since this file needs nothing but Python. Answers have a pipe of their own: what libraries print, as early as their
import, goes to a log, whose end an error shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers"
START_S = 600.0
"""For which a worker may import, load its model and say that it is ready."""
END_S = 60.0
"""For which a worker may end once nobody asks any more."""


def peer_python() -> Path | None:
    """The interpreter of the environment that `make peers` creates, if it is complete."""
    return PEERS / "bin" / "python" if (PEERS / "bin" / "trl").exists() else None


def peers_missing() -> str:
    """Why nothing is compared with TRL, if it is not."""
    return "" if peer_python() else f"TRL is not installed in {PEERS.name}: run `make peers`"


class Late(RuntimeError):
    """A worker gave no answer in time."""


class Worker:
    """The side that asks."""

    def __init__(self, python: Path | str, module: str, settings: dict[str, Any], threads: int) -> None:
        self.module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._answers, there = os.pipe()
        self._process = subprocess.Popen(
            [str(python), "-m", module, json.dumps(settings), str(there)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env=os.environ | _environment(threads),
            pass_fds=[there],
        )
        os.close(there)
        self._buffer = b""

    def ready(self) -> dict[str, Any]:
        """What the worker says once it has loaded everything."""
        return self.hear("to load", START_S)

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises RuntimeError when the worker ended or was too slow."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It ended: reading says why.
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        return self.hear(f"to answer {message}", timeout_s)

    def close(self) -> None:
        """End the worker: politely by closing its input, later by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        os.close(self._answers)
        self._log.close()

    def hear(self, what: str, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises Late when none came in time, RuntimeError when the worker ended."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise Late(f"{self.module} took more than {timeout_s:g} s {what}\n{self._tail()}")
            data = os.read(self._answers, 1 << 16)
            if not data:
                code = self._process.wait(END_S)
                raise RuntimeError(f"{self.module} ended with exit code {code}\n{self._tail()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


def _environment(threads: int) -> dict[str, str]:
    """The same for every worker: threads that sleep while another worker measures, no hub, no telemetry."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


class Answers:
    """The worker's side: settings, messages and answers."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.fdopen(int(sys.argv[2]), "w")

    def say(self, **answer: Any) -> None:
        """One answer."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def next(self) -> dict[str, Any]:
        """The next message; SystemExit when nobody asks any more."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        message: dict[str, Any] = json.loads(line)
        return message

    def messages(self) -> Iterator[dict[str, Any]]:
        """All messages, to the end."""
        while True:
            yield self.next()


@dataclass(frozen=True)
class Use:
    """Wall and processor time of this process between two moments, and its largest memory between them."""

    wall_s: float
    processor_s: float
    peak_bytes: int


class Meter:
    """Measures from its making to `stop`."""

    def __init__(self) -> None:
        # Sets the peak of the resident set back to what is resident now (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def stop(self) -> Use:
        wall, processor = time.perf_counter(), time.process_time()
        return Use(wall - self._wall, processor - self._processor, resident("VmHWM"))


def resident(field: str = "VmRSS") -> int:
    """Bytes of the resident set now, or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) * 1024
