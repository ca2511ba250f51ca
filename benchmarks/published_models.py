"""What `benchmarks/published.py` fits: a publication's fleet as settings and costs of the simulator.

A model is called with `learner_to_generators`, the learner's rate as a multiple of what all slots together sample, and
returns one figure for each published row.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from async_rl.config import Config, build_config
from async_rl.simulate import Costs, Lognormal, Outcome, Simulation

AREAL_STALENESS = (0, 1, 2, 4, 8, 16)
VERL_THRESHOLDS = (0.0, 0.1, 0.3, 0.5)
GROUP_SIZE = 16


class Curve(Protocol):
    """learner_to_generators, assumptions that differ -> one figure a row."""

    def __call__(self, learner_to_generators: float, **changes: Any) -> list[float]: ...


def fleet(longest: int, staleness: dict[str, Any], batch_groups: int, count: int, slots: int) -> Config:
    """Settings of a fleet that keeps overdue tokens and holds no evaluations."""
    return build_config(
        {
            "model": {"path": "none"},
            "environment": {"type": "arithmetic"},
            "evaluation": {"every": 0},
            "sampling": {"group_size": GROUP_SIZE, "max_completion_tokens": longest},
            "staleness": {"overdue": "keep"} | staleness,
            "learner": {"batch_groups": batch_groups},
            "generator": {"count": count, "slots": slots, "engine": {"type": "simulated"}},
        },
        (),
    )


def run(config: Config, costs: Costs, steps: int) -> Outcome:
    """One simulation; the same lengths for every row of a table."""
    return Simulation(config, costs, steps).run()


def areal(
    learner_to_generators: float,
    *,
    groups: int = 512,
    sigma: float = 0.8,
    slowdown: float = 0.01,
    median: float = 2500.0,
    slots: int = 128,
    steps: int = 40,
) -> list[float]:
    """Tokens/s for each maximum staleness, as a share of what all slots together sample."""
    longest, third = 8192, 3
    costs = Costs(
        tokens_per_s=1.0, slowdown=slowdown, lengths=Lognormal(median, sigma, longest), learner_tokens_per_s=1.0
    )
    figures = []
    for staleness in AREAL_STALENESS:
        config = fleet(longest, {"max_staleness": staleness}, round(groups / third), 6 // third, slots)
        limit = costs.generator_limit(config)
        learner = msgspec.structs.replace(costs, learner_tokens_per_s=learner_to_generators * limit)
        figures.append(run(config, learner, steps).consumed_tokens_per_s / limit)
    return figures


def verl(
    learner_to_generators: float,
    *,
    sigma: float = 0.8,
    slowdown: float = 0.01,
    median: float = 2500.0,
    intervals: int = 20,
) -> list[float]:
    """Hours of 400 intervals of 512 prompts for each staleness threshold.

    The learner takes 106.07 s for an interval: with the mean length this fixes its rate, and the ratio the generators'.
    """
    longest, tenths, engines, slots = 28 * 1024, 10, 5, 256
    share = engines / 16
    prompts = round(512 * share / tenths)
    lengths = Lognormal(median, sigma, longest)
    interval_tokens = 512 * share * GROUP_SIZE * lengths.mean()
    train_s, publication_s = 106.07, 4.1
    costs = Costs(
        tokens_per_s=1.0,
        slowdown=slowdown,
        lengths=lengths,
        learner_tokens_per_s=interval_tokens / train_s,
        gather_s=publication_s,
        pause_s=publication_s,
    )
    figures = []
    for threshold in VERL_THRESHOLDS:
        ahead = tenths - 1 + round(tenths * threshold)
        staleness = {"max_staleness": ahead, "publish_every": tenths}
        config = fleet(longest, staleness, prompts, engines, slots)
        wanted = costs.learner_tokens_per_s / learner_to_generators
        faster = msgspec.structs.replace(costs, tokens_per_s=wanted / costs.generator_limit(config))
        outcome = run(config, faster, intervals * tenths)
        seconds = interval_tokens / outcome.consumed_tokens_per_s
        figures.append(400 * seconds / 3600)
    return figures
