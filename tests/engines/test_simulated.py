"""The simulated engine in virtual time: to the token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import build_config, schema
from async_rl.engines import build_engine
from async_rl.engines.base import EngineError, SampleRequest
from async_rl.engines.simulated import SimulatedEngine, known_tokens
from async_rl.protocol import SamplingParams, VersionSpan
from tests.engines.virtual_time import VirtualTime


class Bench:
    """An engine of 10 tokens/s whose completions have exactly 100 tokens, unless told otherwise."""

    def __init__(self, running_requests: str = "recompute", **settings: float) -> None:
        self.time = VirtualTime()
        config = schema.SimulatedEngine(**{"median_tokens": 100, "sigma": 0, "tokens_per_s": 10, **settings})
        self.engine = SimulatedEngine(
            config, running_requests=running_requests, clock=self.time.now, sleep=self.time.sleep
        )

    def start(self, seed: int = 0, max_tokens: int = 1000) -> asyncio.Task:
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
        return asyncio.create_task(self.engine.sample(SampleRequest("r", np.zeros(3, dtype=np.int32), params)))


async def test_a_completion_takes_its_tokens_divided_by_the_rate():
    bench = Bench()
    task = bench.start()
    await bench.time.run_until(9.99)
    assert not task.done()
    await bench.time.run_until(10.0)
    assert task.result().versions == (VersionSpan(0, 0, 100),)
    assert task.result().finish == "stop"


async def test_every_token_is_one_that_the_model_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    config = build_config(
        {
            "model": {"path": str(tmp_path)},
            "environment": {"type": "arithmetic"},
            "generator": {"engine": {"type": "simulated", "sigma": 0, "tokens_per_s": 1e9}},
        }
    )
    request = SampleRequest("r", np.zeros(3, dtype=np.int32), SamplingParams(max_tokens=64, temperature=1.0, seed=0))
    assert set((await build_engine(config, seed=0, threads=1).sample(request)).completion_ids) == set(range(7))
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 200}}')
    tokens = (await build_engine(config, seed=0, threads=1).sample(request)).completion_ids
    assert 7 < max(tokens) < 100  # those of engine.vocab_size


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"vocab_size": null}'])
def test_a_folder_that_says_no_size_leaves_the_setting(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert known_tokens(tmp_path) is None


async def test_requests_run_side_by_side_and_stop_at_their_limit():
    bench = Bench()
    tasks = [bench.start(max_tokens=limit) for limit in (10, 50, 100, 101)]
    await bench.time.run_until(5.0)
    assert [task.done() for task in tasks] == [True, True, False, False]
    await bench.time.run_until(10.0)
    assert [(task.result().finish, len(task.result().completion_ids)) for task in tasks] == [
        ("length", 10), ("length", 50), ("stop", 100), ("stop", 100),
    ]  # fmt: skip


async def test_versions_switch_at_the_token_and_loading_stops_the_clock():
    bench = Bench(load_s=2.0)
    task = bench.start()
    await bench.time.run_until(3.25)  # 32 tokens exist
    relabel = asyncio.create_task(bench.engine.relabel(1))
    await bench.time.run_until(5.2)
    late = bench.start()  # waits for the load to end
    assert not relabel.done() and bench.engine.policy_version is None
    await bench.time.run_until(5.25)
    assert relabel.done() and bench.engine.policy_version == 1
    await bench.time.run_until(8.25)  # 3 s of work later
    second = asyncio.create_task(bench.engine.relabel(2))
    await bench.time.run_until(10.25)
    assert second.done()
    await bench.time.run_until(13.99)
    assert not task.done()
    await bench.time.run_until(14.0)  # 10 s of work and 4 s of loading
    assert task.result().versions == (VersionSpan(0, 0, 32), VersionSpan(1, 32, 62), VersionSpan(2, 62, 100))
    await bench.time.run_until(17.24)
    assert not late.done()
    await bench.time.run_until(17.25)
    assert late.result().versions == (VersionSpan(1, 0, 30), VersionSpan(2, 30, 100))


async def test_two_labels_between_two_tokens_leave_one_span():
    bench = Bench()
    task = bench.start()
    await bench.time.run_until(1.01)
    for version in (1, 2):
        relabel = asyncio.create_task(bench.engine.relabel(version))
        await bench.time.run_until(bench.time.now() + 0.01)
        await relabel
    await bench.time.run_until(20.0)
    assert task.result().versions == (VersionSpan(0, 0, 10), VersionSpan(2, 10, 100))


async def test_finish_lets_running_requests_end_and_new_ones_wait():
    bench = Bench("finish", load_s=1.0)
    task = bench.start()
    await bench.time.run_until(5.0)
    relabel = asyncio.create_task(bench.engine.relabel(1))
    await bench.time.run_until(6.0)
    late = bench.start()
    await bench.time.run_until(10.0)
    assert task.done() and not relabel.done()
    await bench.time.run_until(11.0)
    assert relabel.done()
    await bench.time.run_until(21.0)
    assert task.result().versions == (VersionSpan(0, 0, 100),)
    assert late.result().versions == (VersionSpan(1, 0, 100),)


async def test_lengths_are_lognormal_and_follow_the_seed():
    bench = Bench(median_tokens=100, sigma=0.5)
    tasks = [bench.start(seed, max_tokens=100_000) for seed in range(4000)]
    again = bench.start(7, max_tokens=100_000)
    await bench.time.run_until(1e6)
    lengths = np.array([len(task.result().completion_ids) for task in tasks])
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.05)
    assert again.result().completion_ids.tolist() == tasks[7].result().completion_ids.tolist()
    assert again.result().logprobs.tolist() == tasks[7].result().logprobs.tolist()


async def test_cancelled_requests_do_not_hold_up_a_finish():
    bench = Bench("finish")
    task = bench.start()
    await bench.time.run_until(1.0)
    relabel = asyncio.create_task(bench.engine.relabel(1))
    await bench.time.run_until(2.0)
    task.cancel()
    await bench.time.run_until(2.0)
    assert relabel.done() and bench.engine.policy_version == 1


async def test_there_are_no_weights_to_load(tmp_path):
    engine = Bench().engine
    assert engine.receivers == 0
    with pytest.raises(EngineError, match="relabel it instead"):
        await engine.load_snapshot(tmp_path, None)


def test_hundreds_fit_because_torch_is_not_loaded():
    code = (
        "import sys; from async_rl.engines.simulated import SimulatedEngine; import async_rl.engines;"
        "assert not {'torch', 'transformers', 'vllm', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
