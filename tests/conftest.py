"""What all tests share: quiet libraries on one thread each, and processes that never outlive their test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

# Before any test imports torch, vLLM or a tracker: they read these once.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)

# No example has a deadline: the machine may be busy. CI always draws the same examples.
settings.register_profile("async_rl", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("async_rl")

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process in a session of its own; after the test its whole process group is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(argv, text=True, start_new_session=True, **{**pipes, **options})
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)


@pytest.fixture
def run_command(spawn: Spawn) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end and return its code and output; fail with the output after `timeout_s`."""

    def run(argv: Sequence[str], timeout_s: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
        process = spawn(argv, **options)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate(timeout=20)
            pytest.fail(f"{argv} ran longer than {timeout_s} s\n{output}\n{errors}")
        return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)

    return run
