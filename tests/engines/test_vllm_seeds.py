"""Seeded requests on CPU: prefills that are cut into pieces, preempted or recomputed change no token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from async_rl.config import schema
from async_rl.engines.base import Sample
from async_rl.engines.vllm import VllmEngine
from async_rl.engines.vllm_plugin import WorkerExtension
from async_rl.engines.vllm_seeds import set_aside
from tests.engines.rig import SamplingRig
from tests.tiny_models import tiny_model

STEP = 2048
"""Tokens that vLLM computes in one step."""
SLOTS, PROMPT, COMPLETION = 32, 120, 100
"""3,840 prompt tokens at once."""
KV_CACHE_BYTES = 3 << 20
"""96 blocks of 32 tokens, one of them vLLM's own: 23 prompts of 4 fill it, and grow by a fifth soon."""
TOGETHER = 8
"""Requests that run undisturbed, 7 blocks each."""
RUNNING = 22
"""Requests that have room to start, and more tokens than one step computes."""


def test_generators_of_unwanted_rows_are_out_of_reach_until_the_end():
    generators = {0: "a", 2: "b", 3: "c"}
    with pytest.raises(RuntimeError), set_aside(generators, [1, 2]):
        assert generators == {0: "a", 3: "c"}
        raise RuntimeError
    assert generators == {0: "a", 2: "b", 3: "c"}


class CountingWorker(WorkerExtension):
    """Counts what the tests mean to provoke."""

    def counts_start(self) -> None:
        """Count from now on."""
        runner = self.model_runner
        bookkeeping, self.counts = runner._bookkeeping_sync, {"unwanted": 0, "resumed": 0}

        def counting(scheduled, *args):
            self.counts["unwanted"] += int(
                np.count_nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
            )
            self.counts["resumed"] += len(scheduled.scheduled_cached_reqs.resumed_req_ids)
            return bookkeeping(scheduled, *args)

        runner._bookkeeping_sync = counting

    def counts_running(self) -> int:
        """Requests in the batch."""
        return self.model_runner.input_batch.num_reqs

    def counts_take(self) -> dict[str, int]:
        """Tokens sampled for nothing, and requests that went on after a preemption, since the last call."""
        counts, self.counts = self.counts, {"unwanted": 0, "resumed": 0}
        return counts


class Rig(SamplingRig):
    """One engine whose KV cache is too small for its slots, and seeded requests with prompts of their own."""

    engine: VllmEngine

    def __init__(self, path):
        super().__init__()
        self.engine = VllmEngine(
            schema.VllmEngine(kv_cache_bytes=KV_CACHE_BYTES),
            schema.ModelConfig(path=str(path)),
            max_model_len=PROMPT + COMPLETION,
            slots=SLOTS,
            threads=1,
        )
        self.engine.worker_extension = f"{__name__}.{CountingWorker.__name__}"

    def begin(self, numbers: range) -> list[asyncio.Task[Sample]]:
        """Start requests; each number has its own prompt and seed."""
        rng = np.random.default_rng(7)
        prompts = rng.integers(2, 60, (SLOTS, PROMPT), dtype=np.int32)
        return [asyncio.create_task(self.sample(COMPLETION, n, prompts[n])) for n in numbers]

    async def counts(self) -> dict[str, int]:
        (counts,) = await self.engine._rpc("counts_take")
        return counts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    rig = Rig(tiny_model(tmp_path_factory.mktemp("seeds"), tied=True))
    await rig.engine.start()
    await rig.engine._rpc("counts_start")
    yield rig
    await rig.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowded(rig):
    """All requests at once: samples and counts."""
    samples = await asyncio.gather(*rig.begin(range(SLOTS)))
    return samples, await rig.counts()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(rig, crowded):
    """The same, few at a time."""
    groups = [await asyncio.gather(*rig.begin(range(n, n + TOGETHER))) for n in range(0, SLOTS, TOGETHER)]
    assert await rig.counts() == {"unwanted": 0, "resumed": 0}
    return [sample.completion_ids.tolist() for group in groups for sample in group]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_cut_prefills_and_preemptions_change_no_token(crowded, undisturbed):
    samples, counts = crowded
    assert counts["unwanted"] > 0 and counts["resumed"] > 0, "nothing was provoked"
    assert [sample.completion_ids.tolist() for sample in samples] == undisturbed
    assert len({tuple(tokens) for tokens in undisturbed}) == SLOTS


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_recomputing_more_than_one_step_holds_changes_no_token(rig, undisturbed):
    running = rig.begin(range(RUNNING))
    while (await rig.engine._rpc("counts_running"))[0] * PROMPT <= STEP:
        assert not all(task.done() for task in running), "they ended before they were seen together"
    await rig.counts()
    async with rig.engine._paused():
        pass
    tokens = [sample.completion_ids.tolist() for sample in await asyncio.gather(*running)]
    counts = await rig.counts()
    assert counts["unwanted"] > 0 and counts["resumed"] * PROMPT > STEP, "nothing was provoked"
    assert tokens == undisturbed[:RUNNING]
