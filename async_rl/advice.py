"""What to change: one sentence on the bottleneck during a run, and after it changes with the gain to expect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.config import Config, ConfigError, run_ahead

WORTH_SAYING = 0.15
"""Shares of the time below this are not worth a change."""


PREDICTED_MEMBERS = 2000
"""Members that each simulation of the advice after a run trains: about a second for all of them together."""


def advice_after(run_dir: Path, config: Config) -> list[str]:
    """Numbered changes, best first, each with what a simulation calibrated on the run's metrics predicts.

    A run that is too short to say what things take gets none.
    """
    from async_rl.simulate.calibrate import costs_from_run
    from async_rl.simulate.search import Search
    from async_rl.simulate.suggest import suggest

    try:
        costs = costs_from_run(run_dir)
    except ConfigError:
        return []
    plan = msgspec.structs.replace(config.plan, members=PREDICTED_MEMBERS)
    found = suggest(msgspec.structs.replace(config, plan=plan), Search(costs))
    return [f"{number}. {suggestion.sentence}" for number, suggestion in enumerate(found, start=1)]


def bottleneck_sentence(values: Mapping[str, float], config: Config) -> str:
    """The largest of waiting, idling and publishing, as seen in the last step's metrics, and what to change."""
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
    most = (ahead + 1) * config.learner.batch_groups * config.sampling.group_size
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
