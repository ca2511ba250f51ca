"""Whether a run came to its end: its last checkpoint is older than its last evaluation and its final model."""

from __future__ import annotations

from pathlib import Path

from async_rl.checkpoints.find import choose_checkpoint
from async_rl.config import Config

FINISHED = "finished"
"""File in run.dir with the step after which the run came to its end."""


def mark_finished(run_dir: Path, step: int) -> None:
    """Note that the run came to its end after `step`, evaluation, final model and all."""
    (run_dir / FINISHED).write_text(f"{step}\n")


def clear_finished(run_dir: Path) -> None:
    """A run begins: an end that came before it is not its own, even at the same step."""
    (run_dir / FINISHED).unlink(missing_ok=True)


def finished_after(config: Config, step: int) -> bool:
    """Whether the run, whose newest checkpoint is of `step`, was at its end already."""
    mark = Path(config.run.dir) / FINISHED
    return step >= config.run.steps and mark.is_file() and mark.read_text().strip() == str(step)


def is_finished(config: Config) -> bool:
    """Whether a learner of `config` would have nothing to do; checkpoints are looked at only where a run ended."""
    if config.run.resume != "auto" or not (Path(config.run.dir) / FINISHED).is_file():
        return False
    newest = choose_checkpoint(Path(config.run.dir)).checkpoint
    return newest is not None and finished_after(config, newest.step)


def say_finished(config: Config) -> None:
    """Tell the user, and how to go on."""
    print(
        f"{config.run.dir} is complete: all {config.run.steps} steps of run.steps are trained; raise run.steps to "
        "train on, go back with run.resume=STEP, or start a run in another run.dir"
    )
