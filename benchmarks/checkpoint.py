"""What a checkpoint costs: how long training is held by a background save and by a plain one, and its size.

    python -m benchmarks.checkpoint --model models/smollm2-135m-instruct --output benchmarks/results/checkpoint.json

Model and AdamW's moments are saved alternately in the background and plainly (training waits until all is written and
synced), so that a busy disk hits both alike. The share of a round is the hold of its background save over that of its
plain one. While a background save is written, training steps run, and are timed against steps without a save beside
them: the cost of the writing thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
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
from async_rl.metrics import Metrics
from async_rl.protocol import encode_value
from benchmarks.common import Headline, Repeated, add_result_arguments, check_clean, result_file


def measure(model: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Both kinds of save in turn, after one of each that only warms up; each figure as often as it was measured."""
    background, plain = (Saves(settings(model, folder / str(kind), background=kind)) for kind in (True, False))
    seconds: dict[str, list[float]] = {name: [] for name in SECONDS}
    for number in range(rounds + 1):
        found = one_round(background, plain, number + 1)
        if number > 0:
            for name, values in found.items():
                seconds[name] += values
    held = zip(seconds["background_held_s"], seconds["plain_held_s"], strict=True)
    return {
        "model": Path(model).name,
        "parameters": plain.num_parameters(),
        "bytes": plain.num_bytes,
        "held_share": Repeated.of(mine / other for mine, other in held),
        **{name: Repeated.of(values) for name, values in seconds.items() if values},
        "seconds": seconds,
    }


SECONDS = ("background_held_s", "background_write_s", "plain_held_s", "step_alone_s", "step_beside_a_save_s")


def one_round(background: Saves, plain: Saves, step: int) -> dict[str, list[float]]:
    """A save of each kind; steps beside the background one, and as many (at least three) alone."""
    held = timed(lambda: background.save(step))
    beside: list[float] = []
    while not background.idle():
        beside.append(timed(background.step))
    background.finish()
    alone = [timed(background.step) for _ in range(max(3, len(beside)))]
    plain_held = timed(lambda: plain.save(step))
    plain.finish()
    return dict(zip(SECONDS, ([held], [background.write_s], [plain_held], alone, beside), strict=True))


def headlines(figures: dict[str, Any]) -> list[Headline]:
    """The share first: it carries over to other machines."""
    return [
        Headline("hold of training by a background save, share of a plain one", figures["held_share"]),
        Headline("hold by a background save", figures["background_held_s"], "s"),
        Headline("hold by a plain save", figures["plain_held_s"], "s"),
        Headline("writing in the background", figures["background_write_s"], "s"),
        Headline("size of a checkpoint", figures["bytes"] / 1e9, "GB"),
    ]


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
        self.write_s, self.num_bytes = 0.0, 0
        """Of the last save that is finished."""
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

    def idle(self) -> bool:
        """Whether nothing is being written."""
        return self.checkpoints.writing is None or self.checkpoints.writing.done()

    def finish(self) -> None:
        """Wait for the save under way, and note its figures; RuntimeError for one that failed."""
        self.checkpoints.wait()
        if self.checkpoints.error is not None:
            raise RuntimeError(f"a save failed: {self.checkpoints.error}")
        metrics = Metrics()
        self.checkpoints.record(metrics)
        values = metrics.resolve()
        self.write_s, self.num_bytes = values["checkpoint/write_s"], int(values["checkpoint/bytes"])

    def num_parameters(self) -> int:
        tensors = all_tensors(self.policy.model, self.updater.optimizer.adamw)
        return sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model."))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a Hugging Face causal language model")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind that count")
    parser.add_argument(
        "--dir", help="where to write; the disk under it is what is measured (default: a temporary folder)"
    )
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected at least 1")
    check_clean(arguments)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        figures = measure(arguments.model, Path(folder), arguments.rounds)
    result_file(arguments, "benchmarks.checkpoint", figures, headlines(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
