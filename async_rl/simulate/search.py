"""The best settings for a fleet: a few values of each knob, one knob after the other, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from async_rl.config import Config, ConfigError, check_config, reorder_window
from async_rl.config.schema import VllmEngine
from async_rl.simulate.costs import Costs
from async_rl.simulate.outcome import Outcome
from async_rl.simulate.simulator import DRAFT, FULL, Effort, simulate, simulated_members

WITHIN = 0.02
"""Of the values of a knob that come this close to the best, the first (freshest data, smallest batch) is taken."""
STALENESS = (0, 1, 2, 3, 4, 6, 8)
PERIODS = (1, 2, 4)
BATCHES = (0.5, 1, 2, 4)
"""Multiples of the batch as given."""
SPLITS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Multiples of the ranks at which both sides are equally fast, where there are too many splits to try all."""
MOST_SPLITS = 10
PASSES = 2
DRAFT_SHARE = 0.2
"""Of plan.members, in the simulations that lead to the neighbourhood of the best settings."""
LEAST_MEMBERS = 100
"""Lower bound of plan.members."""

Settings = Mapping[str, object]
"""Setting path -> value."""
Knob = Callable[[Config], "list[tuple[float, Settings]]"]
"""Settings -> values to try in their place."""


class Candidate(NamedTuple):
    """Settings and what they would do."""

    label: float
    """Value of the knob that is varied."""
    config: Config
    outcome: Outcome


class Found(NamedTuple):
    """Result of a search."""

    given: Candidate
    synchronous: Candidate
    best: Candidate
    curves: dict[str, list[Candidate]]
    """Knob -> its values around the best settings."""


def replaced(config: Config, changes: Settings) -> Config:
    """The settings with some changed; raises ConfigError where the loader would refuse them."""
    for path, value in changes.items():
        section, _, name = path.partition(".")
        part = msgspec.structs.replace(getattr(config, section), **{name: value})
        config = msgspec.structs.replace(config, **{section: part})
    check_config(config)
    return config


def synchronous(config: Config) -> Config:
    """The same fleet and batch without any staleness: learner and generators in turns."""
    return replaced(
        config,
        {
            "staleness.max_staleness": 0,
            "staleness.publish_every": 1,
            "staleness.overdue": "mask",
            "staleness.reorder_window": None,
        },
    )


def devices_of_generator(config: Config) -> int:
    """Devices that one generator takes."""
    engine = config.generator.engine
    return engine.tensor_parallel if isinstance(engine, VllmEngine) else 1


def devices(config: Config) -> int:
    """Devices to split: plan.devices, else what the settings use."""
    used = config.generator.count * devices_of_generator(config) + config.learner.ranks
    return config.plan.devices or used


class OutOfBudget(Exception):
    """A search has simulated as many members as it may."""


