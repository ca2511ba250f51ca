"""What the vLLM engine does outside vLLM: no engine is started here."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config import schema
from async_rl.engines import vllm
from async_rl.engines.base import EngineError
from async_rl.engines.vllm_process import OWNER_VARIABLE, published_shapes
from async_rl.errors import InputError
from async_rl.protocol import EpochInfo, VersionSpan
from async_rl.weights.errors import WeightsError
from tests.tiny_models import tiny_model


def completion(token_ids, spans, finish_reason="length"):
    spans = [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans]
    logprobs = SimpleNamespace(logprobs=[-0.5 * (i + 1) for i in range(len(token_ids))])
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs, weight_versions=spans, finish_reason=finish_reason)


def test_completion_becomes_a_sample():
    sample = vllm._sample(completion([7, 8, 9], [("4", 0, 2), ("6", 2, 3)], "stop"))
    assert sample.completion_ids.dtype == np.int32 and sample.completion_ids.tolist() == [7, 8, 9]
    assert sample.logprobs.dtype == np.float32 and sample.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert sample.versions == (VersionSpan(4, 0, 2), VersionSpan(6, 2, 3))
    assert sample.finish == "stop"


def test_aborted_before_the_first_token_is_an_empty_sample():
    sample = vllm._sample(SimpleNamespace(token_ids=[], logprobs=None, weight_versions=[], finish_reason="abort"))
    assert (sample.completion_ids.size, sample.logprobs.size, sample.versions, sample.finish) == (0, 0, (), "aborted")


@pytest.mark.parametrize("spans", [[], [("1", 0, 2)], [("1", 1, 3)], [("1", 0, 1), ("2", 2, 3)], [("1", 0, 4)]])
def test_spans_that_leave_a_token_without_version_are_refused(spans):
    with pytest.raises(AssertionError, match="do not cover 3 tokens"):
        vllm._sample(completion([7, 8, 9], spans))


def test_a_finish_reason_that_is_no_sample_is_an_engine_error():
    with pytest.raises(EngineError, match="'error'"):
        vllm._sample(completion([7], [("1", 0, 1)], "error"))


def test_published_shapes_are_those_of_the_learners_parameters(tmp_path):
    from transformers import AutoModelForCausalLM

    for tied in (True, False):
        path = tiny_model(tmp_path / str(tied), tied=tied)
        parameters = AutoModelForCausalLM.from_pretrained(path).named_parameters()
        assert published_shapes(path) == {name: tuple(parameter.shape) for name, parameter in parameters}


def test_published_shapes_leave_out_what_a_learner_never_sends(tmp_path):
    path = tiny_model(tmp_path, tied=True)
    expected = published_shapes(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert published_shapes(path) == expected


def test_folder_without_safetensors_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no \*.safetensors file"):
        published_shapes(tmp_path)


def test_process_ends_with_its_owner():
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = (
        "from async_rl.engines.vllm_process import end_with_owner; end_with_owner(); print('up', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", OWNER_VARIABLE: str(owner.pid)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert child.poll() is None
        owner.kill()
        owner.wait(120)
        assert child.wait(120) == -signal.SIGKILL
    finally:
        owner.kill()
        child.kill()


class Workers:
    """Answers for the workers of a tensor-parallel engine: one list per call, the last one for ever."""

    def __init__(self, begin, poll):
        self.answers = {"weights_begin_join": list(begin), "weights_poll": list(poll)}
        self.calls = []

    async def __call__(self, method, arguments=(), timeout_s=0.0):
        self.calls.append(method)
        answers = self.answers[method]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def state(running=False, checksum=None, error=None):
    return {"running": running, "checksum": checksum, "error": error}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(vllm, "GRACE_S", 0.05)
    engine = vllm.VllmEngine(
        schema.VllmEngine(tensor_parallel=2), schema.ModelConfig(path="model"), max_model_len=8, slots=1, threads=1
    )
    engine._llm = object()
    return engine


JOIN = EpochInfo(epoch=1, backend="gloo", host="127.0.0.1", port=1, rank=1, size=3, deadline_s=0.1)
PATIENT = msgspec.structs.replace(JOIN, deadline_s=120.0)


async def test_transfer_waits_for_all_workers(engine):
    polls = [[state(running=True)] * 2, [state(), state(running=True)], [state(), state()]]
    engine._rpc = workers = Workers([[None, None]], polls)
    await engine.join_epoch(PATIENT)
    assert engine.receivers == 2 and workers.calls.count("weights_poll") == 3


async def test_error_of_one_worker_is_the_transfers(engine):
    engine._rpc = Workers([[None, None]], [[state(), state(error="rank 2 saw nothing")]])
    with pytest.raises(WeightsError, match="rank 2 saw nothing"):
        await engine.join_epoch(PATIENT)


async def test_workers_that_received_different_bytes_are_an_error(engine):
    engine._rpc = Workers([[None, None]], [[state(checksum="a"), state(checksum="b")]])
    with pytest.raises(WeightsError, match="different bytes"):
        await engine.join_epoch(PATIENT)


async def test_stuck_transfer_is_an_error_after_its_deadline(engine):
    engine._rpc = Workers([[None, None]], [[state(running=True)] * 2])
    with pytest.raises(WeightsError, match="still running"):
        await engine.join_epoch(JOIN)


async def test_transfer_waits_for_an_abandoned_one_and_names_it(engine):
    engine._rpc = workers = Workers([["join epoch 0", None], [None, None]], [[state(), state()]])
    await engine.join_epoch(PATIENT)
    assert workers.calls == ["weights_begin_join", "weights_begin_join", "weights_poll"]
    engine._rpc = Workers([["join epoch 0", None]], [[state(), state()]])
    with pytest.raises(WeightsError, match="'join epoch 0'"):
        await engine.join_epoch(JOIN)


@pytest.mark.slow
def test_worker_takes_its_own_rank_in_the_group(monkeypatch):
    from async_rl.engines import vllm_plugin

    seen = []

    class Receiver:
        def __init__(self, device):
            self.device = device

        def expect(self, shapes):
            seen.append(shapes)

        def join(self, info, rank_offset):
            seen.append(info.rank + rank_offset)

    monkeypatch.setattr(vllm_plugin, "Receiver", Receiver)
    worker = object.__new__(vllm_plugin.HeldWeightsEngine)
    worker.job, worker.receiver, worker.shapes = None, None, {"w": (2,)}
    worker.device, worker.parallel_config = torch.device("cpu"), SimpleNamespace(rank=3)
    worker.init_transfer_engine(vllm_plugin.JoinInfo(msgspec.msgpack.encode(JOIN)))
    worker.job.join(120)
    assert worker.job.error is None and seen == [{"w": (2,)}, 4]
    vllm_plugin.register()
    vllm_plugin.register()
