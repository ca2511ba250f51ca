"""Which settings change nothing, given the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from async_rl.addresses import is_loopback
from async_rl.config.fields import tag_of
from async_rl.config.schema import ArithmeticEnvironment, Config, FunctionEnvironment


class Switch(NamedTuple):
    """What takes the effect of a setting away."""

    by: tuple[str, ...]
    """The settings that do it."""
    reason: str
    off: Callable[[Config], bool]


OWN_RATIO = ("ppo", "truncated_is", "cispo", "icepop", "topr", "dppo")
"""Losses that take the ratio to the behavior policy themselves and multiply by no behavior weight."""


def _poses_its_own(config: Config) -> bool:
    return isinstance(config.environment, ArithmeticEnvironment)


def _no_window(config: Config) -> bool:
    return config.staleness.overdue != "wait"


def _no_evaluation(config: Config) -> bool:
    return config.evaluation.every == 0


def _no_correction(config: Config) -> bool:
    return config.algorithm.correction.level == "none"


def _no_cap(config: Config) -> bool:
    truncates = config.algorithm.correction.mode == "truncate"
    return _no_correction(config) or (truncates and tag_of(config.algorithm.loss) in OWN_RATIO)


def _no_floor(config: Config) -> bool:
    return _no_correction(config) or config.algorithm.correction.mode != "mask"


def _no_batch_reward(config: Config) -> bool:
    return not (isinstance(config.environment, FunctionEnvironment) and config.environment.batch)


_ARITHMETIC = Switch(("environment.type",), "the arithmetic environment poses its own problems", _poses_its_own)
_EVALUATION = Switch(("evaluation.every",), "evaluation.every is 0", _no_evaluation)
_LEVEL, _MODE = "algorithm.correction.level", "algorithm.correction.mode"

# fmt: off
SWITCHES: dict[str, Switch] = {
    "staleness.reorder_window": Switch(
        ("staleness.overdue",), "only staleness.overdue = 'wait' has a window", _no_window),
    "learner.min_lr_ratio": Switch(
        ("learner.decay",), "learner.decay is 'constant'", lambda c: c.learner.decay == "constant"),
    "algorithm.constant_length": Switch(
        ("algorithm.reduction",), "only algorithm.reduction = 'constant' divides by it",
        lambda c: c.algorithm.reduction != "constant"),
    "algorithm.overlong.buffer_tokens": Switch(
        ("algorithm.overlong.penalty",), "algorithm.overlong.penalty is 0",
        lambda c: c.algorithm.overlong.penalty == 0),
    "algorithm.correction.mode": Switch((_LEVEL,), f"{_LEVEL} is 'none'", _no_correction),
    "algorithm.correction.floor": Switch((_LEVEL, _MODE), f"only {_MODE} = 'mask' has a floor", _no_floor),
    "algorithm.correction.cap": Switch(
        (_LEVEL, _MODE, "algorithm.loss.type"),
        f"{_LEVEL} is 'none', or the loss takes the ratio to the behavior policy itself", _no_cap),
    "alarms.max_overdue_share": Switch(
        ("staleness.overdue",), "only staleness.overdue = 'mask' masks tokens for their age",
        lambda c: c.staleness.overdue != "mask"),
    "data.path": _ARITHMETIC,
    "data.eval_path": _ARITHMETIC,
    "data.prompt_column": _ARITHMETIC,
    "data.answer_column": _ARITHMETIC,
    "data.epochs": _ARITHMETIC,
    "evaluation.samples": _EVALUATION,
    "evaluation.temperature": _EVALUATION,
    "rewards.max_batch": Switch(
        ("environment.type", "environment.batch"), "only a batch reward function scores several completions at once",
        _no_batch_reward),
    "transport.insecure": Switch(
        ("transport.host", "transport.keys"), "transport.host is a loopback address, or transport.keys are set",
        lambda c: is_loopback(c.transport.host) or c.transport.keys is not None),
}
"""Setting -> what takes its effect away. Names and paths of trackers are left out: they are set once for many runs."""
# fmt: on


def value_at(config: Config, path: str) -> object:
    """Value of the setting at a path; None where its section has another type."""
    value: object = config
    for key in path.split("."):
        value = getattr(value, key, None)
    return value


def without_effect(config: Config) -> dict[str, str]:
    """Settings that change nothing given the others, each with the reason."""
    return {path: switch.reason for path, switch in SWITCHES.items() if switch.off(config)}
