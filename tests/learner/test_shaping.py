"""Overlong completions: the penalty before advantages, and truncated ones that leave the loss or their group too."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config
from async_rl.learner.batch import prepare_batch
from async_rl.learner.shaping import baseline_rewards, shaped_rewards
from async_rl.metrics import Metrics
from async_rl.protocol import Trajectory
from tests.learner.helpers import make_config, make_group, make_trajectory
from tests.reference.shaping import soft_overlong_punishment

RNG = np.random.default_rng(3)


def setting(overlong: dict[str, Any], longest: int = 100, advantage: str = "rloo") -> Config:
    return make_config(
        sampling={"group_size": 4, "max_completion_tokens": longest},
        algorithm={"overlong": overlong, "advantage": {"type": advantage}},
    )


def member(length: int, reward: float | None, status: str = "complete") -> Trajectory:
    return msgspec.structs.replace(make_trajectory(RNG, length, reward), status=status)


def group(*members: Trajectory) -> list[TrajectoryGroup]:
    return [make_group(RNG, 0, 3, members)]


def rewards(config: Config, *members: Trajectory) -> list[float | None]:
    return shaped_rewards(group(*members), config, Metrics())[0]


@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_the_penalty_is_the_papers_at_every_length(penalty: float) -> None:
    config = setting({"penalty": penalty, "buffer_tokens": 20})
    for length in range(1, 105):
        expected = 0.7 + penalty * soft_overlong_punishment(length, 100, 20)
        assert rewards(config, member(length, 0.7)) == [pytest.approx(expected)]


def test_the_penalty_of_the_known_case() -> None:
    members = [member(length, 0.0) for length in (80, 81, 90, 100, 101)]
    assert rewards(setting({"penalty": 1.0, "buffer_tokens": 20}), *members) == pytest.approx([0, -0.05, -0.5, -1, -1])


def test_a_baseline_bears_the_penalty_and_stays_where_truncated_members_are_excluded() -> None:
    overlong = {"penalty": 1.0, "buffer_tokens": 20, "truncated": "exclude"}
    members, greedy = [member(10, 1.0), member(100, 1.0, "truncated")], member(90, 0.75, "truncated")
    groups = [msgspec.structs.replace(group(*members)[0], baseline=greedy), *group(*members)]
    assert baseline_rewards(groups, setting(overlong)) == [pytest.approx(0.25), None]
    config, metrics = setting(overlong, advantage="remax"), Metrics()
    assert shaped_rewards(groups[:1], config, metrics) == [[1.0, None]]
    batch = prepare_batch(groups[:1], 1, config)
    assert [sequence.advantage for sequence in batch.sequences] == [pytest.approx(0.75)]
    values = batch.metrics.resolve()
    assert values["completion/left_out_share"] == 0.5 and values["reward/baseline_mean"] == pytest.approx(0.25)
    assert values["reward/overlong_penalty"] == 0.0, "of the members in the statistics"


def test_the_buffer_is_a_fifth_unless_said_otherwise() -> None:
    lengths = (80, 81, 100)
    assert rewards(setting({"penalty": 1.0}), *(member(n, 0.0) for n in lengths)) == pytest.approx([0, -0.05, -1])
    # A completion of 4 tokens at most has a buffer of one.
    assert rewards(setting({"penalty": 1.0}, longest=4), member(3, 0.0), member(4, 0.0)) == [0.0, -1.0]


def test_only_sampled_tokens_are_counted_and_failures_stay_failures() -> None:
    config = setting({"penalty": 1.0, "buffer_tokens": 4}, longest=6)
    tool = make_trajectory(RNG, 6, 1.0, mask=[1, 1, 0, 0, 1, 0])  # three sampled tokens: one into the buffer
    assert rewards(config, tool, member(6, None, "failed")) == [pytest.approx(0.75), None]


def test_the_penalty_gives_equal_rewards_a_signal_and_is_reported_apart_from_them() -> None:
    config = setting({"penalty": 1.0, "buffer_tokens": 10}, longest=12)
    members = [member(length, 1.0) for length in (2, 2, 7, 12)]
    batch = prepare_batch(group(*members), 1, config)
    shaped = [1.0, 1.0, 0.5, 0.0]
    expected = [r - (sum(shaped) - r) / 3 for r in shaped]
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx(expected)
    values = batch.metrics.resolve()
    assert (values["reward/mean"], values["reward/overlong_penalty"]) == (1.0, pytest.approx(1.5 / 4))
    assert values["group/zero_variance_share"] == 0.0


@pytest.mark.parametrize(
    ("truncated", "slots", "advantages"),
    [
        # r = 1, 0, 0 and 1 of the truncated one; leave-one-out means of the others
        ("keep", [0, 1, 2, 3], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("mask", [0, 1, 2], [2 / 3, -2 / 3, -2 / 3]),
        ("exclude", [0, 1, 2], [1.0, -0.5, -0.5]),
    ],
)
def test_truncated_completions(truncated: str, slots: list[int], advantages: list[float]) -> None:
    config = setting({"truncated": truncated}, longest=16)
    members = [member(3, 1.0), member(2, 0.0), member(4, 0.0), member(16, 1.0, "truncated")]
    batch = prepare_batch(group(*members), 1, config)
    assert [sequence.slot for sequence in batch.sequences] == slots
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx(advantages)
    # What left the loss is in no denominator; completion metrics are of all that were scored.
    assert batch.num_tokens == (25 if truncated == "keep" else 9)
    values = batch.metrics.resolve()
    assert values["completion/truncated_share"] == 0.25
    assert values["reward/mean"] == 0.5
    assert values.get("completion/left_out_share") == (None if truncated == "keep" else 0.25)


@pytest.mark.parametrize("truncated", ["mask", "exclude"])
def test_a_batch_of_truncated_completions_is_empty(truncated: str) -> None:
    members = [member(16, float(i % 2), "truncated") for i in range(4)]
    batch = prepare_batch(group(*members), 1, setting({"truncated": truncated}, longest=16))
    assert batch.sequences == () and batch.num_tokens == 0
