"""A run under a virtual clock: the ledger, leasing and evaluations of a real run, with engines and learner that only
take time.

What happens, and in which order, is what `async_rl.learner.loop` does: take a batch, step, publish (waiting for the
publication before it), go on; a publication is transferred and loaded while the next step runs. Messages take no time,
but for a finished member and the work that comes in answer (`Costs.round_trip_s`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from async_rl.buffer import Ledger, LedgerSettings, TrajectoryGroup
from async_rl.config import Config, run_ahead
from async_rl.evaluation import is_due
from async_rl.protocol import Problem
from async_rl.simulate.clock import EventQueue
from async_rl.simulate.costs import Costs
from async_rl.simulate.fleet import VirtualFleet
from async_rl.simulate.lengths import LengthsOf, lengths_by_ticket
from async_rl.simulate.outcome import Mark, Outcome, StepRecord, enlarged, summarise
from async_rl.staleness import token_staleness

WARM_UP_SHARE = 0.15
"""Share of the steps that is simulated before counting begins; at least as many as it takes to fill the run-ahead."""
MOST_STEPS = 5000
SHRINK_ABOVE = 2
"""A simulation may take this many times plan.members before its fleet is shrunk."""
INSTANTS_PER_MEMBER, MOST_INSTANTS = 100, 100_000
"""A step that takes more instants than these together will never end: generators fail faster than they finish."""
_NO_PROMPT = np.zeros(0, dtype=np.int32)


class Effort(NamedTuple):
    """How little a simulation may do."""

    fewest_steps: int
    fills: int
    """The steps suffice to fill the run-ahead so many times."""
    fewest_slots: int
    """Slots below which no fleet is shrunk: the law of large numbers must still hold."""


FULL = Effort(fewest_steps=30, fills=0, fewest_slots=256)
DRAFT = Effort(fewest_steps=12, fills=4, fewest_slots=64)
"""Five times as cheap; gains of a few percent are within its noise."""


class Simulation:
    """One run of a number of steps; everything that it saw is kept."""

    def __init__(
        self, config: Config, costs: Costs, steps: int, seed: int = 0, lengths: LengthsOf | None = None
    ) -> None:
        """`lengths` replaces those drawn from `costs`; raises ValueError for settings that cannot make progress."""
        self.config, self.costs, self.steps = config, costs, steps
        self.events = EventQueue()
        # Without the end of the run, where generators run dry.
        settings = msgspec.structs.replace(LedgerSettings.of(config), total_steps=None)
        self.lengths = lengths or lengths_by_ticket(costs.lengths, [seed, 0])
        self.ledger = Ledger(settings, self._draw)
        self.fleet = VirtualFleet(config, costs, self.ledger, self.events, seed)
        evaluation_lengths = lengths_by_ticket(costs.lengths, [seed, 2])
        self._held_out = [
            _problem(f"e{i}", evaluation_lengths(i, config.evaluation.samples))
            for i in range(config.data.eval_problems)
        ]
        self.records: list[StepRecord] = []
        self.marks: list[Mark] = []
        """Totals at the end of each step; the first is the beginning of the run."""
        self.batches: list[tuple[TrajectoryGroup, ...]] | None = None
        """Set to a list to keep every batch."""
        self._waiting_since: float | None = None
        self._publishing = False
        self._held: int | None = None
        """Version that the learner holds until the publication before it is done."""
        self._held_since = 0.0
        self._evaluated = 0

    def run(self) -> Outcome:
        """Simulate all steps; raises RuntimeError if the run comes to a stand."""
        self.fleet.start()
        if self.config.evaluation.every > 0:
            self._evaluate(0)
        self.marks.append(self._mark())
        self._waiting_since = 0.0
        for _ in range(self.steps):
            self._run_step()
        return summarise(self.config, self.costs, self.records, self.marks, self.warm_up)

    def _run_step(self) -> None:
        """Go on until the next step ends."""
        target = len(self.marks) + 1
        for _ in range(INSTANTS_PER_MEMBER * _members(self.config) + MOST_INSTANTS):
            self._act()
            if not self.events.run_instant():
                break
            if len(self.marks) == target:
                return
        why = self.ledger.describe_wait(self.events.now)
        raise RuntimeError(f"the simulation stands still after {len(self.records)} steps: {why}")

    @property
    def warm_up(self) -> int:
        """Steps that are not counted."""
        filling = 2 * (self.ledger.settings.run_ahead + 1)
        return min(max(filling, int(self.steps * WARM_UP_SHARE)), self.steps // 2)

    # --- learner --------------------------------------------------------------------------------

    def _act(self) -> None:
        """At the end of an instant: hand out work, and take a batch if the learner waits for one.

        Taking a batch changes no position, so no generator can take more work for it.
        """
        self.fleet.hand_out()
        if self._waiting_since is None or not self.ledger.ready():
            return
        now = self.events.now
        groups = self.ledger.take_batch(now)
        assert groups is not None, "ready was checked"
        record = self._record(groups, now - self._waiting_since)
        self._waiting_since = None
        self.events.after(record.train_s, lambda: self._trained(groups, record))

    def _record(self, groups: Sequence[TrajectoryGroup], wait_s: float) -> StepRecord:
        """Staleness of every token of the batch, and how long the step takes."""
        step, ages = len(self.records) + 1, Counter[int]()
        for group in groups:
            for member in group.members:
                for span in member.versions:
                    ages[token_staleness(step, span.version)] += span.end - span.start
        if self.batches is not None:
            self.batches.append(tuple(groups))
        tokens = ages.total()
        return StepRecord(step, wait_s, self.costs.train_s(self.config, tokens), tokens, dict(ages))

    def _trained(self, groups: Sequence[TrajectoryGroup], record: StepRecord) -> None:
        self.ledger.trained(groups)
        self.records.append(record)
        version = record.step
        self.fleet.evaluations.tick(self.events.now)
        if version % self.config.staleness.publish_every == 0:
            self._hold(version)
        else:
            self._end_step()

    def _end_step(self) -> None:
        self.marks.append(self._mark())
        self._waiting_since = self.events.now

    # --- publication ----------------------------------------------------------------------------

    def _hold(self, version: int) -> None:
        """The learner is held until the last publication is done, then while it gathers."""
        self._held = version
        if not self._publishing:
            self._gather()

    def _gather(self) -> None:
        version, self._held = self._held, None
        assert version is not None, "only a held learner gathers"
        self._publishing = True
        self.events.after(self.costs.gather_s, lambda: self._send(version))

    def _send(self, version: int) -> None:
        self.events.after(self.costs.transfer_s, lambda: self.fleet.load(version, lambda: self._published(version)))
        self._end_step()

    def _published(self, version: int) -> None:
        self._publishing = False
        if is_due(self.config.evaluation.every, version, self._evaluated):
            self._evaluated = version
            self._evaluate(version)
        if self._held is not None:
            self._gather()

    def _evaluate(self, version: int) -> None:
        self.fleet.evaluate(version, self._held_out)

    # --- parts ----------------------------------------------------------------------------------

    def _draw(self) -> Problem:
        ticket = self.ledger.issued
        return _problem(str(ticket), self.lengths(ticket, self.ledger.settings.num_members))

    def _mark(self) -> Mark:
        slot_s, busy_slot_s = self.fleet.slot_seconds()
        fleet = self.fleet
        return Mark(
            time=self.events.now,
            slot_s=slot_s,
            busy_slot_s=busy_slot_s,
            generated_tokens=fleet.generated_tokens,
            dropped_tokens=fleet.dropped_tokens + self.ledger.dropped_tokens,
            lost_tokens=fleet.lost_tokens,
            failures=fleet.failures,
        )


def _problem(name: str, lengths: tuple[int, ...]) -> Problem:
    """A problem whose answer is how long the completions of its members are."""
    return Problem(id=name, prompt="", prompt_ids=_NO_PROMPT, answer=lengths)


def steps_for(config: Config, effort: Effort = FULL) -> int:
    """Steps that train about plan.members members: at least as many as the effort says, at most `MOST_STEPS`."""
    filled = effort.fills * (run_ahead(config.staleness, config.learner.batch_groups) + 1)
    return min(MOST_STEPS, max(effort.fewest_steps, filled, config.plan.members // _members(config)))


def simulated_count(config: Config, effort: Effort = FULL) -> int:
    """Generators of the fleet that is simulated in place of a large one."""
    factor = effort.fewest_steps * _members(config) / (SHRINK_ABOVE * config.plan.members)
    least = -(-effort.fewest_slots // config.generator.slots)
    return min(config.generator.count, max(least, round(config.generator.count / max(1.0, factor))))


def simulated_members(config: Config, effort: Effort = FULL) -> int:
    """Members that `simulate` trains, about: what it costs."""
    share = simulated_count(config, effort) / config.generator.count
    return round(steps_for(config, effort) * _members(config) * share)


def simulate(config: Config, costs: Costs, seed: int = 0, effort: Effort = FULL) -> Outcome:
    """What a run of `config` on machines of these costs would do, after its warm-up.

    A fleet whose fewest steps would train several times plan.members is simulated as a smaller one of the same
    proportions, and its rates are multiplied again.
    """
    count = simulated_count(config, effort)
    if count == config.generator.count:
        return Simulation(config, costs, steps_for(config, effort), seed).run()
    factor = config.generator.count / count
    small, slower = _shrunk(config, costs, count, factor)
    return enlarged(Simulation(small, slower, steps_for(small, effort), seed).run(), factor, config)


def _members(config: Config) -> int:
    """Of one batch."""
    return config.learner.batch_groups * config.sampling.group_size


def _shrunk(config: Config, costs: Costs, count: int, factor: float) -> tuple[Config, Costs]:
    """Batch, window, held-out problems and learner in proportion to the fleet."""

    def less(number: int) -> int:
        return max(1, round(number / factor))

    groups = less(config.learner.batch_groups)
    window = config.staleness.reorder_window
    if window is not None:
        # Batch and window are rounded apart: the steps of run-ahead that the window takes must stay the same.
        taken = -(-(window - 1) // config.learner.batch_groups)
        window = min(max(less(window), (taken - 1) * groups + 2), taken * groups + 1)
    learner = msgspec.structs.replace(config.learner, batch_groups=groups)
    small = msgspec.structs.replace(
        config,
        generator=msgspec.structs.replace(config.generator, count=count),
        learner=learner,
        staleness=msgspec.structs.replace(config.staleness, reorder_window=window),
        data=msgspec.structs.replace(config.data, eval_problems=less(config.data.eval_problems)),
    )
    # A batch that does not shrink by exactly the factor takes as long as the whole one would.
    rounding = groups * factor / config.learner.batch_groups
    return small, msgspec.structs.replace(costs, learner_tokens_per_s=costs.learner_tokens_per_s * rounding / factor)
