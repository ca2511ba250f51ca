"""What the fleet has done, summed over generators that come and go."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from async_rl.metrics import Metrics
from async_rl.protocol import GeneratorStats, Trajectory

GONE_KEPT = 1000
"""Processes whose totals are remembered after they left: one that was cut off comes back."""


class FleetMeter:
    """Turns totals of single processes into totals of the fleet, and these into rates since the last `collect`."""

    def __init__(self, has_baselines: bool = False) -> None:
        self._has_baselines = has_baselines
        self._last: dict[tuple[str, str], GeneratorStats] = {}
        self._gone: dict[tuple[str, str], GeneratorStats] = {}
        """Last totals of processes that left, oldest leave first."""
        self.totals: Counter[str] = Counter()
        """Sums over all processes that ever were, each from its start or, if older than the learner, its coming."""
        self._collected: Counter[str] = Counter()
        self._generated_tokens = self._baseline_tokens = self._dropped_tokens = self._ledger_dropped_tokens = 0
        self._rewards: list[float] = []

    def joined(self, name: str, incarnation: str, is_new: bool) -> None:
        """A process said Hello, perhaps not for the first time; `is_new`: it has worked for no learner before."""
        process = (name, incarnation)
        if process in self._last:
            return
        before = self._gone.pop(process, GeneratorStats() if is_new else None)
        if before is not None:
            self._last[process] = before

    def update(self, name: str, incarnation: str, stats: GeneratorStats) -> None:
        """New totals of one process. The first ones of a process with a past that is unknown here count for nothing."""
        before = self._last.get((name, incarnation), stats)
        for field in msgspec.structs.fields(GeneratorStats):
            self.totals[field.name] += getattr(stats, field.name) - getattr(before, field.name)
        self._last[name, incarnation] = stats

    def forget(self, name: str, incarnation: str) -> None:
        """The process is gone; its totals stay counted, and it is counted on from them if it comes back."""
        if (last := self._last.pop((name, incarnation), None)) is not None:
            self._gone[name, incarnation] = last
            if len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]

    def arrived(self, trajectory: Trajectory, kind: Literal["train", "baseline", "eval"], wanted: bool) -> None:
        """A trajectory came in; an unwanted one (late, duplicate, of a lost future) counts as dropped."""
        self._generated_tokens += len(trajectory.completion_ids)
        self._dropped_tokens += 0 if wanted else len(trajectory.completion_ids)
        self._baseline_tokens += len(trajectory.completion_ids) if wanted and kind == "baseline" else 0
        if wanted and kind == "train" and trajectory.reward is not None:
            self._rewards.append(trajectory.reward)

    def collect(self, elapsed_s: float, ledger_dropped_tokens: int) -> Metrics:
        """Rates over the `elapsed_s` seconds since the last call; the ledger's count is a total."""
        metrics = Metrics()
        delta = Counter({name: total - self._collected[name] for name, total in self.totals.items()})
        self._collected = Counter(self.totals)
        metrics.mean("throughput/generated_tokens_per_s", self._generated_tokens, elapsed_s)
        dropped = self._dropped_tokens + ledger_dropped_tokens - self._ledger_dropped_tokens
        metrics.mean("throughput/dropped_tokens_per_s", dropped, elapsed_s)
        if self._has_baselines:
            metrics.mean("throughput/baseline_tokens_per_s", self._baseline_tokens, elapsed_s)
        if delta["slot_s"] > 0:
            metrics.mean("generator/idle_share", delta["idle_slot_s"], delta["slot_s"])
        if delta["round_trips"] > 0:
            metrics.mean("generator/round_trip_s", delta["round_trip_s"], delta["round_trips"])
        metrics.mean("reward/sampled_mean", sum(self._rewards), len(self._rewards))
        self._generated_tokens = self._baseline_tokens = self._dropped_tokens = 0
        self._ledger_dropped_tokens = ledger_dropped_tokens
        self._rewards.clear()
        return metrics
