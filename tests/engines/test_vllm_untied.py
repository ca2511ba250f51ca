"""vLLM on an untied Llama: updates, a narrow wire type, and the end of an engine whose load failed."""

from __future__ import annotations

import asyncio

import psutil
import pytest
import pytest_asyncio
import torch

from async_rl.engines.base import EngineError
from tests.engines.vllm_rig import Rig, assert_current
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    rig = Rig(tiny_model(tmp_path_factory.mktemp("untied"), tied=False, seed=3, arch="llama"))
    await rig.engine.start()
    yield rig
    await rig.close()


async def test_updates_reach_every_layer_of_an_untied_model(rig):
    await assert_current(rig, 0)
    for version in (1, 2):
        await rig.publish()
        await assert_current(rig, version)


async def test_weights_may_travel_as_bfloat16(rig):
    await rig.publish(wire=torch.bfloat16)
    await assert_current(rig, rig.engine.policy_version)


async def test_z_failed_load_ends_the_engine(rig):
    """Last: it ends the engine, for no sample may come from half of a new model."""
    manifest = rig.fill(torch.bfloat16)
    await rig.receive(manifest)
    await rig.engine._rpc("faults_break_load")
    tasks = rig.start_samples(3, max_tokens=400)
    await rig.sample(max_tokens=1)
    with pytest.raises(EngineError, match="broken on purpose"):
        await rig.engine.load(manifest)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert any(isinstance(result, EngineError) for result in results)
    with pytest.raises(EngineError, match="broken on purpose"):
        await rig.sample()
    processes = list(rig.engine._watch.names)
    await rig.engine.close()
    assert not [process for process in processes if psutil.pid_exists(process.pid)]
