"""Alarms: what the metrics of the last steps say is wrong, in one line each with what it means and what to do.

An alarm is raised when its metric is beyond its threshold for `alarms.patience` steps in a row, and ends after as many
steps within it: one odd batch neither raises nor ends one. A step without the metric changes nothing. While it stands
it counts steps, and repeats its line every `alarms.repeat_every` steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.config import Config
from async_rl.config.checks import ALARM_THRESHOLDS


@dataclass(frozen=True)
class Rule:
    """One alarm; it is off where its threshold is None."""

    name: str
    metric: str
    too_high: bool
    """Whether the metric is wrong from the threshold up; else it is wrong below it."""
    meaning: str
    advice: str

    @property
    def setting(self) -> str:
        """Its threshold, in section alarms."""
        return ALARM_THRESHOLDS[self.name]


# fmt: off
RULES = (
    Rule("effective_sample_size", "ratio/effective_sample_size", False,
         "most tokens hardly count any more, the data is too far from the policy",
         "lower staleness.max_staleness or learner.lr; profile/* names the staleness that does it"),
    Rule("mismatch", "mismatch/logprob_abs_mean", True,
         "engine and learner disagree about tokens of the same version: the engine has other weights or numerics",
         "do not trust this run; compare generator.engine.dtype and model.dtype, use running_requests = 'recompute'"),
    Rule("all_rejected", "correction/masked_share", True,
         "the correction removes nearly all tokens, and nothing is learned",
         "widen algorithm.correction's bounds, or bring the data closer: staleness.max_staleness, learner.lr"),
    Rule("overdue", "staleness/overdue_token_share", True,
         "that share of the sampled tokens is too old to train on",
         "raise staleness.max_staleness, shorten completions, or use staleness.overdue = 'wait'"),
    Rule("repeated_completions", "group/repeated_nats", True,
         "members of a group are the same although their probability says they should not be: they share a seed",
         "see how the engine seeds requests; a group of copies has no signal"),
    Rule("equal_rewards", "group/zero_variance_share", True,
         "all members of the groups get the same reward, so that there is nothing to learn",
         "check the reward function; mix difficulties, or raise sampling.group_size or sampling.max_refills"),
    Rule("entropy_collapse", "loss/entropy", False,
         "the policy is sure of every token and explores nothing",
         "go back to an earlier version; lower learner.lr, raise the upper clip"),
    Rule("failures", "reward/failed_share", True,
         "that share of the trajectories has no usable sample or reward",
         "read the first error above and in the generators' logs; raise rewards.timeout_s or rewards.workers"),
)
# fmt: on
FLOAT32_MISMATCH, OTHER_MISMATCH = 1e-3, 0.05
"""Nats: float32 engines agree with the learner to 1e-5, those of lower precision or with kept KV to some hundredths."""


@dataclass
class _State:
    beyond: int = 0
    """Steps in a row beyond the threshold."""
    within: int = 0
    standing: bool = False
    stood: int = 0
    """Steps that it stood, so far."""
    said_at: int | None = None


class Alarms:
    """Judges the metrics of one step after the other."""

    def __init__(self, config: Config, on_cpu: bool) -> None:
        self.config = config.alarms
        self.rules = {rule: limit for rule in RULES if (limit := threshold(rule, config, on_cpu)) is not None}
        self.states = {rule.name: _State() for rule in self.rules}

    def check(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Lines to show after this step."""
        lines = []
        for rule, limit in self.rules.items():
            if rule.metric in values:
                line = self._judge(step, rule, limit, values[rule.metric])
                lines += [line] if line else []
        return lines

    def ends_run(self) -> str | None:
        """Which alarms that stand are of `alarms.stop`, as a sentence; None: the run goes on."""
        standing = [name for name, state in self.states.items() if state.standing and name in self.config.stop]
        return f"alarms.stop ends the run: {', '.join(standing)} (see the line above)" if standing else None

    def counts(self) -> dict[str, int]:
        """Steps that each alarm has stood so far."""
        return {name: state.stood for name, state in self.states.items()}

    def _judge(self, step: int, rule: Rule, limit: float, value: float) -> str | None:
        state, patience = self.states[rule.name], self.config.patience
        wrong = not math.isfinite(value) or (value >= limit if rule.too_high else value < limit)
        state.beyond, state.within = (state.beyond + 1, 0) if wrong else (0, state.within + 1)
        if state.standing and state.within >= patience:
            state.standing = False
            return f"alarm {rule.name} is over: {rule.metric} = {value:.3g}" if state.said_at is not None else None
        state.standing = state.standing or state.beyond >= patience
        if not state.standing:
            return None
        state.stood += 1
        if state.said_at is not None and step - state.said_at < self.config.repeat_every:
            return None
        state.said_at = step
        return self._line(rule, limit, value)

    def _line(self, rule: Rule, limit: float, value: float) -> str:
        side = "not below" if rule.too_high else "below"
        return (
            f"ALARM {rule.name}: {rule.metric} = {value:.3g} is {side} alarms.{rule.setting} = {limit:.3g}: "
            f"{rule.meaning}; {rule.advice}"
        )


def threshold(rule: Rule, config: Config, on_cpu: bool) -> float | None:
    """The threshold of a rule in a run; None where it is off."""
    value: float | None = getattr(config.alarms, rule.setting)
    if rule.name == "overdue" and config.staleness.overdue != "mask":
        return None
    return default_mismatch(config, on_cpu) if rule.name == "mismatch" and value is None else value


def default_mismatch(config: Config, on_cpu: bool) -> float:
    """What engine and learner may differ by, from how they compute."""
    dtype = getattr(config.generator.engine, "dtype", "float32")
    float32 = config.model.dtype == "float32" and (dtype == "float32" or (dtype == "auto" and on_cpu))
    exact = config.generator.running_requests != "keep"
    return FLOAT32_MISMATCH if float32 and exact else OTHER_MISMATCH
