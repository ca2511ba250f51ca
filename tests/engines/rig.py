"""An engine with a learner's sending side, and the torch models that it should agree with."""

from __future__ import annotations

import asyncio
import copy
import itertools
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.engines.base import Engine, LoadReport, Sample, SampleRequest
from async_rl.protocol import EpochInfo, Manifest, SamplingParams
from async_rl.weights.base import SendBuffers
from async_rl.weights.broadcast import Sender

TEMPERATURE = 0.7
DEADLINE_S = 120.0
SLOTS = 8
CLOSE = 1e-4
"""Nats; float32 numerics stay two orders below."""
FAR = 1e-2
"""Nats; other weights are far beyond."""
PROMPT = np.arange(5, 15, dtype=np.int32)


class SamplingRig:
    """Any engine: samples from it, and makes its next version."""

    engine: Engine

    def __init__(self) -> None:
        self.requests = itertools.count()

    async def sample(self, max_tokens: int = 40, seed: int = 0, prompt: np.ndarray = PROMPT, **sampling) -> Sample:
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": TEMPERATURE, "seed": seed, **sampling})
        return await self.engine.sample(SampleRequest(f"request-{next(self.requests)}", prompt, params))

    def start_samples(self, count: int, max_tokens: int) -> list[asyncio.Task[Sample]]:
        """Several long requests that run at once."""
        return [asyncio.create_task(self.sample(max_tokens, seed)) for seed in range(count)]

    async def prepare(self) -> Manifest | int:
        """Bring the next version as far as it goes while requests run."""
        raise NotImplementedError

    async def switch(self, prepared: Manifest | int) -> int:
        """Sample with it from now on; return its number."""
        raise NotImplementedError

    async def running(self) -> int:
        """Requests that hold a slot."""
        raise NotImplementedError

    async def close(self) -> None:
        await self.engine.close()


class Rig(SamplingRig):
    """An engine with a model: `models[version]` is the torch model of each version, all with random weights."""

    def __init__(self, engine: Engine, path: Path) -> None:
        super().__init__()
        self.engine = engine
        self.models: dict[int, PreTrainedModel] = {0: AutoModelForCausalLM.from_pretrained(path).eval()}
        self.sender = Sender("127.0.0.1", "gloo")
        self.epoch = 0
        self.buffers = SendBuffers(bucket_bytes=1 << 18)

    def info(self, deadline_s: float = DEADLINE_S, port: int | None = None) -> EpochInfo:
        """The next epoch: this engine and one sender."""
        self.epoch += 1
        return EpochInfo(
            epoch=self.epoch,
            backend="gloo",
            host="127.0.0.1",
            port=port or self.sender.port,
            rank=1,
            size=2,
            deadline_s=deadline_s,
        )

    async def join(self) -> None:
        info = self.info()
        sending = asyncio.to_thread(self.sender.join, info.epoch, info.size, info.deadline_s)
        await asyncio.gather(sending, self.engine.join_epoch(info))

    def fill(self, wire: torch.dtype = torch.float32) -> Manifest:
        """Make the next version: other random weights of the same model, exact in the wire type."""
        version = len(self.models)
        self.models[version] = model = redrawn(self.models[0], version, wire)
        if wire != torch.float32:
            self.buffers = SendBuffers(self.buffers.bucket_bytes)
        self.buffers.fill((name, parameter.detach().to(wire)) for name, parameter in model.named_parameters())
        return self.buffers.manifest("run", version)

    async def receive(self, manifest: Manifest) -> str:
        """Send what `fill` made; the engine holds it then."""
        if self.sender.epoch is None:
            await self.join()
        sending = asyncio.to_thread(self.sender.send, self.buffers, manifest, DEADLINE_S)
        _, checksum = await asyncio.gather(sending, self.engine.receive(self.epoch, manifest, DEADLINE_S))
        return checksum

    async def publish(self, wire: torch.dtype = torch.float32) -> LoadReport:
        """Make, send and load the next version."""
        manifest = self.fill(wire)
        await self.receive(manifest)
        return await self.engine.load(manifest)

    async def prepare(self) -> Manifest:
        manifest = self.fill()
        assert await self.receive(manifest) == manifest.checksum
        return manifest

    async def switch(self, prepared: Manifest | int) -> int:
        assert isinstance(prepared, Manifest)
        report = await self.engine.load(prepared)
        assert report.checksum == prepared.checksum
        assert report.load_s > 0 and report.paused_s > 0
        return prepared.version

    def distributions(
        self, version: int, sample: Sample, prompt: np.ndarray = PROMPT, temperature: float = TEMPERATURE
    ) -> np.ndarray:
        """float32 [L, vocabulary], log-probabilities by the torch model of `version` where tokens were sampled."""
        ids = torch.tensor(np.concatenate([prompt, sample.completion_ids]), dtype=torch.long)[None]
        with torch.no_grad():
            logits = self.models[version](ids).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, dim=-1).numpy()

    def reference(
        self, version: int, sample: Sample, prompt: np.ndarray = PROMPT, temperature: float = TEMPERATURE
    ) -> np.ndarray:
        """float32 [L], what the torch model of `version` says about the sampled tokens."""
        logprobs = self.distributions(version, sample, prompt, temperature)
        return np.take_along_axis(logprobs, sample.completion_ids[:, None].astype(np.int64), axis=1)[:, 0]

    def gap(
        self, version: int, sample: Sample, prompt: np.ndarray = PROMPT, temperature: float = TEMPERATURE
    ) -> np.ndarray:
        """float32 [L], distance between engine and torch model of `version`."""
        return np.abs(sample.logprobs - self.reference(version, sample, prompt, temperature))

    async def close(self) -> None:
        await self.engine.close()
        self.sender.close()


async def assert_current(rig: Rig, version: int) -> None:
    """The engine samples with exactly the weights of `version`, and says so."""
    sample = await rig.sample()
    assert [span.version for span in sample.versions] == [version]
    assert rig.gap(version, sample).max() < CLOSE


def redrawn(model: PreTrainedModel, seed: int, wire: torch.dtype) -> PreTrainedModel:
    """The same model with other weights, exact in the wire type; norms are spread too, so that every tensor matters."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_((noise if parameter.ndim > 1 else 1 + noise).to(wire))
    return model
