"""From the groups of one step to what the loss sees: advantages, staleness and the tokens that count.

Pure numpy. The result does not depend on the order in which trajectories arrived, and every rank computes it
from the same groups. A token is *in the loss* when the policy sampled it and it is not masked for its age; only
those tokens are kept here, so nothing downstream needs a mask for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from async_rl.algos.advantages import compute_batch_advantages
from async_rl.config import Config
from async_rl.learner.repeats import all_identical, repeated_nats
from async_rl.learner.shaping import TrajectoryKl, baseline_rewards, is_left_out, shaped_rewards
from async_rl.metrics import Metrics
from async_rl.staleness import staleness_per_token

if TYPE_CHECKING:
    from async_rl.buffer import TrajectoryGroup
    from async_rl.protocol import Trajectory


@dataclass(frozen=True)
class TrainSequence:
    """One trajectory with at least one token in the loss."""

    slot: int
    """Its place among all members of the batch, failed ones included: group * group_size + member."""
    group: int
    """Index of its group in the batch; sequences of one group share `prompt_ids`."""
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    completion_ids: np.ndarray
    """int32 [L], cut behind the last token in the loss: later ones influence nothing."""
    positions: np.ndarray
    """int64 [N], the tokens in the loss as indices into `completion_ids`, ascending."""
    advantage: float


@dataclass(frozen=True)
class PreparedBatch:
    """All sequences of one step and their T tokens in the loss, concatenated in sequence order."""

    step: int
    num_slots: int
    """groups * group_size: members of all groups, failed ones included."""
    sequences: tuple[TrainSequence, ...]
    offsets: np.ndarray
    """int64 [S + 1]: sequence s owns tokens offsets[s] .. offsets[s+1]-1."""
    behavior_logprobs: np.ndarray
    """float32 [T], as sampled; nats."""
    staleness: np.ndarray
    """int64 [T], (step - 1) - version."""
    metrics: Metrics
    """What the data alone says; the updater adds the rest."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens in the loss."""
        return int(self.offsets[-1])

    def sequence_index(self) -> np.ndarray:
        """int64 [T], the sequence of each token."""
        return np.repeat(np.arange(len(self.sequences)), np.diff(self.offsets))

    def token_advantages(self) -> np.ndarray:
        """float32 [T], the advantage of each token's sequence."""
        values = np.array([sequence.advantage for sequence in self.sequences], dtype=np.float32)
        return np.repeat(values, np.diff(self.offsets))


@dataclass(frozen=True)
class _Selection:
    """Which tokens of one trajectory are in the loss."""

    positions: np.ndarray
    """int64 [N], ascending."""
    staleness: np.ndarray
    """int64 [L], of every completion token."""
    num_sampled: int
    num_overdue: int


def prepare_batch(
    groups: Sequence[TrajectoryGroup],
    step: int,
    config: Config,
    kl: TrajectoryKl | None = None,
) -> PreparedBatch:
    """Advantages per whole group first, then the tokens of `step` that are in the loss, by ticket and member.

    `kl` is subtracted from the rewards that advantages see; None: no KL penalty in the reward.

    Failed members take no part in the statistics of their group and never train. With overdue='mask' tokens older
    than max_staleness leave the loss while their trajectory's reward still counts in the group, and with
    overlong.truncated='mask' so do all tokens of truncated trajectories.
    """
    metrics = Metrics()
    ordered = sorted(groups, key=lambda group: group.ticket)
    size = config.sampling.group_size
    sequences: list[TrainSequence] = []
    behavior: list[np.ndarray] = []
    staleness: list[np.ndarray] = []
    overdue: list[tuple[int, int, int]] = []
    by_group = _advantages(ordered, config, metrics, kl)
    for index, (group, advantages) in enumerate(zip(ordered, by_group, strict=True)):
        _record_group(metrics, group, advantages, size)
        for place, (member, advantage) in enumerate(zip(group.members, advantages, strict=True)):
            if advantage is None:
                continue
            chosen = _select(member, group.ticket, step, config)
            overdue.append((len(member.completion_ids), chosen.num_overdue, chosen.num_sampled))
            if len(chosen.positions):
                sequences.append(_sequence(group, index, index * size + place, member, chosen.positions, advantage))
                behavior.append(np.asarray(member.behavior_logprobs)[chosen.positions])
                staleness.append(chosen.staleness[chosen.positions])
    _record_overdue(metrics, overdue)
    ages = _concatenate(staleness, np.int64)
    _record_staleness(metrics, ages)
    return PreparedBatch(
        step=step,
        num_slots=len(ordered) * size,
        sequences=tuple(sequences),
        offsets=np.cumsum([0, *map(len, staleness)], dtype=np.int64),
        behavior_logprobs=_concatenate(behavior, np.float32),
        staleness=ages,
        metrics=metrics,
    )


