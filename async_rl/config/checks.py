"""Relations between settings: what cannot work is refused before anything starts, with the smallest values that do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from math import gcd

from async_rl import staleness as staleness_rule
from async_rl.addresses import is_loopback
from async_rl.config.effect import SWITCHES, has_baseline, penalizes_loss, value_at, weighs, without_effect
from async_rl.config.fields import settings, tag_of
from async_rl.config.schema import (
    ArithmeticEnvironment,
    Config,
    GeneratorConfig,
    RayLauncher,
    ReinforcePlusPlusAdvantage,
    StalenessConfig,
    VllmEngine,
)
from async_rl.errors import InputError

ALARM_THRESHOLDS = {
    "effective_sample_size": "min_effective_sample_size",
    "mismatch": "max_mismatch",
    "all_rejected": "max_masked_share",
    "overdue": "max_overdue_share",
    "repeated_completions": "max_repeated_nats",
    "equal_rewards": "max_equal_rewards_share",
    "entropy_collapse": "min_entropy",
    "failures": "max_failed_share",
}
"""Alarm -> the setting of its threshold."""


class ConfigError(InputError):
    """The user's settings cannot be used; the message is one line that says why and what would work."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest to a misspelt name: by whole path, or by its last word where that is exact."""
    candidates = list(candidates)
    last = name.rpartition(".")[2]
    same_word = [c for c in candidates if c.rpartition(".")[2] == last]
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if same_word:
        return difflib.get_close_matches(name, same_word, n=1, cutoff=0.0)[0]
    return close[0] if close else None


def reorder_window(staleness: StalenessConfig, batch_groups: int) -> int:
    """Window W of overdue='wait', in tickets."""
    return staleness.reorder_window if staleness.reorder_window is not None else batch_groups


def run_ahead(staleness: StalenessConfig, batch_groups: int) -> int:
    """Batches that may be issued beyond the version loaded (docs/staleness.md); negative: none could ever be issued."""
    window = reorder_window(staleness, batch_groups)
    return staleness_rule.run_ahead(staleness.max_staleness, staleness.overdue, window, batch_groups)


def prefetch(generator: GeneratorConfig) -> int:
    """Leases beyond the slots: the engine has the next request at hand when one ends."""
    return max(1, generator.slots // 4) if generator.prefetch is None else generator.prefetch


def nearest_multiples(value: int, of: int) -> tuple[int, ...]:
    """The multiples just below and just above a value, without zero: (510, 516) for 512 and 6."""
    below = value // of * of
    return tuple(n for n in (below, below + of) if n > 0)


def _either(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))


def _check_progress(config: Config) -> None:
    """run_ahead >= publish_every - 1, or the batch that the learner waits for can never fill."""
    staleness, groups = config.staleness, config.learner.batch_groups
    ahead = run_ahead(staleness, groups)
    if staleness.publish_every <= ahead + 1:
        return
    missing = staleness.publish_every - 1 - ahead
    ways = [f"staleness.max_staleness = {staleness.max_staleness + missing}"]
    if ahead >= 0:
        ways.append(f"staleness.publish_every = {ahead + 1}")
    if staleness.overdue == "wait" and staleness.max_staleness >= staleness.publish_every - 1:
        ways.append(
            f"staleness.reorder_window = {(staleness.max_staleness - staleness.publish_every + 1) * groups + 1}"
        )
    raise ConfigError(
        f"staleness.publish_every = {staleness.publish_every} cannot make progress: with max_staleness = "
        f"{staleness.max_staleness} and overdue = {staleness.overdue!r} generators may run {ahead} batches ahead, and "
        f"publish_every may be at most {max(ahead + 1, 0)}; the smallest changes that work: {' or '.join(ways)}"
    )


def _check_split(config: Config) -> None:
    """Every mini-batch has the same number of trajectories, or updates would differ in size."""
    groups, size, parts = config.learner.batch_groups, config.sampling.group_size, config.learner.minibatches
    rows = groups * size
    if rows % parts == 0:
        return
    step = parts // gcd(parts, size)
    raise ConfigError(
        f"learner.minibatches = {parts} does not divide the {rows} trajectories of a batch "
        f"(learner.batch_groups = {groups} x sampling.group_size = {size}); nearest that work: "
        f"{_either(nearest_multiples(rows, parts))} trajectories, "
        f"with this group_size learner.batch_groups = {_either(nearest_multiples(groups, step))}"
    )


