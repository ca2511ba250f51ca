"""What every engine does: sample with exact versions and logprobs, and take new weights while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from async_rl.protocol import EpochInfo, Manifest, SamplingParams, VersionSpan


class EngineError(Exception):
    """The engine cannot go on; the generator process must be restarted."""


@dataclass(frozen=True)
class SampleRequest:
    """One completion to sample."""

    request_id: str
    prompt_ids: np.ndarray
    """int32 [P]"""
    sampling: SamplingParams


@dataclass(frozen=True)
class Sample:
    """One sampled completion of L tokens."""

    completion_ids: np.ndarray
    """int32 [L], the end token included if it was sampled."""
    logprobs: np.ndarray
    """float32 [L], log-probability of each token under the policy that sampled it, temperature included; nats."""
    versions: tuple[VersionSpan, ...]
    """Cover 0..L-1 in order without gaps."""
    finish: Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class LoadReport:
    """What loading a version cost."""

    checksum: str | None
    load_s: float
    """Seconds of loading the weights into the model."""
    paused_s: float
    """Seconds in which no token was sampled."""


class Engine(ABC):
    """An engine lives in one asyncio loop; many `sample` calls run at once, at most one weight call."""

    receivers: int = 1
    """Ranks that it takes in a broadcast group; 0: it loads no weights."""
    policy_version: int | None = None
    """Version that new samples start with; None until the first load."""

    @abstractmethod
    async def start(self) -> None:
        """Start; raises EngineError with the cause."""

    @abstractmethod
    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one completion; cancelling the task aborts the request. Raises EngineError when the engine is dead."""

    @abstractmethod
    async def join_epoch(self, info: EpochInfo) -> None:
        """Stand in the broadcast group of an epoch, leaving any earlier one; raises WeightsError."""

    @abstractmethod
    async def receive(self, epoch: int, manifest: Manifest, deadline_s: float) -> str:
        """Receive a publication into fresh buffers while sampling goes on; return the checksum of the bytes.

        Raises WeightsError (nothing of the model is touched then, the engine goes on with its old weights).
        """

    @abstractmethod
    async def load(self, manifest: Manifest) -> LoadReport:
        """Load what `receive` holds: pause at a token boundary, load, label, resume (always). Raises EngineError."""

    @abstractmethod
    async def load_snapshot(self, path: Path, manifest: Manifest) -> LoadReport:
        """Load a safetensors file in the same way; the checksum is verified before the model is touched."""

    async def relabel(self, version: int) -> None:
        """Count as `version` without loading anything (engines with receivers = 0 only)."""
        raise EngineError(f"{type(self).__name__} loads weights; it cannot be relabelled to version {version}")

    @abstractmethod
    async def close(self) -> None:
        """Stop everything that was started; callable more than once."""
