"""Runs of real processes with a tiny model: settings, commands and their outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from async_rl.addresses import free_port
from tests.conftest import Spawn
from tests.tiny_models import tiny_model

REWARD = '''"""Share of even digits in a completion."""


def score(completion, answer, **problem):
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
'''

CONFIG = """
[run]
dir = "{dir}/run"
steps = 6
seed = 3
stall_timeout_s = 200
[model]
path = "{model}"
[data]
path = "{dir}/problems.jsonl"
eval_problems = 8
max_prompt_tokens = 16
[environment]
type = "function"
reward = "{dir}/rewards.py:score"
[sampling]
group_size = 4
max_completion_tokens = 6
[learner]
batch_groups = 4
lr = 1e-3
[generator]
slots = 8
[generator.engine]
type = "hf"
[transport]
port = {port}
heartbeat_s = 0.2
heartbeat_timeout_s = 8
[weights]
deadline_s = 60
[evaluation]
every = 3
[metrics]
console = "plain"
"""


@dataclass
class Run:
    """One run directory and the commands that work on it."""

    folder: Path
    config: Path
    spawn: Spawn
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    """Further environment variables of every process."""

    def start(self, *words: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start `async-rl WORDS...`; its output goes to a file, and `output` reads it.

        `within` stands before the command, such as the words that enter a network namespace.
        """
        number = len(self.processes)
        log = (self.folder / f"process-{number}.log").open("w")
        argv = [*within, sys.executable, "-m", "async_rl.cli", *words]
        process = self.spawn(argv, stdout=log, stderr=log, env=os.environ | self.environ)
        self.processes.append(process)
        return process

    def learner(self, *overrides: str) -> subprocess.Popen[str]:
        return self.start("learner", str(self.config), *overrides)

    def generator(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        return self.start("generator", str(self.config), *overrides, "--name", name)

    def output(self) -> str:
        """All that the processes printed."""
        return "\n".join(
            f"--- {i}\n{(self.folder / f'process-{i}.log').read_text()}" for i in range(len(self.processes))
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl so far; the last one may be under way."""
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def until(self, what: Callable[[], Any], timeout_s: float = 240.0) -> None:
        """Wait until `what` is true, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def wait(self, process: subprocess.Popen[str], code: int = 0, timeout_s: float = 300.0) -> None:
        """The process ends with `code`."""
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{process.args} still runs after {timeout_s:g} s\n{self.output()}")
        assert process.returncode == code, self.output()


@pytest.fixture
def run(tmp_path: Path, spawn: Spawn) -> Run:
    """A data file, a reward function, a tiny model and settings for them."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(6)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    model = tiny_model(tmp_path / "model", tied=True, seed=0)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(dir=tmp_path, model=model, port=free_port()))
    return Run(tmp_path, config, spawn)