def _check_sampling(config: Config) -> None:
    sampling, advantage = config.sampling, config.algorithm.advantage
    if sampling.top_p < 1:
        raise ConfigError(
            f"sampling.top_p = {sampling.top_p} changes the behavior distribution, and importance ratios would be "
            "wrong; training needs sampling.top_p = 1"
        )
    batch = isinstance(advantage, ReinforcePlusPlusAdvantage) and advantage.baseline == "none"
    compares = not (batch or has_baseline(config.algorithm))
    if sampling.group_size < 2 and compares:
        raise ConfigError(
            f"sampling.group_size = {sampling.group_size}: advantage {tag_of(advantage)!r} compares the members of a "
            "group; the smallest that works is sampling.group_size = 2"
        )
    buffer = config.algorithm.overlong.buffer_tokens
    if buffer is not None and buffer > sampling.max_completion_tokens:
        raise ConfigError(
            f"algorithm.overlong.buffer_tokens = {buffer} is longer than a completion can be; the largest that works "
            f"is sampling.max_completion_tokens = {sampling.max_completion_tokens}"
        )
    engine = config.generator.engine
    longest = config.data.max_prompt_tokens + sampling.max_completion_tokens
    if isinstance(engine, VllmEngine) and engine.max_model_len is not None and engine.max_model_len < longest:
        raise ConfigError(
            f"generator.engine.max_model_len = {engine.max_model_len} is shorter than data.max_prompt_tokens + "
            f"sampling.max_completion_tokens = {longest}; raise it to {longest} or lower the other two"
        )


def _check_refills(config: Config) -> None:
    if config.sampling.max_refills > 0 and config.sampling.group_size == 1 and not has_baseline(config.algorithm):
        raise ConfigError(
            f"sampling.max_refills = {config.sampling.max_refills} with sampling.group_size = 1: the rewards of every "
            "group are equal, so all would be dropped up to the limit; use groups of 2 or more, advantage 'remax', or "
            "max_refills = 0"
        )


def _check_schedule(config: Config) -> None:
    learner, steps = config.learner, config.run.steps
    if learner.warmup_steps >= steps and learner.warmup_steps > 0:
        raise ConfigError(
            f"learner.warmup_steps = {learner.warmup_steps} leaves no step at the full rate: run.steps = {steps}; "
            f"the largest that works is {steps - 1}"
        )
    if learner.max_grad_norm is not None and learner.max_grad_norm <= 0:
        raise ConfigError(
            f'learner.max_grad_norm = {learner.max_grad_norm}: expected a number > 0, or "none" for no clipping'
        )
    if not all(0 <= beta < 1 for beta in learner.betas):
        raise ConfigError(
            f"learner.betas = {list(learner.betas)}: each must be at least 0 and below 1, such as [0.9, 0.95]"
        )
    correction = config.algorithm.correction
    if correction.floor > correction.cap:
        raise ConfigError(
            f"algorithm.correction.floor = {correction.floor} is above algorithm.correction.cap = {correction.cap}: "
            "no token would stay in the loss"
        )


def _check_normalization(config: Config) -> None:
    """The mean weight must be known before the first gradient where the loss has terms that it does not divide."""
    algorithm = config.algorithm
    normalizes = algorithm.correction.normalize and weighs(algorithm)
    if normalizes and penalizes_loss(algorithm) and algorithm.proximal != "recompute":
        raise ConfigError(
            f"algorithm.correction.normalize = true with algorithm.proximal = {algorithm.proximal!r} divides the whole "
            "gradient of an update at its end, and would divide the entropy bonus or KL penalty too; use "
            "algorithm.proximal = 'recompute', algorithm.kl.place = 'reward', or algorithm.correction.normalize = false"
        )


def _check_transport(config: Config) -> None:
    transport = config.transport
    if transport.host in ("", "*", "0.0.0.0", "::"):
        raise ConfigError(
            f"transport.host = {transport.host!r} is no address that a generator could connect to, and it is given to "
            "generators for weights and snapshots; name the address of this machine that they can reach"
        )
    if not is_loopback(transport.host) and transport.keys is None and not transport.insecure:
        raise ConfigError(
            f"transport.host = {transport.host!r} can be reached from other machines, and nothing protects it; write "
            "key files with `async-rl keys FOLDER` and set transport.keys = FOLDER, use 127.0.0.1, or "
            "transport.insecure = true on a network that you trust"
        )
    if transport.heartbeat_timeout_s < 2 * transport.heartbeat_s:
        raise ConfigError(
            f"transport.heartbeat_timeout_s = {transport.heartbeat_timeout_s} would evict a generator for one late "
            f"heartbeat; it must be at least 2 x transport.heartbeat_s = {2 * transport.heartbeat_s}"
        )
    if config.weights.backend == "nccl" and config.learner.device == "cpu":
        raise ConfigError("weights.backend = 'nccl' needs GPUs, and learner.device = 'cpu'; use gloo or auto")


def _check_data(config: Config) -> None:
    environment, data, evaluation = config.environment, config.data, config.evaluation
    if not isinstance(environment, ArithmeticEnvironment) and data.path is None:
        raise ConfigError(
            f"data.path is missing: environment {tag_of(environment)!r} takes its problems from a file, "
            ".parquet or .jsonl"
        )
    if evaluation.every > 0 and data.eval_path is None and data.eval_problems == 0:
        raise ConfigError(
            f"evaluation.every = {evaluation.every} has nothing to evaluate: set data.eval_problems >= 1, "
            "data.eval_path, or evaluation.every = 0"
        )
    if config.run.stop_at_accuracy is not None and evaluation.every == 0:
        raise ConfigError(
            f"run.stop_at_accuracy = {config.run.stop_at_accuracy} needs evaluations: set evaluation.every >= 1"
        )


