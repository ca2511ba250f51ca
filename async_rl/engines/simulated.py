"""No model: completions whose lengths and pace come from distributions, for tests and sweeps with many generators.

Time is passed in, so that a test can run hours in a second. Requests work by a clock that stands still while weights
load; where a request is on it says exactly which tokens exist at an update, so version spans are exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_rl.config import schema
from async_rl.engines.base import Engine, EngineError, LoadReport, Sample, SampleRequest
from async_rl.protocol import EpochInfo, Manifest, VersionSpan

_EPSILON = 1e-6
"""Tokens; sleeping until a token exists may end this much of a token early."""


class _Running:
    """One request under way."""

    def __init__(self, length: int, started: float, version: int) -> None:
        self.length, self.started = length, started
        self.switches = [(0, version)]
        """(first token, version), in order."""

    def tokens(self, now: float, tokens_per_s: float) -> int:
        """Tokens that exist at working time `now`."""
        return min(self.length, math.floor((now - self.started) * tokens_per_s + _EPSILON))

    def switch(self, first_token: int, version: int) -> None:
        """Tokens from `first_token` on are sampled by `version`."""
        self.switches.append((first_token, version))

    def spans(self) -> tuple[VersionSpan, ...]:
        """Exact spans; a version that sampled no token has none."""
        starts = [first for first, _ in self.switches]
        ends = [*starts[1:], self.length]
        return tuple(
            VersionSpan(version, start, end)
            for (start, version), end in zip(self.switches, ends, strict=True)
            if start < end
        )


def known_tokens(model: str | Path) -> int | None:
    """Size of the vocabulary in a model folder's config.json; None where there is none to be read."""
    try:
        settings = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(settings.get("text_config", settings)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class SimulatedEngine(Engine):
    """Sleeps instead of sampling; the policy is uniform noise."""

    receivers = 0

    def __init__(
        self,
        config: schema.SimulatedEngine,
        *,
        slots: int | None = None,
        running_requests: Literal["recompute", "keep", "finish"] = "recompute",
        known_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config, self.running_requests = config, running_requests
        # The learner looks every id up in the embedding of its model.
        self._vocab_size = min(config.vocab_size, known_tokens or config.vocab_size)
        self._clock, self._sleep = clock, sleep
        # Requests beyond the slots wait, as they do in a real engine.
        free = asyncio.Semaphore(slots) if slots else contextlib.nullcontext()
        self._slots: contextlib.AbstractAsyncContextManager[Any] = free
        self._running: set[_Running] = set()
        self._closed = False
        self._stood_still_s = 0.0
        self._paused_at: float | None = None
        self._resumed, self._idle = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._idle.set()

    async def start(self) -> None:
        """Nothing to start."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Sleep for as long as sampling would take; length, tokens and logprobs follow from the request's seed."""
        async with self._slots:
            return await self._sample(request)

    async def _sample(self, request: SampleRequest) -> Sample:
        await self._resumed.wait()
        self._raise_closed()
        random = np.random.default_rng(request.sampling.seed)
        wanted = self.draw_length(random)
        length = min(wanted, request.sampling.max_tokens)
        running = _Running(length, self._now(), self.policy_version or 0)
        self._running.add(running)
        self._idle.clear()
        try:
            while running.tokens(self._now(), self.config.tokens_per_s) < length:
                await self._work(running)
        finally:
            self._running.discard(running)
            if not self._running:
                self._idle.set()
        return Sample(
            completion_ids=random.integers(0, self._vocab_size, length, dtype=np.int32),
            logprobs=-random.exponential(size=length).astype(np.float32),
            versions=running.spans(),
            finish="stop" if wanted <= request.sampling.max_tokens else "length",
        )

    async def relabel(self, version: int) -> None:
        """Stand still for load_s, then count as `version`; running requests go on under it, or finish first."""
        self._raise_closed()
        self._resumed.clear()
        try:
            if self.running_requests == "finish":
                await self._idle.wait()
            self._paused_at = self._clock()
            await self._sleep(self.config.load_s)
            for running in self._running:
                running.switch(running.tokens(self._now(), self.config.tokens_per_s), version)
            self.policy_version = version
        finally:
            if self._paused_at is not None:
                self._stood_still_s += self._clock() - self._paused_at
            self._paused_at = None
            self._resumed.set()

    def draw_length(self, random: np.random.Generator) -> int:
        """Tokens until the completion would end by itself: lognormal, at least 1."""
        return max(1, round(self.config.median_tokens * math.exp(self.config.sigma * random.standard_normal())))

    async def _work(self, running: _Running) -> None:
        """Wait until the last token may exist; pauses on the way make the caller come back."""
        if self._paused_at is not None:
            await self._resumed.wait()
        else:
            end = running.started + running.length / self.config.tokens_per_s
            await self._sleep(max(end - self._now(), _EPSILON / self.config.tokens_per_s))
        self._raise_closed()

    def _now(self) -> float:
        """Working time: it stands still while weights load."""
        return (self._clock() if self._paused_at is None else self._paused_at) - self._stood_still_s

    def _raise_closed(self) -> None:
        if self._closed:
            raise EngineError("the simulated engine was closed")

    async def join_epoch(self, info: EpochInfo) -> None:
        """Refused: there are no weights to receive."""
        raise self._no_weights()

    async def receive(self, epoch: int, manifest: Manifest, deadline_s: float) -> str:
        """Refused: there are no weights to receive."""
        raise self._no_weights()

    async def load(self, manifest: Manifest) -> LoadReport:
        """Refused: there are no weights to load."""
        raise self._no_weights()

    async def load_snapshot(self, path: Path, manifest: Manifest) -> LoadReport:
        """Refused: there are no weights to load."""
        raise self._no_weights()

    def _no_weights(self) -> EngineError:
        return EngineError("the simulated engine loads no weights (receivers = 0); relabel it instead")

    async def close(self) -> None:
        """Samples under way raise EngineError when they wake."""
        self._closed = True