class Search:
    """Simulates each configuration once, and with a budget no more members than that after the first."""

    def __init__(
        self,
        costs: Costs,
        seed: int = 0,
        progress: Callable[[str], None] = lambda text: None,
        effort: Effort = FULL,
        budget: int | None = None,
    ) -> None:
        self.costs, self.seed, self.progress, self.effort, self.budget = costs, seed, progress, effort, budget
        self.spent = 0
        """Members simulated."""
        self._known: dict[bytes, Outcome] = {}

    def outcome(self, config: Config) -> Outcome:
        """What a configuration would do; raises OutOfBudget."""
        key = msgspec.msgpack.encode(config)
        if key not in self._known:
            members = simulated_members(config, self.effort)
            if self.budget is not None and self._known and self.spent + members > self.budget:
                raise OutOfBudget
            self.spent += members
            self.progress(f"simulation {len(self._known) + 1}")
            self._known[key] = simulate(config, self.costs, self.seed, self.effort)
        return self._known[key]

    def curve(self, config: Config, values: Iterable[tuple[float, Settings]]) -> list[Candidate]:
        """The configurations that the loader accepts, in the order of `values`."""
        found = []
        for label, changes in values:
            try:
                changed = replaced(config, changes)
            except ConfigError:
                continue
            found.append(Candidate(label, changed, self.outcome(changed)))
        return found

    def run(self, config: Config) -> Found:
        """Vary every knob in turn and keep of each the least value that is close to the best.

        Twice in drafts, which find the neighbourhood, then once in full.
        """
        knobs = self._knobs(config)
        best = replaced(self._drafted(config, knobs), {"plan.members": config.plan.members})
        best = self._improved(best, knobs)
        curves = {name: self.curve(best, values(best)) for name, values in knobs.items()}
        return Found(
            given=Candidate(0, config, self.outcome(config)),
            synchronous=Candidate(0, synchronous(config), self.outcome(synchronous(config))),
            best=Candidate(0, best, self.outcome(best)),
            curves={name: curve for name, curve in curves.items() if len(curve) > 1},
        )

    def _drafted(self, config: Config, knobs: Mapping[str, Knob]) -> Config:
        """The best settings as far as cheap simulations tell."""
        draft = Search(self.costs, self.seed, self.progress, DRAFT)
        best = replaced(config, {"plan.members": max(LEAST_MEMBERS, int(DRAFT_SHARE * config.plan.members))})
        for _ in range(PASSES):
            best = draft._improved(best, knobs)
        return best

    def _improved(self, best: Config, knobs: Mapping[str, Knob]) -> Config:
        """Of every knob in turn the least value that is close to the best."""
        for values in knobs.values():
            curve = self.curve(best, values(best))
            best = choose(curve).config if curve else best
        return best

    def _knobs(self, given: Config) -> dict[str, Knob]:
        groups = given.learner.batch_groups
        batches = sorted({max(1, round(groups * multiple)) for multiple in BATCHES})
        return {
            "learner.ranks": self._splits,
            "staleness.max_staleness": lambda c: [(s, {"staleness.max_staleness": s}) for s in STALENESS],
            "learner.batch_groups": lambda c: [(b, {"learner.batch_groups": b}) for b in batches],
            "staleness.publish_every": lambda c: [(p, {"staleness.publish_every": p}) for p in PERIODS],
            "staleness.reorder_window": lambda c: [
                (w, {"staleness.reorder_window": w}) for w in _windows(c) if c.staleness.overdue == "wait"
            ],
        }

    def _splits(self, config: Config) -> list[tuple[float, Settings]]:
        """Learner ranks, with as many generators as the other devices make."""
        total, each = devices(config), devices_of_generator(config)
        most = total - each
        ranks: Iterable[int] = range(1, most + 1)
        if most > MOST_SPLITS:
            slots = config.generator.slots
            generator = slots * self.costs.rate(slots) / each
            even = total * generator / (generator + self.costs.learner_tokens_per_s)
            ranks = sorted({min(most, max(1, round(even * multiple))) for multiple in SPLITS})
        return [(r, {"learner.ranks": r, "generator.count": (total - r) // each}) for r in ranks]


def _windows(config: Config) -> list[int]:
    """The widest first: every batch of tickets in the window costs a step of run-ahead, and makes the data fresher."""
    groups = config.learner.batch_groups
    return sorted({1, groups + 1, 2 * groups + 1, reorder_window(config.staleness, groups)}, reverse=True)


def value(outcome: Outcome) -> float:
    """What is maximised: tokens in the loss for the money where prices are given, else for the time."""
    if outcome.cost_per_million is not None:
        return 1 / outcome.cost_per_million if outcome.cost_per_million > 0 else 0.0
    return outcome.trained_tokens_per_s


def choose(curve: list[Candidate]) -> Candidate:
    """The first candidate that comes close to the best."""
    most = max(value(candidate.outcome) for candidate in curve)
    return next(candidate for candidate in curve if value(candidate.outcome) >= (1 - WITHIN) * most)
