"""The learner's checkpoints on every rank: when one is due, what goes in, writing beside training, reading it back."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from async_rl import __version__
from async_rl.checkpoints import names
from async_rl.checkpoints.names import CheckpointError
from async_rl.checkpoints.save import Contents, Retention, Writer
from async_rl.checkpoints.tensors import Staging, all_tensors, load_model_and_optimizer
from async_rl.checkpoints.writing import Writing
from async_rl.config import Config
from async_rl.learner.model import is_weight_file
from async_rl.learner.ranks import MARGIN_S, RankContext, broadcast_bytes
from async_rl.learner.start import Start
from async_rl.learner.update import Updater
from async_rl.metrics import Metrics
from async_rl.protocol import decode_value, encode_value

if TYPE_CHECKING:
    from async_rl.learner.model import Policy

log = logging.getLogger(__name__)


class Checkpoints:
    """All methods but `record` are called on every rank alike."""

    def __init__(
        self,
        config: Config,
        ctx: RankContext,
        policy: Policy,
        updater: Updater,
        start: Start,
        notify: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.ctx, self.policy, self.updater = config.checkpoint, ctx, policy, updater
        self.notify, self.clock = notify, clock
        self.enabled = self.settings.every > 0 or self.settings.every_s is not None
        self.last_step = 0 if start.checkpoint is None or start.fork else start.step
        """Newest step that is saved or being saved."""
        self.error: CheckpointError | None = None
        """Why the last save failed; None when it went well."""
        self._last_time = clock()
        self._staging = Staging()
        self._metrics = Metrics()
        self.writing: Writing | None = None
        """The save under way; one that is done until its outcome is taken."""
        # Its waits are for the slowest rank's writing.
        timeout = timedelta(seconds=self.settings.deadline_s + MARGIN_S)
        # A group of its own: training's collectives run at the same time, in an order that differs from rank to rank.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if ctx.world > 1 else None
        self._writer = Writer(
            Path(config.run.dir),
            start.lineage,
            Retention(self.settings.keep_last, self.settings.keep_every),
            versions=_versions(),
            keep_model_file=lambda file: not is_weight_file(file),
            rank=ctx.rank,
            ranks=ctx.world,
            group=self._group,
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, by rank 0's clock."""
        every, every_s = self.settings.every, self.settings.every_s
        due = bool(every and step % every == 0)
        due |= every_s is not None and self.clock() - self._last_time >= every_s
        if not self.enabled or self.ctx.world == 1:
            return self.enabled and due
        return (
            broadcast_bytes(b"\1" if due else b"\0") == b"\1" if self.ctx.rank == 0 else broadcast_bytes(None) == b"\1"
        )

    def save(self, step: int, shared: dict[str, bytes] | None) -> None:
        """Save `step`; returns once training may go on. A failure is told and counted, and training goes on.

        The save before is waited for first, up to checkpoint.deadline_s: then CheckpointError. `shared` are the files
        that rank 0 alone writes.
        """
        started = time.monotonic()
        self.wait()
        tensors = all_tensors(self.policy.model, self.updater.optimizer.adamw)
        contents = Contents(
            step=step,
            tensors=self._staging.copy(tensors) if self.settings.background else tensors,
            rank_state=random_state(),
            shared=shared,
            model_files=self.policy.source,
        )
        self.writing = Writing(
            step, self._writer.run_dir, self.settings.deadline_s, lambda: self._writer.write(contents)
        )
        self.last_step, self._last_time = step, self.clock()
        if not self.settings.background:
            self.wait()
        self._metrics.sum("time/checkpoint_s", time.monotonic() - started)

    def wait(self) -> None:
        """Return once no save is under way; CheckpointError when it takes longer than checkpoint.deadline_s."""
        if self.writing is not None:
            self.writing.wait()
            self._take(self.writing)

    def close(self) -> None:
        """Wait for the save under way, the last one."""
        self.wait()

    def record(self, metrics: Metrics) -> None:
        """Add what happened since the last call; rank 0."""
        if self.writing is not None and self.writing.done():
            self._take(self.writing)
        metrics.merge(self._metrics)
        self._metrics = Metrics()

    def _take(self, pending: Writing) -> None:
        self.writing = None
        try:
            saved = pending.result()
        except CheckpointError as error:
            self.error = error
            self._metrics.sum("checkpoint/failed", 1.0)
            log.error("the checkpoint of step %d could not be written: %s", self.last_step, error)
            self.notify(f"the checkpoint of step {self.last_step} could not be written: {error}; training goes on")
            return
        self.error = None
        self._metrics.last("checkpoint/write_s", saved.seconds)
        self._metrics.last("checkpoint/bytes", float(saved.num_bytes))
        self._metrics.last("checkpoint/step", float(self.last_step))

    def load(self, checkpoint: Path) -> None:
        """Put tensors and random generators back; InputError for the checkpoint of another model."""
        load_model_and_optimizer(
            self.policy.model, self.updater.optimizer.adamw, checkpoint / names.TENSORS, self._group
        )
        own = checkpoint / names.rank_file(self.ctx.rank)
        if own.is_file():  # There is none for a rank that did not exist then: it keeps its fresh generators.
            restore_random_state(own.read_bytes())


def random_state() -> bytes:
    """Every random generator of this process."""
    version, words, gauss = random.getstate()
    return encode_value(
        {
            "torch": torch.get_rng_state().numpy(),
            "cuda": torch.cuda.get_rng_state().numpy() if torch.cuda.is_available() else None,
            "python": [version, list(words), gauss],
        }
    )


def restore_random_state(data: bytes) -> None:
    """Take back what `random_state` returned, on a machine of the same kind of device."""
    state: dict[str, Any] = decode_value(data)
    torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(state["cuda"])))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))


def resolved_settings(config: Config, resolved_from: str, run_id: str) -> bytes:
    """Content of a config.json: all settings, where they came from, and the run."""
    resolved = {"from": resolved_from, "run_id": run_id, "config": msgspec.to_builtins(config)}
    return msgspec.json.format(msgspec.json.encode(resolved)) + b"\n"


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {"async_rl": __version__, "python": platform.python_version(), **packages}
