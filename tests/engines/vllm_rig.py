"""One vLLM engine whose worker can be broken on purpose, with the models that it should agree with."""

from __future__ import annotations

import itertools
from pathlib import Path

from async_rl.config import schema
from async_rl.engines import vllm_plugin
from async_rl.engines.vllm import VllmEngine
from tests.engines import rig
from tests.engines.rig import CLOSE, DEADLINE_S, FAR, PROMPT, SLOTS, TEMPERATURE, assert_current

__all__ = ["CLOSE", "DEADLINE_S", "FAR", "PROMPT", "SLOTS", "TEMPERATURE", "FaultyWorker", "Rig", "assert_current"]

REPACK_HEADS = vllm_plugin.repack_heads


class FaultyWorker(vllm_plugin.WorkerExtension):
    """A worker that can be broken on purpose, and looked into."""

    def faults_forget_heads(self, forget: bool) -> None:
        """Switch the renewal of packed LM heads off or on."""
        vllm_plugin.repack_heads = (lambda model: None) if forget else REPACK_HEADS

    def faults_break_load(self) -> None:
        """Let the next load fail half way."""
        held = self.weight_transfer_engine.held

        class Broken:
            manifest = held.manifest

            def tensors(self):
                yield from itertools.islice(held.tensors(), 5)
                raise RuntimeError("broken on purpose")

        self.weight_transfer_engine.held = Broken()

    def faults_running(self) -> list[str]:
        """Requests in the worker's batch."""
        return [name for name in self.model_runner.input_batch.req_ids if name is not None]


class Rig(rig.Rig):
    """Publishes random weights to a vLLM engine."""

    engine: VllmEngine

    def __init__(self, path: Path, kv_cache_bytes: int = 1 << 26):
        VllmEngine.worker_extension = "tests.engines.vllm_rig.FaultyWorker"
        engine = VllmEngine(
            schema.VllmEngine(kv_cache_bytes=kv_cache_bytes),
            schema.ModelConfig(path=str(path)),
            max_model_len=512,
            slots=SLOTS,
            threads=1,
        )
        super().__init__(engine, path)

    async def running(self) -> int:
        """Requests that hold a slot; vLLM takes those that have just ended out of its batch at the next step."""
        await self.sample(max_tokens=2)
        (running,) = await self.engine._rpc("faults_running")
        return max(0, len(running) - 1)
