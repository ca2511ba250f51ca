"""What to change: one sentence on the bottleneck during a run, and after it changes with the gain to expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from async_rl.addresses import is_loopback
from async_rl.config import Config, ConfigError, has_baseline, run_ahead
from async_rl.config.threads import usable_cores

if TYPE_CHECKING:
    from async_rl.simulate.suggest import Suggestion

WORTH_SAYING = 0.15
"""Shares of the time below this are not worth a change."""
PREDICTED_MEMBERS = 2000
"""Members that each simulation of the advice trains, about."""
BUDGET, BUDGET_DURING_A_RUN = 40_000, 10_000
"""Members that all simulations of one advice train together, at some 20,000 a second of an idle core."""
FIRST_STEP = 16
"""At which a run's own metrics are simulated first; then at each doubling of it."""


def advice_after(run_dir: Path, config: Config, devices: int | None = None) -> list[str]:
    """Numbered changes, best first, each with what a simulation calibrated on the run's metrics predicts.

    None takes more than `devices` devices. A run that is too short to say what things take gets none.
    """
    found = _suggestions(run_dir, config, devices, BUDGET)
    return [f"{number}. {suggestion.sentence}" for number, suggestion in enumerate(found, start=1)]


def _suggestions(run_dir: Path, config: Config, devices: int | None, budget: int) -> list[Suggestion]:
    from async_rl.simulate.calibrate import costs_from_run
    from async_rl.simulate.search import Search
    from async_rl.simulate.simulator import DRAFT
    from async_rl.simulate.suggest import suggest

    try:
        costs = costs_from_run(run_dir)
    except ConfigError:
        return []
    plan = msgspec.structs.replace(config.plan, members=PREDICTED_MEMBERS)
    search = Search(costs, effort=DRAFT, budget=budget)
    return suggest(msgspec.structs.replace(config, plan=plan), search, devices)


def devices_here(config: Config, gpus: int) -> int | None:
    """Devices for learner ranks and generators together: GPUs of this machine, or its cores where there are none.

    None where generators may run on other machines: the learner listens beyond loopback.
    """
    return (gpus or usable_cores()) if is_loopback(config.transport.host) else None


class Predictions:
    """During a run: what the best changes would gain, simulated on the metrics so far at a few of its steps."""

    def __init__(self, run_dir: Path, config: Config, devices: int | None) -> None:
        self.run_dir, self.config, self.devices = run_dir, config, devices
        self.sentence = ""
        """The best setting and the best machine; empty: nothing is known to gain."""
        self._next = FIRST_STEP

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """After the metrics of `step` were written; a balanced run is not simulated."""
        if step < self._next:
            return
        while self._next <= step:
            self._next *= 2
        self.sentence = ""
        shares = (
            values.get("learner/wait_share", 0.0),
            values.get("generator/idle_share", 0.0),
            _publish_share(values),
        )
        if max(shares) < WORTH_SAYING:
            return
        found = _suggestions(self.run_dir, self.config, self.devices, BUDGET_DURING_A_RUN)
        self.sentence = " or ".join(s.short for s in _first_of_each_kind(found))


def _first_of_each_kind(found: Sequence[Suggestion]) -> list[Suggestion]:
    """The best setting and the best machine of those that gain."""
    machines = ("generator.count", "learner.ranks")
    gaining = [s for s in found if s.gain > 0 and not s.reason]
    kinds = (
        [s for s in gaining if any(path in machines for path in s.changes) is machine] for machine in (False, True)
    )
    return [kind[0] for kind in kinds if kind]


def bottleneck_sentence(values: Mapping[str, float], config: Config, predicted: str = "") -> str:
    """The largest of waiting, idling and publishing, as seen in the last step's metrics, and what to change.

    `predicted` (of `Predictions`) stands in place of the general advice: a number says more.
    """
    sentence = _bottleneck(values, config)
    problem, _, _ = sentence.partition(": ")
    nothing_to_gain = problem == "Balanced" or values.get("generator/count") == 0
    return sentence if nothing_to_gain or not predicted else f"{problem}; predicted gain: {predicted}."


def _bottleneck(values: Mapping[str, float], config: Config) -> str:
    if "learner/wait_share" not in values:
        return "Waiting for the first step."
    wait = values["learner/wait_share"]
    idle = values.get("generator/idle_share", 0.0)
    publish = _publish_share(values)
    if max(wait, idle, publish) < WORTH_SAYING:
        return f"Balanced: the learner waits {wait:.0%} of the time, generators idle {idle:.0%}."
    if values.get("generator/count") == 0:
        return f"No generator is registered, and the learner waits {wait:.0%} of the time: start async-rl generator."
    if publish >= max(wait, idle):
        return _publications(publish, config)
    if config.staleness.max_staleness == 0 and min(wait, idle) >= WORTH_SAYING:
        return (
            f"Synchronous: the learner waits {wait:.0%} and generators idle {idle:.0%} of the time, in "
            "turns; staleness.max_staleness >= 1 lets them overlap."
        )
    if min(wait, idle) >= WORTH_SAYING:
        return (
            f"The learner waits {wait:.0%} while generators idle {idle:.0%}: the longest completions hold both up; "
            "raise staleness.max_staleness, or make learner.batch_groups x sampling.group_size several times the slots."
        )
    if wait >= idle:
        return (
            f"The learner waits {wait:.0%} of the time: generation is the bottleneck; add generators or "
            "generator.slots, or raise staleness.max_staleness."
        )
    return _idle(idle, values, config)


def _publish_share(values: Mapping[str, float]) -> float:
    step_s = values.get("time/step_s", 0.0)
    return values.get("time/publish_s", 0.0) / step_s if step_s > 0 else 0.0


def _publications(share: float, config: Config) -> str:
    wire = config.weights.wire_dtype or config.model.dtype
    half = " or set weights.wire_dtype = 'bfloat16'" if wire == "float32" else ""
    return f"Publications hold the learner {share:.0%} of the time: raise staleness.publish_every{half}."


def _idle(share: float, values: Mapping[str, float], config: Config) -> str:
    ahead = run_ahead(config.staleness, config.learner.batch_groups)
    members = config.sampling.group_size + has_baseline(config.algorithm)
    most = (ahead + 1) * config.learner.batch_groups * members
    slots = values.get("generator/slots", 0.0)
    if slots > most:
        return (
            f"Generators idle {share:.0%} of the time: {slots:.0f} slots, but the staleness bound lets at most {most} "
            "members be in work; use fewer slots, or raise learner.batch_groups or staleness.max_staleness."
        )
    return (
        f"Generators idle {share:.0%} of the time: the learner is the bottleneck; run fewer generators, raise "
        "staleness.max_staleness, or make the learner faster (learner.ranks, learner.micro_batch_tokens)."
    )