def _advantages(
    groups: Sequence[TrajectoryGroup], config: Config, metrics: Metrics, kl: TrajectoryKl | None
) -> list[list[float | None]]:
    """One advantage for each member, None for failed and excluded ones; no token is filtered yet."""
    rewards = shaped_rewards(groups, config, metrics, kl)
    lengths = [[int(np.sum(member.completion_mask)) for member in group.members] for group in groups]
    baselines = baseline_rewards(groups, config)
    for reward in baselines:
        if reward is not None:
            metrics.mean("reward/baseline_mean", reward, 1.0)
    return compute_batch_advantages(config.algorithm.advantage, rewards, lengths, baselines)


def _select(trajectory: Trajectory, ticket: int, step: int, config: Config) -> _Selection:
    """The tokens of one scored trajectory that are in the loss."""
    bound = config.staleness
    sampled = np.asarray(trajectory.completion_mask, dtype=bool)
    staleness = token_staleness(trajectory, step)
    overdue = sampled & (staleness > bound.max_staleness)
    assert bound.overdue != "wait" or not overdue.any(), (
        f"ticket {ticket} has tokens of staleness {staleness.max()} in step {step}, above max_staleness = "
        f"{bound.max_staleness}: admission and window should have made that impossible"
    )
    kept = sampled & ~overdue if bound.overdue == "mask" else sampled
    if is_left_out(trajectory, config):
        kept = np.zeros_like(kept)
    return _Selection(np.flatnonzero(kept), staleness, int(sampled.sum()), int(overdue.sum()))


def _sequence(
    group: TrajectoryGroup, index: int, slot: int, trajectory: Trajectory, positions: np.ndarray, advantage: float
) -> TrainSequence:
    prompt_ids = np.asarray(group.problem.prompt_ids)
    assert len(prompt_ids), f"problem {group.problem.id!r} has an empty prompt"
    completion_ids = np.asarray(trajectory.completion_ids)[: positions[-1] + 1]
    return TrainSequence(slot, index, prompt_ids, completion_ids, positions, advantage)


def token_staleness(trajectory: Trajectory, step: int) -> np.ndarray:
    """Staleness of each completion token in `step`, int64 [L], checked against what can have been sampled."""
    staleness = staleness_per_token(step, trajectory.versions).astype(np.int64)
    assert len(staleness) == len(trajectory.completion_ids), "version spans do not cover the completion"
    assert (staleness >= 0).all(), f"a token of staleness {staleness.min()} cannot be trained in step {step}"
    return staleness


def _record_group(
    metrics: Metrics, group: TrajectoryGroup, advantages: Sequence[float | None], group_size: int
) -> None:
    """Rewards and lengths of the scored members; whether the group carries any signal."""
    sampled = [member for member in group.members if member.reward is not None]
    scored = len(sampled)
    metrics.mean("group/identical_share", float(all_identical(sampled)), 1.0)
    metrics.max("group/repeated_nats", repeated_nats(sampled))
    metrics.sum("group/trained", 1.0)
    metrics.mean("reward/failed_share", group_size - scored, group_size)
    metrics.mean("group/zero_variance_share", float(not any(advantages)), 1.0)
    for member in sampled:
        assert member.reward is not None
        length = len(member.completion_ids)
        metrics.mean("reward/mean", member.reward, 1.0)
        metrics.mean("reward/score_s", member.reward_s, 1.0)
        metrics.mean("completion/sample_s", member.sample_s, 1.0)
        metrics.mean("completion/truncated_share", float(member.status == "truncated"), 1.0)
        metrics.mean("completion/length_mean", length, 1.0)
        metrics.max("completion/length_max", length)
        metrics.histogram("completion/length", [length])


def _record_staleness(metrics: Metrics, staleness: np.ndarray) -> None:
    """How many tokens are in the loss, and how old they are."""
    metrics.sum("loss/tokens", len(staleness))
    metrics.mean("staleness/mean", float(staleness.sum()), len(staleness))
    metrics.histogram("staleness/tokens", staleness)
    if len(staleness):
        metrics.max("staleness/max", float(staleness.max()))


def _record_overdue(metrics: Metrics, counts: Sequence[tuple[int, int, int]]) -> None:
    """Share of sampled tokens that are overdue, in all and by quarter of completion length.

    `counts` holds (length, overdue tokens, sampled tokens) of each scored trajectory.
    """
    for rank, (_, overdue, sampled) in enumerate(sorted(counts)):
        metrics.mean("staleness/overdue_token_share", overdue, sampled)
        metrics.mean(f"staleness/overdue_token_share_q{1 + 4 * rank // len(counts)}", overdue, sampled)


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def minibatch_sequences(batch: PreparedBatch, minibatches: int) -> Iterator[np.ndarray]:
    """Indices of the sequences of each mini-batch: consecutive slots, so that groups stay together where they can."""
    slots = np.array([sequence.slot for sequence in batch.sequences], dtype=np.int64)
    part = slots * minibatches // max(batch.num_slots, 1)
    for number in range(minibatches):
        yield np.flatnonzero(part == number)
