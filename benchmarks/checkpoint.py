"""What a checkpoint costs: how long training is held by a background save and by a plain one, and its size.

    python -m benchmarks.checkpoint --model models/smollm2-135m-instruct --output benchmarks/results/checkpoint.json

Model and AdamW's moments are saved alternately in the background and plainly (training waits until all is written and
synced), so that a busy disk hits both alike. While a background save is written, training steps run, and are timed
against steps without a save beside them: the cost of the writing thread. The share is the median of the holds of
background saves over the median of the plain ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.checkpoints import names
from async_rl.checkpoints.state import RunState
from async_rl.checkpoints.tensors import all_tensors
from async_rl.config import Config, build_config
from async_rl.learner.checkpointing import Checkpoints, resolved_settings
from async_rl.learner.model import load_policy
from async_rl.learner.ranks import init_ranks
from async_rl.learner.start import find_start
from async_rl.learner.update import Updater
from async_rl.protocol import encode_value
from benchmarks.common import add_result_arguments, check_clean, result_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a Hugging Face causal language model")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind that count")
    parser.add_argument(
        "--dir", help="where to write; the disk under it is what is measured (default: a temporary folder)"
    )
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        figures = measure(arguments.model, Path(folder), arguments.rounds)
    result_file(arguments, "benchmarks.checkpoint", figures)


def measure(model: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Both kinds of save in turn, after one of each that only warms up."""
    parts = {kind: Saves(settings(model, folder / kind, kind == "background")) for kind in ("background", "plain")}
    held: dict[str, list[float]] = {kind: [] for kind in parts}
    write: list[float] = []
    alone, beside = [], []
    for number in range(rounds + 1):
        for kind, saves in parts.items():
            seconds = timed(lambda saves=saves, step=number + 1: saves.save(step))
            steps: list[float] = []
            while not saves.idle():
                steps.append(timed(saves.step))
            saves.checkpoints.wait()
            if number == 0:
                continue
            held[kind].append(seconds)
            beside += steps
            if kind == "background":
                write.append(saves.write_s())
                alone += [timed(saves.step) for _ in range(max(3, len(steps)))]
    background, plain = statistics.median(held["background"]), statistics.median(held["plain"])
    return {
        "model": Path(model).name,
        "parameters": parts["plain"].num_parameters(),
        "bytes": parts["plain"].num_bytes(),
        "background_held_s": held["background"],
        "plain_held_s": held["plain"],
        "held_share": background / plain,
        "background_write_s": write,
        "step_alone_s": statistics.median(alone),
        "step_beside_a_save_s": statistics.median(beside) if beside else None,
    }


def timed(action: Callable[[], Any]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def settings(model: str, folder: Path, background: bool) -> Config:
    return build_config(
        {
            "run": {"dir": str(folder)},
            "model": {"path": model},
            "environment": {"type": "arithmetic"},
            "checkpoint": {"background": background, "keep_last": 1},
        }
    )


class Saves:
    """A learner without a fleet that has made one step, so that there are moments."""

    def __init__(self, config: Config) -> None:
        ctx = init_ranks(config)
        self.config = config
        self.policy = load_policy(config.model, config.learner, ctx)
        self.updater = Updater(self.policy, config, ctx)
        self.checkpoints = Checkpoints(config, ctx, self.policy, self.updater, find_start(config))
        self.step()

    def step(self) -> None:
        """An optimizer update with made-up gradients: memory traffic as in training, and little else."""
        for parameter in self.updater.optimizer.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.updater.optimizer.update(1)

    def save(self, step: int) -> None:
        """A checkpoint with no work under way."""
        state = RunState(step=step, work=np.zeros(0, np.uint8), updater=self.updater.state())
        shared = {names.STATE: encode_value(state), names.CONFIG: resolved_settings(self.config, "benchmark", "run")}
        self.checkpoints.save(step, shared)
        if not self.config.checkpoint.background:
            self.checkpoints.wait()

    def idle(self) -> bool:
        """Whether nothing is being written."""
        pending = self.checkpoints._pending
        return pending is None or pending.done()

    def write_s(self) -> float:
        return self.checkpoints._metrics.resolve()["checkpoint/write_s"]

    def num_bytes(self) -> int:
        return int(self.checkpoints._metrics.resolve()["checkpoint/bytes"])

    def num_parameters(self) -> int:
        tensors = all_tensors(self.policy.model, self.updater.optimizer.adamw)
        return sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model."))


if __name__ == "__main__":
    main()
