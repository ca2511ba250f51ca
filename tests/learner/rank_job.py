"""What one rank of a test does: train on seeded batches; rank 0 writes metrics and weights. Run by test_ranks.py."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from async_rl.learner.ranks import RankContext, agree, broadcast_bytes, init_ranks
from tests.learner.helpers import make_config, make_groups
from tests.learner.resumed import train_on

if TYPE_CHECKING:
    from async_rl.learner.batch import PreparedBatch

STEPS = 3


def train(run: dict[str, Any], ctx: RankContext, out: Path) -> list[dict[str, float]]:
    """Run three steps from a model and sections; the metrics of each are returned and the weights saved to `out`."""
    from async_rl.learner.model import load_policy
    from async_rl.learner.update import Updater

    config = make_config(run["model"], **run["sections"])
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    metrics = []
    for step in range(1, STEPS + 1):
        batch = updater.prepare(make_groups(seed=step), step)
        if step == run.get("broken_step"):
            batch = with_nan(batch)
        metrics.append(updater.step(batch, step).resolve())
    policy.save_pretrained(out)
    return metrics


def with_nan(batch: PreparedBatch) -> PreparedBatch:
    """One behavior logprob, on whichever rank runs its sequence, is not a number."""
    logprobs = batch.behavior_logprobs.copy()
    logprobs[0] = np.nan
    return dataclasses.replace(batch, behavior_logprobs=logprobs)


class SlowLead:
    """Waits for its batch three times as long as a collective may take, looking at the stop flag meanwhile."""

    def next_batch(self, step: int, stop: Callable[[], bool]) -> Any:
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline and not stop():
            time.sleep(0.5)
        return make_groups(seed=step)


def long_wait(ctx: RankContext) -> list[int]:
    """Tickets of the batch that a rank gets after a long wait."""
    from async_rl.learner.loop import Loop, _InterruptFlag

    loop = Loop.__new__(Loop)
    loop.ctx, loop.lead = ctx, SlowLead() if ctx.rank == 0 else None  # type: ignore[assignment]
    return [group.ticket for group in loop._next_batch(1, _InterruptFlag()) or ()]


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, out = int(os.environ["RANK"]), Path(job["out"])
    if job["task"] == "fail" and rank == 1:
        sys.exit(3)
    ctx = init_ranks(make_config(run={"stall_timeout_s": 30.0}))
    if job["task"] == "wait":  # Only now: two processes may start further apart than this.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), ctx.group)
    match job["task"]:
        case "train":
            result: Any = {name: train(run, ctx, out / name) for name, run in job["runs"].items()}
        case "resume":
            config = make_config(job["model"], **job["sections"])
            result = train_on(config, ctx, job["last"])[0]
        case "talk":
            text = broadcast_bytes(b"\x00batch" * 1000 if rank == 0 else None)
            result = [len(text), text[:6].hex(), broadcast_bytes(b"" if rank == 0 else None).hex()]
            result += [agree(True), agree(rank == 0)]
        case "wait":
            result = long_wait(ctx)
        case "fail" | "sleep":
            (out / f"pid{rank}").write_text(str(os.getpid()))
            time.sleep(60)
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    ctx.close()
    os._exit(0)  # As the command line ends a rank, and for the same reason.


if __name__ == "__main__":
    main()
