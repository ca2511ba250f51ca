"""What every engine promises, asked of each: simulated, hf, and vllm (slow, marked).

Engines with a model must agree with a plain forward pass of the right version's weights, token by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from async_rl.config import schema
from async_rl.engines.base import EngineError, Sample
from async_rl.engines.hf import HfEngine
from async_rl.engines.simulated import SimulatedEngine
from async_rl.protocol import VersionSpan
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import write_snapshot
from tests.engines.rig import CLOSE, FAR, SLOTS, Rig, SamplingRig, assert_current
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = 300
"""Tokens: long enough that an update comes in the middle."""
PATIENCE_S = 120.0


class SimulatedRig(SamplingRig):
    """The engine without weights: its next version is a label."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SimulatedEngine(
            schema.SimulatedEngine(median_tokens=100, sigma=1.0, tokens_per_s=500, load_s=0.01)
        )

    async def prepare(self) -> int:
        return (self.engine.policy_version or 0) + 1

    async def switch(self, prepared) -> int:
        await self.engine.relabel(prepared)
        return prepared

    async def running(self) -> int:
        return len(self.engine._running)


class HfRig(Rig):
    """The hf engine on a tiny model."""

    def __init__(self, path: Path) -> None:
        super().__init__(HfEngine(schema.HfEngine(), schema.ModelConfig(path=str(path)), slots=SLOTS, threads=1), path)

    async def running(self) -> int:
        return len(self.engine._running)


def build_rig(name: str, folder: Path) -> SamplingRig:
    match name:
        case "simulated":
            return SimulatedRig()
        case "hf-tied":
            return HfRig(tiny_model(folder, tied=True))
        case "hf-untied-llama":
            return HfRig(tiny_model(folder, tied=False, arch="llama"))
        case "vllm":
            from tests.engines import vllm_rig

            return vllm_rig.Rig(tiny_model(folder, tied=True))
    raise AssertionError(name)


