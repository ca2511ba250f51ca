"""vLLM on an untied Llama that was trained and exported: its start, updates, a narrow wire type, and a failed load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from async_rl.checkpoints.export import export_checkpoint
from async_rl.checkpoints.find import find_named
from async_rl.engines.base import EngineError
from async_rl.learner.ranks import init_ranks
from tests.engines.vllm_rig import Rig, assert_current
from tests.learner.helpers import make_config
from tests.learner.resumed import train_on
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def train_and_export(folder: Path) -> Path:
    """A step of the learner, its checkpoint, and the folder that is made of it, in two files of weights."""
    config = make_config(tiny_model(folder / "begun", tied=False, seed=3, arch="llama"),
                         run={"dir": str(folder / "run"), "steps": 1}, learner={"lr": 1e-2})  # fmt: skip
    threads = torch.get_num_threads()
    ctx = init_ranks(config)
    try:
        train_on(config, ctx, 1)
    finally:
        ctx.close()
        torch.set_num_threads(threads)
    files = export_checkpoint(find_named(config.run.dir), folder / "exported", max_shard_bytes=1_000_000)
    assert len(files) == 2
    return folder / "exported"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untied")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(folder):
    rig = Rig(train_and_export(folder))
    await rig.engine.start()
    yield rig
    await rig.close()


async def test_it_starts_from_an_exported_checkpoint(rig, folder):
    """The engine's logprobs are those of the trained weights, not of the model that training began with."""
    await assert_current(rig, 0)
    begun = AutoModelForCausalLM.from_pretrained(folder / "begun").state_dict()
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    assert all((begun[name] - exported[name]).abs().max() > 5e-3 for name in begun)


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
