"""Where a run begins: at step 0, or after the step of a checkpoint; rank 0 decides, all ranks hear it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from async_rl.checkpoints.find import Checkpoint, checkpoint_at, choose_checkpoint, find_named
from async_rl.checkpoints.finished import finished_after
from async_rl.checkpoints.lineage import Lineage
from async_rl.config import Config
from async_rl.learner.ranks import RankContext, broadcast_bytes


class Start(msgspec.Struct, frozen=True):
    """The beginning of a run."""

    lineage: Lineage
    step: int = 0
    """Steps trained already: the version that is published first."""
    checkpoint: str | None = None
    """Folder of the checkpoint; None at step 0."""
    fork: bool = False
    """Whether the checkpoint is another run's."""
    notes: tuple[str, ...] = ()
    """What was passed over and why, for people."""
    finished: bool = False
    """Whether the run was at its end already: steps, evaluation, final model and all."""


def find_start(config: Config) -> Start:
    """Where the run of `config` begins; InputError for a step or run that is not there.

    Raises CheckpointError when there are complete checkpoints and none can be read.
    """
    run_dir = Path(config.run.dir)
    if isinstance(config.run.resume, int):
        return _resumed(checkpoint_at(run_dir, config.run.resume), ())
    notes: tuple[str, ...] = ()
    if config.run.resume == "auto":
        choice = choose_checkpoint(run_dir)
        notes = tuple(f"not resumed: {reason}" for reason in choice.skipped)
        if choice.checkpoint is not None:
            return _resumed(choice.checkpoint, notes, finished_after(config, choice.checkpoint.step))
    if config.run.fork_from is not None:
        source = find_named(config.run.fork_from)
        return Start(Lineage.first(), source.step, str(source.path), fork=True, notes=notes)
    return Start(Lineage.first(), notes=notes)


def share_start(config: Config, ctx: RankContext) -> Start:
    """`find_start` on rank 0, its answer on every rank. Collective."""
    data = msgspec.msgpack.encode(find_start(config)) if ctx.rank == 0 else None
    return msgspec.msgpack.decode(broadcast_bytes(data), type=Start)


def _resumed(checkpoint: Checkpoint, notes: tuple[str, ...], finished: bool = False) -> Start:
    lineage: Any = checkpoint.marker.lineage.resumed(checkpoint.step)
    return Start(lineage, checkpoint.step, str(checkpoint.path), notes=notes, finished=finished)
