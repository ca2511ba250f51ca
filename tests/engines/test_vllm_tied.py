"""vLLM on a tied model: numbers, versions, updates in flight, failed transfers. One engine serves all tests here."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio

from async_rl.engines.base import EngineError
from async_rl.errors import InputError
from async_rl.protocol import Manifest, VersionSpan
from async_rl.weights.base import manifest_digest
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import write_snapshot
from tests.engines.vllm_rig import CLOSE, DEADLINE_S, FAR, SLOTS, Rig, assert_current
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    rig = Rig(tiny_model(tmp_path_factory.mktemp("tied"), tied=True))
    await rig.engine.start()
    yield rig
    await rig.close()


@pytest.fixture(autouse=True)
def recompute(rig):
    rig.engine.running_requests = "recompute"


async def in_flight(rig: Rig, running_requests: str):
    """Publish while long requests run; return the new version and their samples."""
    rig.engine.running_requests = running_requests
    manifest = rig.fill()
    await rig.receive(manifest)
    tasks = rig.start_samples(SLOTS, max_tokens=300)
    await rig.sample(max_tokens=20)
    report = await rig.engine.load(manifest)
    return manifest.version, [await task for task in tasks], report


async def test_initial_weights_are_version_zero(rig):
    await assert_current(rig, 0)


async def test_seeds_decide_the_tokens(rig):
    same, again, other = await asyncio.gather(rig.sample(seed=5), rig.sample(seed=5), rig.sample(seed=6))
    assert same.completion_ids.tolist() == again.completion_ids.tolist() != other.completion_ids.tolist()


async def test_stop_token_ends_and_is_included(rig):
    free = await rig.sample(max_tokens=60, seed=1)
    stop = int(free.completion_ids[10])
    first = free.completion_ids.tolist().index(stop)
    stopped = await rig.sample(max_tokens=60, seed=1, stop_ids=(stop,))
    assert stopped.finish == "stop"
    assert stopped.completion_ids.tolist() == free.completion_ids[: first + 1].tolist()
    assert len(stopped.logprobs) == first + 1


async def test_request_that_does_not_fit_is_refused(rig):
    with pytest.raises(InputError, match=r"needs 10 prompt \+ 503 completion tokens, the engine holds 512"):
        await rig.sample(max_tokens=503)


async def test_update_reaches_a_tied_head(rig):
    report = await rig.publish()
    version = rig.engine.policy_version
    assert version == len(rig.models) - 1 and report.paused_s >= report.load_s > 0
    await assert_current(rig, version)


async def test_without_new_packing_a_tied_head_would_stay_old(rig):
    try:
        await rig.engine._rpc("faults_forget_heads", (True,))
        await rig.publish()
        stale = await rig.sample()
        assert rig.gap(rig.engine.policy_version, stale).max() > FAR
    finally:
        await rig.engine._rpc("faults_forget_heads", (False,))
    await rig.publish()
    await assert_current(rig, rig.engine.policy_version)


async def test_recomputed_requests_switch_policy_at_the_labelled_token(rig):
    old = rig.engine.policy_version
    new, samples, _ = await in_flight(rig, "recompute")
    switched = [sample for sample in samples if len(sample.versions) == 2]
    assert switched, "no request was running at the update"
    for sample in switched:
        before, after = sample.versions
        assert (before.version, before.start, after.version, after.end) == (old, 0, new, len(sample.completion_ids))
        assert rig.gap(old, sample)[: before.end].max() < CLOSE
        assert rig.gap(new, sample)[after.start :].max() < CLOSE
        assert rig.gap(old, sample)[after.start :].max() > FAR


async def test_kept_requests_are_labelled_but_are_neither_policy(rig):
    old = rig.engine.policy_version
    new, samples, _ = await in_flight(rig, "keep")
    switched = [sample for sample in samples if len(sample.versions) == 2]
    assert switched, "no request was running at the update"
    for sample in switched:
        before, after = sample.versions
        assert (before.version, after.version) == (old, new)
        assert rig.gap(old, sample)[: before.end].max() < CLOSE
    assert max(rig.gap(new, sample)[sample.versions[1].start :].max() for sample in switched) > FAR
    await assert_current(rig, new)


async def test_finished_requests_are_of_one_version(rig):
    old = rig.engine.policy_version
    new, samples, _ = await in_flight(rig, "finish")
    for sample in samples:
        assert sample.versions == (VersionSpan(old, 0, len(sample.completion_ids)),)
        assert rig.gap(old, sample).max() < CLOSE
    await assert_current(rig, new)


@pytest.mark.parametrize("running_requests", ["recompute", "keep"])
async def test_prefix_of_an_old_version_is_not_used_again(rig, running_requests):
    rig.engine.running_requests = running_requests
    prompt = np.arange(2, 72, dtype=np.int32)
    await rig.sample(prompt=prompt)
    await rig.sample(prompt=prompt, seed=1)
    await rig.publish()
    sample = await rig.sample(prompt=prompt, seed=2)
    assert rig.gap(rig.engine.policy_version, sample, prompt).max() < CLOSE


async def test_cancelled_request_leaves_the_batch(rig):
    tasks = rig.start_samples(SLOTS, max_tokens=400)
    await rig.sample(max_tokens=1)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
    assert cancelled > 0, "every request was finished before it could be cancelled"
    await rig.sample(max_tokens=2)
    (running,) = await rig.engine._rpc("faults_running")
    assert len(running) <= 1


async def test_snapshot_is_loaded(rig, tmp_path):
    manifest = rig.fill()
    write_snapshot(tmp_path / "snapshot.safetensors", manifest, rig.buffers)
    report = await rig.engine.load_snapshot(tmp_path / "snapshot.safetensors", manifest)
    assert report.checksum == manifest.checksum
    await assert_current(rig, manifest.version)


async def test_damaged_snapshot_is_refused_and_the_old_weights_stay(rig, tmp_path):
    old, manifest = rig.engine.policy_version, rig.fill()
    path = tmp_path / "snapshot.safetensors"
    write_snapshot(path, manifest, rig.buffers)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="damaged"):
        await rig.engine.load_snapshot(path, manifest)
    await assert_current(rig, old)


def other_digest(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, digest="0" * 32)


def other_checksum(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, checksum="0" * 32)


@pytest.mark.parametrize(("break_it", "match"), [(other_digest, "digest"), (other_checksum, "checksum")])
async def test_wrong_publication_is_refused_and_the_old_weights_stay(rig, break_it, match):
    old, manifest = rig.engine.policy_version, rig.fill()
    await rig.join()
    sending = asyncio.to_thread(rig.sender.send, rig.buffers, manifest, DEADLINE_S)
    sent, received = await asyncio.gather(
        sending, rig.engine.receive(rig.epoch, break_it(manifest), 10), return_exceptions=True
    )
    assert isinstance(sent, WeightsError), "the sender must hear of it"
    assert isinstance(received, WeightsError) and match in str(received)
    await assert_current(rig, old)


async def test_publication_of_another_model_is_refused(rig):
    old, manifest = rig.engine.policy_version, rig.fill()
    name = "model.norm.weight"
    tensors = tuple(replace_name(t, name, "model.norm.bias") for t in manifest.tensors)
    wrong = msgspec.structs.replace(manifest, tensors=tensors, digest=manifest_digest(tensors))
    await rig.join()
    sending = asyncio.to_thread(rig.sender.send, rig.buffers, manifest, DEADLINE_S)
    _, received = await asyncio.gather(
        sending, rig.engine.receive(rig.epoch, wrong, DEADLINE_S), return_exceptions=True
    )
    assert isinstance(received, WeightsError) and name in str(received)
    await assert_current(rig, old)


def replace_name(tensor, old: str, new: str):
    return msgspec.structs.replace(tensor, name=new) if tensor.name == old else tensor


async def test_sampling_goes_on_while_a_group_waits_for_its_members(rig):
    joining = asyncio.create_task(rig.engine.join_epoch(rig.info(deadline_s=12)))
    await rig.sample()
    assert not joining.done(), "nobody else has joined"
    with pytest.raises(WeightsError, match="12 s"):
        await joining
    await assert_current(rig, rig.engine.policy_version)


async def test_abandoned_join_does_not_spoil_the_next(rig):
    joining = asyncio.create_task(rig.engine.join_epoch(rig.info(deadline_s=3)))
    await rig.sample(max_tokens=5)
    joining.cancel()
    await rig.join()
    await rig.publish()
    await assert_current(rig, rig.engine.policy_version)


DYING_SENDER = """
import os, signal, sys
import msgspec, torch
from async_rl.protocol import Manifest
from async_rl.weights.broadcast import Sender

