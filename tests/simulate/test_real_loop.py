"""The simulator against the real loop: sockets, coordinator, generators, and the engine that sleeps."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config
from async_rl.leasing import member_seed
from async_rl.simulate import Simulation
from async_rl.simulate.lengths import LengthsOf
from async_rl.staleness import token_staleness
from tests.loop.rig import Learner, fleet, make_config
from tests.simulate.settings import make_costs

STEPS, RATE, MEDIAN, SIGMA = 40, 100.0, 12.0, 0.6
Batches = Sequence[tuple[TrajectoryGroup, ...]]
TOLERANCE = 0.15
"""Of the tokens, by staleness: messages take time in the real loop, and the machine may be busy."""


def same_lengths(config: Config) -> LengthsOf:
    """What the simulated engine draws from the seed of each member's first lease."""

    def draw(ticket: int, members: int) -> tuple[int, ...]:
        seeds = [member_seed(config.run.seed, "train", ticket, member) for member in range(members)]
        normal = [np.random.default_rng(seed).standard_normal() for seed in seeds]
        wanted = (max(1, round(MEDIAN * math.exp(SIGMA * z))) for z in normal)
        return tuple(min(length, config.sampling.max_completion_tokens) for length in wanted)

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("overdue", ["mask", "wait"])
async def test_staleness_and_order_are_those_of_the_real_loop(tmp_path: Path, overdue: str) -> None:
    engine = {"type": "simulated", "median_tokens": MEDIAN, "sigma": SIGMA, "tokens_per_s": RATE}
    config = make_config(
        tmp_path,
        run={"steps": STEPS},
        staleness={"max_staleness": 2, "overdue": overdue},
        # Without slots of its own the rig's engine would run prefetched requests at once.
        generator={"count": 2, "slots": 8, "prefetch": 0, "engine": engine},
        evaluation={"every": 0},
        transport={"heartbeat_timeout_s": 20.0},
    )
    learner = Learner(config, evaluates=False)
    async with fleet(config, learner.start(), "g0", "g1"):
        await asyncio.wait_for(learner.done(120.0), 150.0)
    costs = make_costs(tokens_per_s=RATE, learner_tokens_per_s=1e9, transfer_s=0.004)
    simulation = Simulation(config, costs, STEPS, lengths=same_lengths(config))
    simulation.batches = []
    simulation.run()
    counted = range(5, STEPS)  # The last tickets of a real run are taken when nothing is issued any more.
    real, simulated = (ages(batches, counted) for batches in (learner.batches, simulation.batches))
    assert len(learner.batches) == len(simulation.records) == STEPS
    distance = sum(abs(real[age] - simulated[age]) for age in real | simulated) / 2
    assert distance < TOLERANCE, (real, simulated)
    assert max(real) >= 2, "generators never ran ahead"
    first = {g.ticket: tuple(len(m.completion_ids) for m in g.members) for b in learner.batches for g in b}
    again = {g.ticket: tuple(len(m.completion_ids) for m in g.members) for b in simulation.batches for g in b}
    assert all(first[ticket] == again[ticket] for ticket in first.keys() & again.keys())


def ages(batches: Batches, counted: range) -> dict[int, float]:
    """Staleness -> share of the tokens of the counted steps, 0 for others."""
    found: Counter[int] = Counter()
    for step, batch in enumerate(batches, start=1):
        if step in counted:
            for group in batch:
                for member in group.members:
                    for span in member.versions:
                        found[token_staleness(step, span.version)] += span.end - span.start
    return defaultdict(float, {age: number / found.total() for age, number in found.items()})
