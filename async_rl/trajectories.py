"""Trajectories, and many of them as three arrays: how finished members and batches travel.

An array of a message costs its receiver some microseconds, however short it is: its frame, its view, its checks. A
block has three, whatever the number of trajectories in it; apart again, they are views of the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from async_rl.frames import ProtocolError, dtype_name


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens start..end-1 were sampled by `version`."""

    version: int
    start: int
    end: int


TrajectoryStatus = Literal["complete", "truncated", "failed"]
"""complete: ended by itself; truncated: hit max_completion_tokens; failed: no usable sample or reward."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished attempt. `L` is the number of completion tokens; a failed one may have L = 0."""

    status: TrajectoryStatus
    completion_ids: np.ndarray
    """int32 [L], including the end token if it was sampled."""
    completion_mask: np.ndarray
    """uint8 [L], 1 where the policy sampled the token (0: tool output and the like)."""
    behavior_logprobs: np.ndarray
    """float32 [L], as sampled, temperature included; nats."""
    versions: tuple[VersionSpan, ...]
    """Cover 0..L-1 in order without gaps."""
    reward: float | None
    """None exactly when status is failed."""
    error: str | None = None
    """Why it failed, one line."""
    text: str | None = None
    """The completion decoded, for people."""
    sample_s: float = 0.0
    """Seconds from start of sampling to the last token."""
    reward_s: float = 0.0
    """Seconds that scoring took."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory without its arrays; fields as in `Trajectory`."""

    length: int
    """L."""
    status: TrajectoryStatus
    versions: tuple[VersionSpan, ...]
    reward: float | None
    error: str | None
    text: str | None
    sample_s: float
    reward_s: float


class TrajectoryBlock(msgspec.Struct, frozen=True):
    """Trajectories, one after the other. `S` is the sum of their L."""

    heads: tuple[Head, ...]
    completion_ids: np.ndarray
    """int32 [S]."""
    completion_mask: np.ndarray
    """uint8 [S]."""
    behavior_logprobs: np.ndarray
    """float32 [S]."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TrajectoryBlock:
        """A block of at least one trajectory; the arrays of several are copied."""
        heads = tuple(
            Head(t.completion_ids.size, t.status, t.versions, t.reward, t.error, t.text, t.sample_s, t.reward_s)
            for t in trajectories
        )
        return cls(
            heads,
            _joined([t.completion_ids for t in trajectories]),
            _joined([t.completion_mask for t in trajectories]),
            _joined([t.behavior_logprobs for t in trajectories]),
        )

    def split(self) -> list[Trajectory]:
        """The trajectories, their arrays as views of the block's."""
        ids, mask, logprobs = self.completion_ids, self.completion_mask, self.behavior_logprobs
        trajectories, start = [], 0
        for head in self.heads:
            end = start + head.length
            trajectories.append(
                Trajectory(
                    status=head.status,
                    completion_ids=ids[start:end],
                    completion_mask=mask[start:end],
                    behavior_logprobs=logprobs[start:end],
                    versions=head.versions,
                    reward=head.reward,
                    error=head.error,
                    text=head.text,
                    sample_s=head.sample_s,
                    reward_s=head.reward_s,
                )
            )
            start = end
        return trajectories


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise ProtocolError unless the parts of a trajectory agree with each other."""
    check_block(TrajectoryBlock.of([trajectory]))


def check_block(block: TrajectoryBlock) -> None:
    """Raise ProtocolError unless the parts of every trajectory of a block agree with each other."""
    require(len(block.heads) > 0, "a block holds no trajectory")
    total = sum([head.length for head in block.heads])
    check_array("completion_ids", block.completion_ids, "int32", total)
    check_array("completion_mask", block.completion_mask, "uint8", total)
    check_array("behavior_logprobs", block.behavior_logprobs, "float32", total)
    for head in block.heads:
        _check_head(head)
    if not total:
        return
    require(bool(block.completion_ids.min() >= 0), "completion_ids holds negative token ids")
    require(bool(block.completion_mask.max() <= 1), "completion_mask holds values other than 0 and 1")
    finite = bool(np.isfinite(block.behavior_logprobs).all())
    require(finite, "behavior_logprobs holds values that are not finite")


def require(condition: bool, text: str) -> None:
    """Raise ProtocolError with `text` unless the condition holds."""
    if not condition:
        raise ProtocolError(text)


def check_array(name: str, array: np.ndarray, dtype: str, length: int) -> None:
    """Raise ProtocolError unless an array has this dtype and one dimension of this length."""
    if dtype_name(array) != dtype:
        raise ProtocolError(f"{name} is {array.dtype}, expected {dtype}")
    if array.shape != (length,):
        raise ProtocolError(f"{name} has shape {list(array.shape)}, expected [{length}]")


def _check_head(head: Head) -> None:
    status, reward = head.status, head.reward
    if head.length < 0 or (head.length == 0 and status != "failed"):
        raise ProtocolError(f"a {status} trajectory has no tokens (length {head.length})")
    _check_versions(head.versions, head.length)
    if status == "failed":
        if reward is not None:
            raise ProtocolError(f"a failed trajectory has reward {reward}, expected none")
    elif reward is None or not math.isfinite(reward):
        raise ProtocolError(f"a {status} trajectory has reward {reward}, expected a finite number")
    if not 0 <= head.sample_s < math.inf:
        raise ProtocolError(f"sample_s is {head.sample_s}, expected >= 0")
    if not 0 <= head.reward_s < math.inf:
        raise ProtocolError(f"reward_s is {head.reward_s}, expected >= 0")


def _check_versions(spans: Sequence[VersionSpan], length: int) -> None:
    """Spans must cover 0..length-1 in order, without gaps, and none may be empty."""
    position = 0
    for span in spans:
        if span.version < 0:
            raise ProtocolError(f"version {span.version} is negative")
        if span.start != position:
            raise ProtocolError(f"version span starts at {span.start}, the one before ends at {position}")
        if span.end <= span.start:
            raise ProtocolError(f"version span {span.start}..{span.end} is empty")
        position = span.end
    if position != length:
        raise ProtocolError(f"version spans end at {position}, the completion has {length} tokens")
