"""Completions of very different duration, generators that are killed and a learner that crashes: no bias by length."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import Config
from tests.loop.rig import Worker, fleet, make_config
from tests.loop.test_resumed import Going

STEPS = 10
Completions = dict[int, tuple[tuple[int, ...], ...]]
"""Ticket -> token ids of each member."""


def completions(learners: Iterable[tuple[Going, int]]) -> Completions:
    """What was trained, of each learner up to a step; a ticket that is trained twice fails."""
    found: Completions = {}
    for learner, last in learners:
        for group in (group for batch in learner.batches[: last - learner.first_step + 1] for group in batch):
            assert group.ticket not in found, f"ticket {group.ticket} was trained twice"
            found[group.ticket] = tuple(tuple(member.completion_ids.tolist()) for member in group.members)
    return found


def settings(tmp_path: Path, port: int = 0) -> Config:
    """Lengths from 1 to 200 tokens, half of them below 12; a death is likely to hit those above 60."""
    engine = {"type": "simulated", "median_tokens": 12.0, "sigma": 1.2, "tokens_per_s": 250.0}
    return make_config(
        tmp_path,
        run={"steps": STEPS, "stall_timeout_s": 120.0},
        sampling={"max_completion_tokens": 200},
        generator={"slots": 8, "engine": engine},
        transport={"port": port, "heartbeat_s": 0.2, "heartbeat_timeout_s": 3.0, "connect_timeout_s": 120.0},
    )


async def undisturbed(config: Config) -> Completions:
    learner = Going(config, "run-0")
    async with fleet(config, learner.start(), "g0", "g1"):
        await learner.done(120.0)
    return completions([(learner, STEPS)])


async def kill_now_and_then(workers: list[Worker], config: Config, address: str) -> None:
    """One generator after the other dies in the middle of what it does, and another one comes in its place."""
    rng = np.random.default_rng(3)
    for number in range(4):
        await asyncio.sleep(rng.uniform(0.2, 0.4))
        await workers[number].kill()
        workers.append(Worker(config, address, f"h{number}"))


@pytest.mark.slow
async def test_kills_change_no_completion_that_is_trained(tmp_path: Path) -> None:
    """Ticket by ticket the same tokens, so the same distribution of lengths, as a run in which nobody died."""
    expected = await undisturbed(settings(tmp_path))
    first = Going(settings(tmp_path), "run-1")
    address = first.start()
    port = int(address.rsplit(":", 1)[1])
    async with fleet(first.config, address, "g0", "g1") as workers:
        await first.until(2)
        killing = asyncio.create_task(kill_now_and_then(workers, first.config, address))
        await first.until(5)
        await first.crash()
        second = Going(settings(tmp_path, port), "run-2", first.state_after(3, run_1=3))
        second.start()
        await second.done(120.0)
        await killing
    found = completions([(first, 3), (second, STEPS)])
    assert second.ledger.counts().dropped == {}
    lengths = sorted(len(ids) for members in found.values() for ids in members)
    assert found == expected
    assert lengths[0] < 5 and lengths[-1] > 100 and len(lengths) == STEPS * 4 * 4
    assert second.ledger.events["lost_leases"] > 0 or first.ledger.events["lost_leases"] > 0, "the kills hit work"
