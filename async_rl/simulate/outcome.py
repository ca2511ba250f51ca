"""What a simulated run did: per step, and in the figures that a real run reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from async_rl.config import Config, age_limit, has_baseline
from async_rl.simulate.costs import Costs

HOUR_S = 3600.0


class StepRecord(NamedTuple):
    """One step."""

    step: int
    wait_s: float
    """The learner waiting for the batch."""
    train_s: float
    tokens: int
    """Completion tokens of the batch, overdue ones included."""
    ages: dict[int, int]
    """Staleness -> tokens."""


class Mark(NamedTuple):
    """Totals since the beginning."""

    time: float
    slot_s: float
    busy_slot_s: float
    generated_tokens: int
    dropped_tokens: int
    lost_tokens: int
    failures: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run after its warm-up, named as in the metrics of a real run where these have it."""

    steps: int
    seconds: float
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    """Of tokens that enter the loss."""
    consumed_tokens_per_s: float
    """Of all tokens of the batches, overdue ones included."""
    dropped_tokens_per_s: float
    """Overdue and masked, arrived and not wanted, or of groups that were dropped for equal rewards."""
    lost_tokens_per_s: float
    """Sampled by generators that failed before they were sent."""
    overdue_share: float
    """Of the batches' tokens, older than max_staleness."""
    wait_share: float
    idle_share: float
    publish_share: float
    """Of the time, the learner held by publications."""
    staleness: dict[int, float]
    """Staleness -> share of the tokens in the loss."""
    ideal_tokens_per_s: float
    """The smaller of what the generators could sample and the learner could train."""
    limit: str
    """Which of the two it is: 'generators' or 'learner'."""
    failures: int
    cost_per_million: float | None
    """Price of a million tokens in the loss; None without prices."""

    @property
    def ideal_share(self) -> float:
        """Tokens in the loss per second as a share of the ideal limit."""
        return self.trained_tokens_per_s / self.ideal_tokens_per_s

    @property
    def consumed_share(self) -> float:
        """The same with the tokens that were masked for their age: what both sides worked for."""
        return self.consumed_tokens_per_s / self.ideal_tokens_per_s

    @property
    def mean_staleness(self) -> float:
        """Over the tokens in the loss."""
        return sum(age * share for age, share in self.staleness.items())

    @property
    def largest_staleness(self) -> int:
        """Of a token in the loss."""
        return max(self.staleness, default=0)


def summarise(
    config: Config, costs: Costs, records: Sequence[StepRecord], marks: Sequence[Mark], warm_up: int
) -> Outcome:
    """Figures of all steps after the warm-up."""
    counted, first, last = records[warm_up:], marks[warm_up], marks[len(records)]
    seconds = last.time - first.time
    ages: Counter[int] = Counter()
    for record in counted:
        ages.update(record.ages)
    tokens, bound = ages.total(), config.staleness.max_staleness
    overdue = sum(number for age, number in ages.items() if age > bound)
    most = age_limit(config)
    ages = Counter({age: number for age, number in ages.items() if most is None or age <= most})
    in_loss, masked = ages.total(), tokens - ages.total()
    train_s, wait_s = (sum(getattr(record, name) for record in counted) for name in ("train_s", "wait_s"))
    slot_s = last.slot_s - first.slot_s
    size = config.sampling.group_size
    trained_share = size / (size + has_baseline(config.algorithm))
    limits = {"generators": costs.generator_limit(config) * trained_share, "learner": tokens / train_s}
    limit = min(limits, key=limits.__getitem__)
    return Outcome(
        steps=len(counted),
        seconds=seconds,
        generated_tokens_per_s=(last.generated_tokens - first.generated_tokens) / seconds,
        trained_tokens_per_s=in_loss / seconds,
        consumed_tokens_per_s=tokens / seconds,
        dropped_tokens_per_s=(masked + last.dropped_tokens - first.dropped_tokens) / seconds,
        lost_tokens_per_s=(last.lost_tokens - first.lost_tokens) / seconds,
        overdue_share=overdue / tokens,
        wait_share=wait_s / seconds,
        idle_share=1 - (last.busy_slot_s - first.busy_slot_s) / slot_s if slot_s else 0.0,
        publish_share=max(0.0, 1 - (wait_s + train_s) / seconds),
        staleness={age: number / in_loss for age, number in sorted(ages.items())} if in_loss else {},
        ideal_tokens_per_s=limits[limit],
        limit=limit,
        failures=last.failures - first.failures,
        cost_per_million=_cost(config, in_loss / seconds),
    )


def enlarged(outcome: Outcome, factor: float, config: Config) -> Outcome:
    """The outcome of a fleet `factor` times as large, with the settings `config`."""
    rates = [name for name in outcome.__struct_fields__ if name.endswith("_per_s")]
    larger = {name: getattr(outcome, name) * factor for name in rates}
    return msgspec.structs.replace(
        outcome,
        **larger,
        failures=round(outcome.failures * factor),
        cost_per_million=_cost(config, larger["trained_tokens_per_s"]),
    )


def _cost(config: Config, tokens_per_s: float) -> float | None:
    plan = config.plan
    if plan.generator_price is None or plan.learner_price is None or not tokens_per_s:
        return None
    hourly = config.generator.count * plan.generator_price + config.learner.ranks * plan.learner_price
    return hourly / HOUR_S / tokens_per_s * 1e6