def _check_alarms(config: Config) -> None:
    for name in config.alarms.stop:
        setting = ALARM_THRESHOLDS[name]
        off = name != "mismatch" and getattr(config.alarms, setting) is None
        if off or (name == "overdue" and config.staleness.overdue != "mask"):
            why = f"alarms.{setting} is off" if off else f"staleness.overdue = {config.staleness.overdue!r} masks none"
            raise ConfigError(f"alarms.stop names {name!r}, which can never be raised: {why}; remove it or change that")


def _check_effect(config: Config, ranks: Mapping[str, int]) -> None:
    """A setting without effect is a mistake, unless a later layer turned off what an earlier one had set up."""
    defaults = {setting.path: setting.default for setting in settings()}
    for path, reason in without_effect(config).items():
        value, by = value_at(config, path), SWITCHES[path].by
        turned_off = max(ranks.get(switch, 0) for switch in by)
        if path in ranks and value != defaults[path] and ranks[path] >= turned_off:
            raise ConfigError(f"{path} = {value!r} has no effect: {reason}; remove it or change {' or '.join(by)}")


def _check_launcher(config: Config) -> None:
    """On a cluster a process sees only the GPUs that it reserves."""
    launcher, learner, engine = config.launcher, config.learner, config.generator.engine
    if not isinstance(launcher, RayLauncher):
        return
    gpus = launcher.learner_resources.gpus
    if learner.device != "cpu" and gpus < learner.ranks and (gpus > 0 or learner.device == "cuda"):
        raise ConfigError(
            f"launcher.learner_resources.gpus = {gpus:g}, and each of learner.ranks = {learner.ranks} needs a GPU of "
            f"its own; set launcher.learner_resources.gpus = {learner.ranks}, or learner.device = 'cpu'"
        )
    gpus = launcher.generator_resources.gpus
    if isinstance(engine, VllmEngine) and engine.tensor_parallel > max(gpus, 1):
        raise ConfigError(
            f"generator.engine.tensor_parallel = {engine.tensor_parallel} takes as many GPUs, and "
            f"launcher.generator_resources.gpus = {gpus:g}; set that to {engine.tensor_parallel}"
        )


def check_config(config: Config, ranks: Mapping[str, int] | None = None) -> None:
    """Raise ConfigError for settings that cannot work together; `ranks` says in which layer each was given."""
    for check in (
        _check_sampling,
        _check_refills,
        _check_split,
        _check_progress,
        _check_schedule,
        _check_normalization,
        _check_transport,
        _check_data,
        _check_alarms,
        _check_launcher,
    ):
        check(config)
    _check_effect(config, ranks or {})


def warnings(config: Config) -> list[str]:
    """Settings that work but are rarely meant, one line each."""
    found = []
    staleness, generator = config.staleness, config.generator
    if staleness.max_staleness > 0 and staleness.overdue == "mask" and generator.running_requests == "finish":
        found.append(
            "generator.running_requests = 'finish' holds every update until the longest completion ends, and a slow "
            "trajectory is old as a whole: staleness.overdue = 'mask' masks much of it; 'recompute' updates in flight"
        )
    longest = config.data.max_prompt_tokens + config.sampling.max_completion_tokens
    if longest > config.learner.micro_batch_tokens:
        found.append(
            f"learner.micro_batch_tokens = {config.learner.micro_batch_tokens} is less than the longest trajectory "
            f"({longest} tokens): such a trajectory is a micro-batch of its own, larger than the budget"
        )
    if config.run.stall_timeout_s <= config.weights.deadline_s:
        found.append(
            f"run.stall_timeout_s = {config.run.stall_timeout_s} ends the run before weights.deadline_s = "
            f"{config.weights.deadline_s} can evict a generator that hangs during a publication"
        )
    lease_timeout_s = generator.lease_timeout_s
    if lease_timeout_s is not None and lease_timeout_s >= config.run.stall_timeout_s:
        found.append(
            f"run.stall_timeout_s = {config.run.stall_timeout_s} may end the run before generator.lease_timeout_s = "
            f"{lease_timeout_s} gives the work of a hung engine to another generator"
        )
    kl = config.algorithm.kl
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        found.append(
            "algorithm.kl.estimator = 'k1' in the loss has a gradient of expectation 0 on policy and only adds noise; "
            "'k2' has the gradient of KL(pi || ref), or use algorithm.kl.place = 'reward'"
        )
    if kl.coefficient > 0 and kl.place == "reward" and kl.estimator in ("k2", "k3"):
        found.append(
            f"algorithm.kl.estimator = {kl.estimator!r} in the reward is not followed along the gradient of "
            "KL(pi || ref), which only 'k1' has there"
        )
    if config.sampling.temperature != 1 and config.evaluation.every and config.evaluation.temperature == 1:
        found.append(
            f"evaluation.temperature = 1 while training samples at {config.sampling.temperature}: "
            "held-out accuracy and reward will differ"
        )
    return found