class Deadly(list):
    def __iter__(self):
        yield self[0]
        os.kill(os.getpid(), signal.SIGKILL)

class Buffers:
    buckets = Deadly([torch.zeros(1 << 18, dtype=torch.uint8)] * 5)

epoch, manifest = int(sys.argv[1]), msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=Manifest)
sender = Sender("127.0.0.1", "gloo")
print(sender.port, flush=True)
sender.join(epoch, 2, 30)
sender.send(Buffers(), manifest, 30)
"""


async def test_sender_that_dies_while_it_sends_is_noticed(rig):
    old, manifest = rig.engine.policy_version, rig.fill()
    encoded = msgspec.msgpack.encode(manifest).hex()
    dying = subprocess.Popen(
        [sys.executable, "-c", DYING_SENDER, str(rig.epoch + 1), encoded], stdout=subprocess.PIPE, text=True
    )
    try:
        assert dying.stdout is not None
        port = int(await asyncio.to_thread(dying.stdout.readline))
        await rig.engine.join_epoch(rig.info(port=port))
        with pytest.raises(WeightsError):
            await rig.engine.receive(rig.epoch, manifest, 10)
        assert dying.wait(120) == -signal.SIGKILL
    finally:
        dying.kill()
    await assert_current(rig, old)
    await rig.join()
    await rig.publish()
    await assert_current(rig, rig.engine.policy_version)


async def test_z_death_of_a_worker_ends_every_sample_and_close_leaves_nothing(rig):
    """Last: it ends the engine."""
    processes = list(rig.engine._watch.names)
    (worker,) = rig.engine._watch.workers
    tasks = rig.start_samples(3, max_tokens=400)
    await rig.sample(max_tokens=1)
    os.kill(worker.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert any(isinstance(result, EngineError) for result in results)
    with pytest.raises(EngineError, match="Worker"):
        await rig.sample()
    with pytest.raises(EngineError):
        await rig.engine.join_epoch(rig.info())
    await rig.engine.close()
    await rig.engine.close()
    assert not [process for process in processes if psutil.pid_exists(process.pid)]
