"""Which settings change nothing, given the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from async_rl.addresses import is_loopback
from async_rl.config.fields import tag_of
from async_rl.config.schema import (
    AlgorithmConfig,
    ArithmeticEnvironment,
    Config,
    CorrectionConfig,
    FunctionEnvironment,
    IcePopLoss,
    LearnerConfig,
    RayLauncher,
    RemaxAdvantage,
)


class Switch(NamedTuple):
    """What takes the effect of a setting away."""

    by: tuple[str, ...]
    """The settings that do it."""
    reason: str
    off: Callable[[Config], bool]


OWN_RATIO = ("ppo", "truncated_is", "cispo", "icepop", "topr", "dppo")
"""Losses that take the ratio to the behavior policy themselves and multiply by no behavior weight."""


OWN_PROXIMAL = ("decoupled_ppo", "gspo", "gmpo", "sapo", "icepop")
"""Losses that take a ratio to the proximal policy themselves."""


def can_mask(correction: CorrectionConfig) -> bool:
    """Whether the correction can remove a token from the loss, given a ratio prox / mu other than 1."""
    masks = correction.level != "none" and correction.mode == "mask"
    return masks or bool(correction.rejections) or correction.veto is not None


def rejects(algorithm: AlgorithmConfig) -> bool:
    """Whether tokens can leave the loss by the correction."""
    by_age = algorithm.correction.max_token_staleness is not None
    return by_age or (algorithm.proximal != "behavior" and can_mask(algorithm.correction))


def weighs(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss is multiplied by a behavior weight other than 1."""
    own = tag_of(algorithm.loss) in OWN_RATIO
    return not own and algorithm.correction.level != "none" and algorithm.proximal != "behavior"


