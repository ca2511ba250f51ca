"""Seeded trajectory groups and configurations for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config
from async_rl.protocol import Problem, Trajectory, VersionSpan

VOCABULARY = 60


def make_config(path: Path | str = "model", **sections: dict[str, Any]) -> Config:
    """A configuration from plain sections: group_size 4, three groups, temperature 0.7, a rate that moves weights."""
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 10},
        "model": {"path": str(path)},
        "environment": {"type": "arithmetic"},
        "sampling": {"group_size": 4, "temperature": 0.7, "max_completion_tokens": 16},
        "staleness": {"max_staleness": 4},
        "learner": {"batch_groups": 3, "lr": 1e-3, "device": "cpu", "threads": 1},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return msgspec.convert(base, Config)


def make_trajectory(
    rng: np.random.Generator,
    length: int,
    reward: float | None,
    versions: Sequence[tuple[int, int, int]] | None = None,
    mask: Sequence[int] | None = None,
) -> Trajectory:
    """Random tokens with behavior logprobs between -6 and -3: a tiny random model gives about -4.3."""
    return Trajectory(
        status="complete" if reward is not None else "failed",
        completion_ids=rng.integers(2, VOCABULARY, length).astype(np.int32),
        completion_mask=np.array(mask if mask is not None else [1] * length, np.uint8),
        behavior_logprobs=-3 - 3 * rng.random(length).astype(np.float32),
        versions=tuple(VersionSpan(*span) for span in versions or [(0, 0, length)]),
        reward=reward,
    )


def make_group(rng: np.random.Generator, ticket: int, prompt: int, members: Sequence[Trajectory]) -> TrajectoryGroup:
    """A group with a random prompt of `prompt` tokens."""
    prompt_ids = rng.integers(2, VOCABULARY, prompt).astype(np.int32)
    return TrajectoryGroup(ticket, Problem(id=f"p{ticket}", prompt="", prompt_ids=prompt_ids), tuple(members))


def make_groups(
    seed: int = 0, groups: int = 3, size: int = 4, shortest: int = 1, baseline: bool = False
) -> list[TrajectoryGroup]:
    """Groups of mixed lengths and rewards: one token to twelve, one mask with a hole, the last group without signal.

    With `baseline` each also has a greedy completion, of reward 1.
    """
    rng = np.random.default_rng(seed)
    result = []
    for ticket in range(groups):
        lengths = rng.integers(shortest, 13, size)
        rewards = [1.0] * size if ticket == groups - 1 else [float(i % 2) for i in range(size)]
        members = [make_trajectory(rng, int(n), r) for n, r in zip(lengths, rewards, strict=True)]
        if ticket == 0:
            members[1] = make_trajectory(rng, 6, rewards[1], mask=[1, 1, 0, 0, 1, 0])
        group = make_group(rng, ticket, int(rng.integers(1, 9)), members)
        greedy = make_trajectory(rng, 5, 1.0) if baseline else None
        result.append(msgspec.structs.replace(group, baseline=greedy))
    return result
