"""What things take: the figures of a machine that the simulator needs and the settings do not hold."""

from __future__ import annotations

import msgspec

from async_rl.config import Config, ConfigError
from async_rl.config.schema import EngineConfig, SimulatedEngine
from async_rl.simulate.lengths import Lengths, Lognormal


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and rates of one generator and of the learner."""

    tokens_per_s: float
    """Decoding rate of a request that runs alone."""
    slowdown: float = 0.0
    """Share by which each further running request stretches the time per token."""
    lengths: Lengths
    step_s: float = 0.0
    """Seconds of a step whatever its size."""
    learner_tokens_per_s: float
    """Completion tokens that one learner rank trains per second, beyond `step_s`."""
    gather_s: float = 0.0
    """The learner held by a publication."""
    transfer_s: float = 0.0
    """From there until engines begin to load."""
    pause_s: float = 0.0
    """An engine standing still to load."""
    score_s: float = 0.0
    """From the last token to the reward; the slot is free by then, the lease is not."""
    round_trip_s: float = 0.0
    """From the reward until the coordinator has answered, with new work."""
    equal_share: float = 0.0
    """Share of all sampled groups whose rewards are equal: `sampling.max_refills` drops and refills them."""
    failure_every_s: float | None = None
    """Mean time between failures of one generator; None: none fails."""
    restart_s: float = 60.0
    """From a failure until the generator has weights again."""

    def rate(self, running: int) -> float:
        """Tokens per second of each of `running` requests of one engine."""
        return self.tokens_per_s / (1 + self.slowdown * (running - 1))

    def generator_limit(self, config: Config) -> float:
        """Tokens per second of the fleet when no slot is ever empty and no engine ever stands still."""
        slots = config.generator.slots
        return config.generator.count * slots * self.rate(slots)

    def train_s(self, config: Config, tokens: float) -> float:
        """Seconds of a step with so many completion tokens, split evenly among the ranks."""
        return self.step_s + tokens / (self.learner_tokens_per_s * config.learner.ranks)


def costs_of(config: Config) -> Costs:
    """The costs that section `plan` names, gaps filled by the simulated engine; raises ConfigError for what lacks."""
    plan, engine = config.plan, config.generator.engine
    named = {
        "tokens_per_s": plan.tokens_per_s,
        "median_tokens": plan.median_tokens,
        "sigma": plan.sigma,
        "pause_s": plan.pause_s,
        "learner_tokens_per_s": plan.learner_tokens_per_s,
    }
    values = _of_engine(engine) | {name: value for name, value in named.items() if value is not None}
    missing = [f"plan.{name}" for name in named if name not in values]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} missing: a plan needs to know what things take; set them, or measure them with "
            "async-rl plan CONFIG --from-run RUN"
        )
    return Costs(
        tokens_per_s=values["tokens_per_s"],
        slowdown=plan.slowdown,
        lengths=Lognormal(values["median_tokens"], values["sigma"], config.sampling.max_completion_tokens),
        step_s=plan.step_s,
        learner_tokens_per_s=values["learner_tokens_per_s"],
        gather_s=plan.gather_s,
        transfer_s=plan.transfer_s,
        pause_s=values["pause_s"],
        score_s=plan.score_s,
        failure_every_s=plan.failure_every_s,
        restart_s=plan.restart_s,
    )


def _of_engine(engine: EngineConfig) -> dict[str, float]:
    """What the simulated engine's own settings say; of others only that they load at once unless told."""
    if not isinstance(engine, SimulatedEngine):
        return {"pause_s": 0.0}
    return {
        "tokens_per_s": engine.tokens_per_s,
        "median_tokens": engine.median_tokens,
        "sigma": engine.sigma,
        "pause_s": engine.load_s,
    }
