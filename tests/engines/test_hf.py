"""What only the hf engine has: its batch, its thread, its refusals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config import schema
from async_rl.engines import hf_batch
from async_rl.engines.base import EngineError, SampleRequest
from async_rl.engines.hf import HfEngine
from async_rl.engines.hf_batch import Batch, Row
from async_rl.errors import InputError
from async_rl.protocol import SamplingParams
from async_rl.weights.base import manifest_digest
from async_rl.weights.errors import WeightsError
from tests.engines.rig import CLOSE, Rig, assert_current
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
async def rig(path: Path) -> AsyncIterator[Rig]:
    rig = Rig(HfEngine(schema.HfEngine(), schema.ModelConfig(path=str(path)), slots=4, threads=1), path)
    await rig.engine.start()
    yield rig
    await rig.close()


def new_row(seed: int, prompt_tokens: int, max_tokens: int) -> Row:
    prompt = np.arange(prompt_tokens, dtype=np.int32) % 50 + 2
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=seed)
    return Row(SampleRequest(str(seed), prompt, params), frozenset())


@pytest.mark.parametrize("prefill_tokens", [1, 16384])
def test_joining_and_leaving_in_any_order_changes_no_row(path: Path, monkeypatch, prefill_tokens: int) -> None:
    monkeypatch.setattr(hf_batch, "PREFILL_TOKENS", prefill_tokens)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    batch, random, done = Batch(model), np.random.default_rng(0), []
    rows = [new_row(seed, int(random.integers(1, 30)), int(random.integers(1, 20))) for seed in range(30)]
    waiting = list(rows)
    while waiting or len(batch):
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            batch.add(waiting.pop(0))
        if len(batch) and random.random() < 0.1:
            batch.forget()
        if len(batch) > 3 and random.random() < 0.1:
            batch.drop([batch.rows[1]])
        if len(batch):
            done += batch.step(version=0)
    assert len(done) > 20
    for row in done:
        ids = torch.tensor([row.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0] / 0.7, -1)
        start = len(row.request.prompt_ids)
        expected = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert np.abs(np.array(row.logprobs) - expected.numpy()).max() < CLOSE
        alone = Batch(model)
        twin = new_row(row.request.sampling.seed, start, row.request.sampling.max_tokens)
        alone.add(twin)
        while len(alone):
            alone.step(version=0)
        assert twin.tokens == row.tokens


def test_sampled_tokens_follow_the_distribution(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    batch = Batch(model)
    for seed in range(4000):
        batch.add(new_row(seed, prompt_tokens=3, max_tokens=1))
    rows = batch.step(version=0)
    with torch.no_grad():
        prompt = torch.tensor([rows[0].request.prompt_ids.tolist()])
        expected = torch.softmax(model(prompt).logits[0, -1] / 0.7, -1).numpy()
    counts = np.bincount([row.tokens[-1] for row in rows], minlength=len(expected))
    chi_square = ((counts - 4000 * expected) ** 2 / (4000 * expected))[4000 * expected > 5].sum()
    bins = int((4000 * expected > 5).sum())
    assert chi_square < bins + 4 * (2 * bins) ** 0.5  # four standard deviations above the mean


async def test_requests_beyond_the_slots_wait_their_turn(rig: Rig) -> None:
    tasks = rig.start_samples(12, max_tokens=20)
    peak = 0
    while not all(task.done() for task in tasks):
        peak = max(peak, len(rig.engine._running))
        await asyncio.sleep(0)
    assert 2 <= peak <= 4
    assert all(task.result().finish in ("stop", "length") for task in tasks)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "empty prompt"),
        ([3, 4], 511, "needs 513 prompt and completion tokens, the model holds 512"),
        ([3, 900], 5, r"prompt tokens 3\.\.900, the model knows"),
        ([-1, 3], 5, r"prompt tokens -1\.\.3"),
    ],
)
async def test_impossible_requests_are_refused_and_harm_nobody(rig: Rig, prompt, max_tokens: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        await rig.sample(max_tokens, prompt=np.array(prompt, dtype=np.int32))
    await assert_current(rig, 0)


async def test_publication_of_another_model_is_refused_on_both_ends(rig: Rig) -> None:
    manifest = rig.fill()
    tensors = tuple(
        msgspec.structs.replace(info, name="model.norm.bias") if info.name == "model.norm.weight" else info
        for info in manifest.tensors
    )
    wrong = msgspec.structs.replace(manifest, tensors=tensors, digest=manifest_digest(tensors))
    await rig.join()
    sending = asyncio.to_thread(rig.sender.send, rig.buffers, manifest, 20.0)
    outcomes = await asyncio.gather(sending, rig.engine.receive(rig.epoch, wrong, 20.0), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, WeightsError) and "model.norm.bias" in str(outcome)
    await assert_current(rig, 0)


async def test_bfloat16_on_the_wire_is_loaded_into_float32(rig: Rig) -> None:
    await rig.publish(torch.bfloat16)
    await assert_current(rig, 1)


async def test_loading_what_was_not_received_is_an_error_and_the_engine_goes_on(rig: Rig) -> None:
    with pytest.raises(EngineError, match="was not received"):
        await rig.engine.load(rig.fill())
    await assert_current(rig, 0)


async def test_error_in_the_models_thread_reaches_everybody(rig: Rig, monkeypatch) -> None:
    def out_of_memory(batch: Batch, version: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Batch, "step", out_of_memory)
    for result in await asyncio.gather(*rig.start_samples(6, 20), return_exceptions=True):
        assert isinstance(result, EngineError) and "out of memory" in str(result)
    with pytest.raises(EngineError, match="out of memory"):
        await rig.sample()


async def test_missing_model_is_named(tmp_path: Path) -> None:
    engine = HfEngine(schema.HfEngine(), schema.ModelConfig(path=str(tmp_path / "none")), slots=1, threads=1)
    with pytest.raises(EngineError, match="none"):
        await engine.start()
    await engine.close()


async def test_a_cancellation_that_comes_together_with_a_transfer_s_end_is_heard(rig: Rig) -> None:
    """`asyncio.wait_for` of Python 3.11 gives the result instead, and what was told to end goes on for ever."""
    ended, go_on = threading.Event(), threading.Event()

    def work() -> int:
        go_on.wait(60)
        ended.set()
        return 1

    task = asyncio.create_task(rig.engine._transfer(work, 60.0, "testing"))
    await asyncio.sleep(0)
    go_on.set()
    ended.wait(60)
    time.sleep(0.2)  # Without yielding: the result waits in the loop, behind this function.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
