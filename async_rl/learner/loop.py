"""The learner process: take a batch, step, publish, evaluate, report; on every rank alike.

Rank 0 also leads: it owns the coordinator (a thread with the socket, the ledger and the members), the send buffers
and the sinks. The other ranks only see batches and a stop; every decision reaches them as bytes from rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.buffer import TrajectoryGroup
from async_rl.checkpoints.finished import mark_finished, say_finished
from async_rl.checkpoints.names import CheckpointError
from async_rl.checkpoints.state import read_state
from async_rl.config import Config
from async_rl.evaluation import is_due
from async_rl.learner.checkpointing import Checkpoints
from async_rl.learner.lead import Lead
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import RankContext, agree, broadcast_bytes, init_ranks, spawn_ranks
from async_rl.learner.start import Start, share_start
from async_rl.learner.update import Updater
from async_rl.metrics import Metrics
from async_rl.protocol import decode_value, encode_value

log = logging.getLogger(__name__)

STOP = b""
"""What rank 0 sends instead of a batch when there is nothing more to do."""
WAIT = b"\0"
"""What it sends while it waits, which may take longer than a collective of the other ranks is given."""


def run_learner(config: Config, resolved_from: str) -> int:
    """Run the learner of `config`; 0 when all steps are done. Raises on run-time failures."""
    if config.learner.ranks > 1 and "WORLD_SIZE" not in os.environ:
        return spawn_ranks([sys.executable, "-m", "async_rl.cli", *sys.argv[1:]], config.learner.ranks)
    ctx = init_ranks(config)
    start = share_start(config, ctx)
    if start.finished:
        if ctx.rank == 0:
            say_finished(config)
        ctx.close()
        return 0
    lead: Lead | None = None
    try:
        with _InterruptFlag() as interrupted:
            lead = Lead(config, resolved_from, ctx.device, start) if ctx.rank == 0 else None
            policy = load_policy(config.model, config.learner, ctx)
            Loop(config, ctx, policy, lead, start).run(interrupted)
    except BaseException as error:
        if lead is not None:
            lead.abort()
        if not isinstance(error, _NothingToSave):
            raise
        if ctx.rank == 0:
            print("SIGTERM before the first step: there is nothing to save")
    finally:
        ctx.close()
    return 0


class Loop:
    """Steps until the run is complete; `lead` is None on every rank but 0."""

    def __init__(self, config: Config, ctx: RankContext, policy: Policy, lead: Lead | None, start: Start) -> None:
        self.config = config
        self.ctx = ctx
        self.policy = policy
        self.lead = lead
        self.start = start
        self.updater = Updater(policy, config, ctx)
        notify = log.info if lead is None else lead.console.message
        self.checkpoints = Checkpoints(config, ctx, policy, self.updater, start, notify)
        self.wire_dtype = config.weights.wire_dtype or config.model.dtype
        self._evaluated = 0
        self._published = start.step

    def run(self, interrupted: _InterruptFlag) -> None:
        """The whole run: the version it begins with is published and evaluated first, the last one is saved."""
        step = self.start.step
        evaluate = self._resume() and self.config.evaluation.every > 0
        interrupted.loading = False
        if self.lead is not None:
            self.lead.start()
        self._publish(step, evaluate)
        while step < self.config.run.steps:
            groups = self._next_batch(step + 1, interrupted)
            if groups is None:
                break
            step += 1
            self._step(step, groups)
        self._end(step, interrupted)

    def _resume(self) -> bool:
        """Take everything back from the checkpoint, if there is one; whether to evaluate the version it makes."""
        if self.start.checkpoint is None:
            return True
        self.checkpoints.load(Path(self.start.checkpoint))
        state = read_state(Path(self.start.checkpoint))
        self.updater.restore(state.updater)
        self._evaluated = state.evaluation_begun
        # A round that was under way is lost; this version stands in for it.
        return self._evaluation_due(self.start.step) or state.evaluated < state.evaluation_begun

    def _next_batch(self, step: int, interrupted: _InterruptFlag) -> tuple[TrajectoryGroup, ...] | None:
        if self.lead is None:
            while (data := broadcast_bytes(None)) == WAIT:
                pass
            return decode_value(data, tuple[TrajectoryGroup, ...]) if data != STOP else None
        groups: tuple[TrajectoryGroup, ...] | None = None

        def stop() -> bool:
            if self.ctx.world > 1:
                broadcast_bytes(WAIT)
            return interrupted.is_set()

        try:
            groups = self.lead.next_batch(step, stop)
        finally:
            if self.ctx.world > 1:
                broadcast_bytes(encode_value(groups) if groups is not None else STOP)
        return groups

    def _step(self, step: int, groups: tuple[TrajectoryGroup, ...]) -> None:
        started = time.monotonic()
        metrics: Metrics = self.updater.step(self.updater.prepare(groups, step), step)
        train_s = time.monotonic() - started
        if self.lead is not None:
            self.lead.trained()
        save = self.checkpoints.due(step)
        # Before the new version is published, which lets the next tickets out.
        work = self.lead.work() if self.lead is not None and save else b""
        publish_s = 0.0
        last = step == self.config.run.steps
        if step % self.config.staleness.publish_every == 0 or last:
            publish_s = self._publish(step, evaluate=not last and self._evaluation_due(step))
        if self.lead is not None:
            metrics.last("time/train_s", train_s)
            metrics.last("time/publish_s", publish_s)
            self.checkpoints.record(metrics)
            self.lead.report(step, metrics)
        if save:
            self._save(step, work)

    def _save(self, step: int, work: bytes) -> None:
        shared = None if self.lead is None else self.lead.shared(step, work, self.updater.state(), self._evaluated)
        self.checkpoints.save(step, shared)

    def _evaluation_due(self, version: int) -> bool:
        due = is_due(self.config.evaluation.every, version, self._evaluated)
        if due:
            self._evaluated = version
        return due

    def _publish(self, version: int, evaluate: bool) -> float:
        """Gather on all ranks, hand over to the coordinator; returns the seconds that the learner was held."""
        started = time.monotonic()
        self._published = version
        stream = self.policy.full_parameters(self.wire_dtype)
        if self.lead is None:
            for _ in stream:
                pass
        else:
            self.lead.publish(version, stream, evaluate)
        return time.monotonic() - started

    def _end(self, step: int, interrupted: _InterruptFlag) -> None:
        # First of all: no wait for generators, however it ends, may cost what was learned.
        if self.checkpoints.enabled and self.checkpoints.last_step < step:
            self._save(step, b"" if self.lead is None else self.lead.work())
        self.checkpoints.close()
        if self.config.run.save_model and step > 0:
            self.policy.save_pretrained(f"{self.config.run.dir}/model")
        # A signal may have reached one rank and not yet another; what follows is collective.
        evaluate = agree(not interrupted.is_set()) and self.config.evaluation.every > 0
        if evaluate and self._published < step:
            self._publish(step, evaluate=False)
        if self.lead is None:
            return  # Rank 0 alone says how the run ended: an exit code here would have it stopped while it writes.
        preempted = interrupted.number == signal.SIGTERM and self.checkpoints.enabled
        self.lead.finish(step, evaluate, interrupted.is_set, dismiss=not preempted)
        stopped = interrupted.is_set()
        if not stopped and self.checkpoints.error is None:
            # Before report and advice: a run that is killed while it draws has nothing left to train.
            mark_finished(Path(self.config.run.dir), step)
        self.lead.close()
        if self.checkpoints.error is not None:
            raise CheckpointError(f"step {step} is not saved: {self.checkpoints.error}")
        if stopped and not preempted:
            raise KeyboardInterrupt


class _NothingToSave(BaseException):
    """SIGTERM came while the model was loaded."""


class _InterruptFlag:
    """Turns SIGINT and SIGTERM into a flag that the loop looks at between steps; a second one interrupts at once.

    So does the first one while the model loads, which takes minutes and leaves nothing to save.
    """

    def __init__(self) -> None:
        self._set = False
        self.loading = True
        """Until the first version is there."""
        self.number: int | None = None
        """The first signal."""
        self._before: dict[int, Any] = {}

    def is_set(self) -> bool:
        return self._set

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.loading and number == signal.SIGTERM:
            raise _NothingToSave
        if self.loading or self._set:
            raise KeyboardInterrupt
        self._set, self.number = True, number
        log.warning("%s: stopping after the step under way (again to stop at once)", signal.Signals(number).name)

    def __enter__(self) -> _InterruptFlag:
        handler: Callable[[int, Any], None] = self._on_signal
        self._before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