def penalizes_loss(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss has a term that does not vanish with the advantage: an entropy bonus or a KL penalty."""
    return algorithm.entropy_coefficient > 0 or (algorithm.kl.coefficient > 0 and algorithm.kl.place == "loss")


def age_limit(config: Config) -> int | None:
    """Largest staleness of a token in the loss, where masks set one; None: tokens of any age are in it."""
    bound, most = config.staleness, config.algorithm.correction.max_token_staleness
    limits = [bound.max_staleness] if bound.overdue == "mask" else []
    return min([*limits, most]) if most is not None else min(limits, default=None)


def has_baseline(algorithm: AlgorithmConfig) -> bool:
    """Whether each problem also gets a greedy completion, which is no member of its group."""
    return isinstance(algorithm.advantage, RemaxAdvantage)


def _protected(config: Config) -> bool:
    """Whether nobody can reach the learner without keys; on a cluster its address follows from its place."""
    local = is_loopback(config.transport.host) and not isinstance(config.launcher, RayLauncher)
    return local or config.transport.keys is not None


def several_updates(learner: LearnerConfig) -> bool:
    """Whether the policy changes within a step, so that current and proximal policy differ."""
    return learner.epochs * learner.minibatches > 1


def _proximal_unread(config: Config) -> bool:
    """Whether another proximal policy would change nothing but what is measured."""
    algorithm = config.algorithm
    if algorithm.proximal == "current":
        return False  # It spares the forward pass of several updates, whoever reads its result.
    by_weight = tag_of(algorithm.loss) == "reinforce" and algorithm.correction.level != "none"
    return not (tag_of(algorithm.loss) in OWN_PROXIMAL or by_weight or can_mask(algorithm.correction))


def _is_behavior(config: Config) -> bool:
    return config.algorithm.proximal == "behavior"


def _poses_its_own(config: Config) -> bool:
    return isinstance(config.environment, ArithmeticEnvironment)


def _masked_by_the_bound(config: Config) -> bool:
    """Whether staleness.overdue keeps out of the loss whatever a mask by age would."""
    most, bound = config.algorithm.correction.max_token_staleness, config.staleness
    return bound.overdue != "keep" and most is not None and most >= bound.max_staleness


def _no_window(config: Config) -> bool:
    return config.staleness.overdue != "wait"


def _no_evaluation(config: Config) -> bool:
    return config.evaluation.every == 0


def _no_correction(config: Config) -> bool:
    return config.algorithm.correction.level == "none" or _is_behavior(config)


def _no_kl(config: Config) -> bool:
    return config.algorithm.kl.coefficient == 0


def _no_cap(config: Config) -> bool:
    truncates = config.algorithm.correction.mode == "truncate"
    return _no_correction(config) or (truncates and tag_of(config.algorithm.loss) in OWN_RATIO)


def _no_floor(config: Config) -> bool:
    return _no_correction(config) or config.algorithm.correction.mode != "mask"


def _no_checkpoints(config: Config) -> bool:
    return config.checkpoint.every == 0 and config.checkpoint.every_s is None


def _no_batch_reward(config: Config) -> bool:
    return not (isinstance(config.environment, FunctionEnvironment) and config.environment.batch)


_ARITHMETIC = Switch(("environment.type",), "the arithmetic environment poses its own problems", _poses_its_own)
_EVALUATION = Switch(("evaluation.every",), "evaluation.every is 0", _no_evaluation)
_CHECKPOINT = Switch(
    ("checkpoint.every", "checkpoint.every_s"), "checkpoint.every is 0 and checkpoint.every_s absent", _no_checkpoints
)
_LEVEL, _MODE = "algorithm.correction.level", "algorithm.correction.mode"
_LOSS, _PROXIMAL = "algorithm.loss.type", "algorithm.proximal"
_KL = Switch(("algorithm.kl.coefficient",), "algorithm.kl.coefficient is 0", _no_kl)
_BEHAVIOR = Switch((_PROXIMAL,), f"with {_PROXIMAL} = 'behavior' the ratio prox / mu is 1 everywhere", _is_behavior)
_BAND = Switch((_PROXIMAL,), _BEHAVIOR.reason, lambda c: _is_behavior(c) and isinstance(c.algorithm.loss, IcePopLoss))

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
    "algorithm.denominator": Switch(
        (_LEVEL, _MODE, "algorithm.correction.rejections", "algorithm.correction.veto",
         "algorithm.correction.max_token_staleness", _PROXIMAL),
        "the correction removes no token", lambda c: not rejects(c.algorithm)),
    "algorithm.proximal": Switch(
        (_LOSS, _LEVEL, _MODE, "algorithm.correction.rejections", "algorithm.correction.veto"),
        "neither loss nor correction reads another proximal policy than the current one", _proximal_unread),
    "algorithm.correction.level": Switch(
        (_PROXIMAL,), _BEHAVIOR.reason, lambda c: _is_behavior(c) and c.algorithm.correction.level != "none"),
    "algorithm.correction.mode": Switch(
        (_LEVEL, _PROXIMAL), f"{_LEVEL} is 'none', or {_PROXIMAL} is 'behavior'", _no_correction),
    "algorithm.correction.floor": Switch((_LEVEL, _MODE), f"only {_MODE} = 'mask' has a floor", _no_floor),
    "algorithm.correction.cap": Switch(
        (_LEVEL, _MODE, _LOSS, _PROXIMAL),
        f"{_LEVEL} is 'none', or {_PROXIMAL} is 'behavior', or the loss takes the ratio to the behavior policy itself",
        _no_cap),
    "algorithm.correction.rejections": _BEHAVIOR,
    "algorithm.correction.veto": _BEHAVIOR,
    "algorithm.correction.max_token_staleness": Switch(
        ("staleness.overdue", "staleness.max_staleness"),
        "staleness.overdue = 'mask' or 'wait' keeps all tokens older than staleness.max_staleness out of the loss",
        _masked_by_the_bound),
    "algorithm.correction.normalize": Switch(
        (_LEVEL, _LOSS, _PROXIMAL), "the loss is multiplied by no behavior weight other than 1",
        lambda c: not weighs(c.algorithm)),
    "algorithm.loss.low": _BAND,
    "algorithm.loss.high": _BAND,
    "algorithm.kl.place": _KL,
    "algorithm.kl.estimator": _KL,
    "algorithm.kl.target": _KL,
    "algorithm.kl.horizon": Switch(
        ("algorithm.kl.target", "algorithm.kl.coefficient"), "only algorithm.kl.target steers the coefficient",
        lambda c: c.algorithm.kl.target is None or _no_kl(c)),
    "algorithm.kl.reference": _KL,
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
    "checkpoint.keep_last": _CHECKPOINT,
    "checkpoint.keep_every": _CHECKPOINT,
    "checkpoint.background": _CHECKPOINT,
    "rewards.max_batch": Switch(
        ("environment.type", "environment.batch"), "only a batch reward function scores several completions at once",
        _no_batch_reward),
    "transport.insecure": Switch(
        ("transport.host", "transport.keys"), "transport.host is a loopback address, or transport.keys are set",
        _protected),
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