WITH_MODEL = ["hf-tied", "hf-untied-llama", pytest.param("vllm", marks=pytest.mark.slow)]
every_engine = pytest.mark.parametrize("rig", ["simulated", *WITH_MODEL], indirect=True, scope="module")
every_model = pytest.mark.parametrize("rig", WITH_MODEL, indirect=True, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(request, tmp_path_factory) -> AsyncIterator[SamplingRig]:
    rig = build_rig(request.param, tmp_path_factory.mktemp(request.param))
    await rig.engine.start()
    yield rig
    await rig.close()


@pytest.fixture(autouse=True)
def recompute(rig):
    rig.engine.running_requests = "recompute"


def assert_whole(sample: Sample, max_tokens: int) -> None:
    """Types, lengths and spans fit each other."""
    length = len(sample.completion_ids)
    assert sample.completion_ids.dtype == np.int32 and sample.logprobs.dtype == np.float32
    assert 1 <= length <= max_tokens and len(sample.logprobs) == length
    assert np.isfinite(sample.logprobs).all() and (sample.logprobs <= 0).all()
    assert [span.start for span in sample.versions] == [0, *(span.end for span in sample.versions[:-1])]
    assert sample.versions[-1].end == length
    assert all(span.start < span.end for span in sample.versions)
    assert sample.finish == "stop" or (sample.finish == "length" and length == max_tokens)


async def in_flight(rig: SamplingRig, running_requests: str) -> tuple[int, int, list[Sample]]:
    """Switch versions while more requests than slots are under way; return old version, new version, samples."""
    old = rig.engine.policy_version or 0
    rig.engine.running_requests = running_requests
    prepared = await rig.prepare()
    tasks = rig.start_samples(SLOTS + 2, max_tokens=LONG)
    await rig.sample(max_tokens=20)
    new = await rig.switch(prepared)
    assert rig.engine.policy_version == new
    return old, new, await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


@every_engine
async def test_many_samples_at_once_are_whole(rig):
    limits = [1, 2, 7, 40] * SLOTS
    samples = await asyncio.gather(*(rig.sample(limit, seed) for seed, limit in enumerate(limits)))
    for sample, limit in zip(samples, limits, strict=True):
        assert_whole(sample, limit)
    assert {sample.finish for sample in samples} == {"stop", "length"}


@every_engine
async def test_seeds_decide_the_tokens(rig):
    same, again, other = await asyncio.gather(rig.sample(seed=5), rig.sample(seed=5), rig.sample(seed=6))
    assert same.completion_ids.tolist() == again.completion_ids.tolist() != other.completion_ids.tolist()


@every_engine
async def test_a_version_holds_from_its_load_on(rig):
    old = rig.engine.policy_version or 0
    assert [span.version for span in (await rig.sample()).versions] == [old]
    new = await rig.switch(await rig.prepare())
    assert rig.engine.policy_version == new != old
    assert [span.version for span in (await rig.sample()).versions] == [new]


@every_engine
@pytest.mark.parametrize("running_requests", ["recompute", "keep"])
async def test_spans_of_running_requests_end_with_the_new_version(rig, running_requests):
    old, new, samples = await in_flight(rig, running_requests)
    for sample in samples:
        assert_whole(sample, LONG)
        assert [span.version for span in sample.versions] in ([old], [new], [old, new])
    assert any(len(sample.versions) == 2 for sample in samples), "no request was running at the switch"


@every_engine
async def test_finished_first_means_one_version_each(rig):
    old, new, samples = await in_flight(rig, "finish")
    for sample in samples:
        assert_whole(sample, LONG)
        assert [span.version for span in sample.versions] in ([old], [new])
    assert samples[0].versions[0].version == old
    assert [span.version for span in (await rig.sample()).versions] == [new]


@every_engine
async def test_cancelled_requests_free_their_slots(rig):
    tasks = rig.start_samples(2 * SLOTS, max_tokens=LONG)
    await rig.sample(max_tokens=1)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    assert_whole(await rig.sample(max_tokens=3), 3)
    assert await rig.running() == 0


@every_model
async def test_logprobs_are_those_of_the_model_whatever_shares_the_batch(rig):
    version = rig.engine.policy_version or 0
    prompts = [np.arange(1 + 5 * n, dtype=np.int32) % 60 + 2 for n in range(2 * SLOTS)]
    samples = await asyncio.gather(*(rig.sample(40, seed, prompt) for seed, prompt in enumerate(prompts)))
    for sample, prompt in zip(samples, prompts, strict=True):
        assert rig.gap(version, sample, prompt).max() < CLOSE


@every_engine
async def test_temperature_zero_is_an_answer_like_any_other(rig):
    """The baseline member of a group is sampled beside the others, also by the engine without a model."""
    greedy, again, other = await asyncio.gather(
        rig.sample(temperature=0.0), rig.sample(temperature=0.0), rig.sample(temperature=1.0)
    )
    for sample in (greedy, again, other):
        assert_whole(sample, 40)
    assert greedy.completion_ids.tolist() == again.completion_ids.tolist()


@every_model
async def test_temperature_zero_takes_the_most_likely_token(rig):
    sample, again = await asyncio.gather(rig.sample(temperature=0.0, seed=1), rig.sample(temperature=0.0, seed=2))
    assert sample.completion_ids.tolist() == again.completion_ids.tolist()
    version = rig.engine.policy_version or 0
    assert rig.gap(version, sample, temperature=1.0).max() < CLOSE
    logprobs = rig.distributions(version, sample, temperature=1.0)
    assert np.abs(sample.logprobs - logprobs.max(axis=1)).max() < CLOSE, "another token was more likely"
    others = await asyncio.gather(*(rig.sample(1, seed, temperature=1.0) for seed in range(20)))
    assert len({int(other.completion_ids[0]) for other in others}) > 1, "nothing was left to choose"


@every_model
async def test_stop_ids_end_and_are_included(rig):
    free = await rig.sample(max_tokens=60, seed=1)
    stop = int(free.completion_ids[3])
    first = free.completion_ids.tolist().index(stop)
    stopped = await rig.sample(max_tokens=60, seed=1, stop_ids=(stop,))
    assert stopped.finish == "stop"
    assert stopped.completion_ids.tolist() == free.completion_ids[: first + 1].tolist()


@every_model
async def test_recomputed_requests_switch_policy_at_the_labelled_token(rig):
    old, new, samples = await in_flight(rig, "recompute")
    switched = [sample for sample in samples if len(sample.versions) == 2]
    for sample in switched:
        at = sample.versions[1].start
        assert rig.gap(old, sample)[:at].max() < CLOSE
        assert rig.gap(new, sample)[at:].max() < CLOSE
        assert rig.gap(old, sample)[at:].max() > FAR


@every_model
async def test_kept_requests_are_labelled_but_are_neither_policy(rig):
    old, new, samples = await in_flight(rig, "keep")
    switched = [sample for sample in samples if len(sample.versions) == 2]
    for sample in switched:
        assert rig.gap(old, sample)[: sample.versions[0].end].max() < CLOSE
    assert max(rig.gap(new, sample)[sample.versions[1].start :].max() for sample in switched) > FAR
    await assert_current(rig, new)


@every_model
async def test_finished_requests_agree_with_their_version(rig):
    _, new, samples = await in_flight(rig, "finish")
    for sample in samples:
        assert sample.versions == (VersionSpan(sample.versions[0].version, 0, len(sample.completion_ids)),)
        assert rig.gap(sample.versions[0].version, sample).max() < CLOSE
    await assert_current(rig, new)


@every_model
async def test_snapshot_is_loaded_and_a_damaged_one_leaves_the_old_weights(rig, tmp_path):
    path = tmp_path / "snapshot.safetensors"
    good = rig.fill()
    write_snapshot(path, good, rig.buffers)
    assert (await rig.engine.load_snapshot(path, good)).checksum == good.checksum
    await assert_current(rig, good.version)
    bad = rig.fill()
    write_snapshot(path, bad, rig.buffers)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="damaged"):
        await rig.engine.load_snapshot(path, bad)
    await assert_current(rig, good.version)


@every_model
async def test_failed_receive_leaves_the_old_weights_and_a_new_epoch_works(rig):
    old, manifest = rig.engine.policy_version or 0, rig.fill()
    await rig.join()
    rig.sender.leave()
    with pytest.raises(WeightsError):
        await rig.engine.receive(rig.epoch, manifest, 1.0)
    await assert_current(rig, old)
    await rig.join()
    await rig.receive(manifest)
    await rig.engine.load(manifest)
    await assert_current(rig, manifest.version)


@every_model
async def test_engines_with_weights_cannot_be_relabelled(rig):
    with pytest.raises(EngineError, match="cannot be relabelled"):
        await rig.engine.relabel(9)


@every_engine
async def test_z_close_ends_what_runs_and_leaves_nothing(rig):
    """Last: it ends the engine."""
    tasks = rig.start_samples(3, max_tokens=LONG)
    await rig.sample(max_tokens=1)
    await rig.engine.close()
    await rig.engine.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert any(isinstance(result, EngineError) for result in results)
    with pytest.raises(EngineError):
        await rig.sample()
    names = {child.name() for child in psutil.Process().children(recursive=True)}
    assert not {name for name in names if "VLLM" in name}
