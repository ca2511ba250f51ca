"""A part of a run without a fleet: resume what the run directory holds, train seeded batches, save."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.checkpoints import Disk, names
from async_rl.checkpoints.lineage import write_lineage
from async_rl.checkpoints.state import RunState, read_state
from async_rl.config import Config
from async_rl.learner.batch import prepare_batch
from async_rl.learner.checkpointing import Checkpoints, resolved_settings
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import RankContext
from async_rl.learner.start import share_start
from async_rl.learner.update import Updater
from async_rl.protocol import encode_value
from tests.learner.helpers import make_groups


def train_on(config: Config, ctx: RankContext, last: int) -> tuple[list[dict[str, float]], Policy, Updater]:
    """Train up to step `last` and save it; returns the metrics of each step trained here."""
    start = share_start(config, ctx)
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    checkpoints = Checkpoints(config, ctx, policy, updater, start)
    if start.checkpoint is not None:
        checkpoints.load(Path(start.checkpoint))
        updater.restore(read_state(Path(start.checkpoint)).updater)
    metrics = []
    for step in range(start.step + 1, last + 1):
        metrics.append(updater.step(prepare_batch(make_groups(seed=step), step, config), step).resolve())
    if ctx.rank == 0:
        write_lineage(Path(config.run.dir), start.lineage, Disk())
    checkpoints.save(last, shared(config, last, updater) if ctx.rank == 0 else None)
    checkpoints.close()
    assert checkpoints.error is None, checkpoints.error
    return metrics, policy, updater


def shared(config: Config, step: int, updater: Updater) -> dict[str, bytes]:
    """The files of rank 0, without work under way."""
    state = RunState(step=step, work=np.zeros(0, np.uint8), updater=updater.state())
    return {names.STATE: encode_value(state), names.CONFIG: resolved_settings(config, "test", "run")}
