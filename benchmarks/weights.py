"""Seconds of a publication to one receiver against a raw gloo broadcast of the same bytes, in one run.

    python -m benchmarks.weights --output benchmarks/results/weights.json
    python -m benchmarks.weights --engine vllm --sizes 135M --output benchmarks/results/weights-vllm.json

A publication fills the send buffers (copy and checksum), sends, and ends when the receiver has verified everything;
with --engine it ends when the engine samples with the new weights, and the raw side is given the engine's own load
time. Raw is one broadcast of one tensor. Rounds alternate, so that a busy machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config import build_config
from async_rl.engines import build_engine
from async_rl.protocol import EpochInfo
from async_rl.weights.base import SendBuffers
from async_rl.weights.broadcast import Receiver, Sender
from benchmarks.common import add_result_arguments, check_clean, result_file

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
SIZES = {
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "vocab_size": 8192,
            "num_attention_heads": 8, "num_key_value_heads": 4},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
             "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip
"""Llama shapes; 135M is SmolLM2-135M."""


def raw_group(store: TCPStore, rank: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("raw", store), rank, 2, timedelta(seconds=TIMEOUT_S))


def serve(pipe: Any, info: EpochInfo | None, raw_port: int, num_bytes: int) -> None:
    """The receiver process: a raw broadcast or a publication, as told."""
    torch.set_num_threads(1)
    group = raw_group(TCPStore(HOST, raw_port, is_master=False, wait_for_workers=False), 1)
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    receiver = Receiver()
    if info:
        receiver.join(info)
    while (manifest := pipe.recv()) != "stop":
        if manifest == "raw":
            group.broadcast(memory, 0).wait()
        else:
            receiver.recycle(receiver.receive(manifest, TIMEOUT_S))  # an engine does that once it has loaded
        pipe.send("done")


class Bench:
    """The sending side of both ways, and the engine if there is one."""

    def __init__(self, model: LlamaForCausalLM, engine: Any) -> None:
        self.model, self.engine = model, engine
        self.buffers = SendBuffers(64 << 20)
        self.fill()
        manifest = self.buffers.manifest("benchmark", 0)
        self.memory = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        self.sender = Sender(HOST, "gloo")
        self.info = EpochInfo(
            epoch=1, backend="gloo", host=HOST, port=self.sender.port, rank=1, size=2, deadline_s=TIMEOUT_S
        )
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        arguments = (there, None if engine else self.info, store.port, manifest.num_bytes)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        self.group = raw_group(store, 0)

    async def join(self) -> None:
        joining = asyncio.to_thread(self.sender.join, 1, 2, TIMEOUT_S)
        await asyncio.gather(joining, *([self.engine.join_epoch(self.info)] if self.engine else []))

    def fill(self) -> None:
        self.buffers.fill((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def raw(self) -> float:
        """Seconds of one raw broadcast."""
        began = time.perf_counter()
        self.pipe.send("raw")
        self.group.broadcast(self.memory, 0).wait()
        self._await_peer()
        return time.perf_counter() - began

    async def publish(self, version: int) -> dict[str, float]:
        """Seconds of one publication and its parts."""
        with torch.no_grad():
            self.model.model.norm.weight.add_(0.001)
        began = time.perf_counter()
        self.fill()
        manifest = self.buffers.manifest("benchmark", version)
        filled = time.perf_counter()
        sending = asyncio.to_thread(self.sender.send, self.buffers, manifest, TIMEOUT_S)
        if self.engine is None:
            self.pipe.send(manifest)
            await sending
            self._await_peer()
            sent, load_s = time.perf_counter(), 0.0
        else:
            await asyncio.gather(sending, self.engine.receive(1, manifest, TIMEOUT_S))
            sent = time.perf_counter()
            load_s = (await self.engine.load(manifest)).load_s
        ended = time.perf_counter()
        return {"publication_s": ended - began, "fill_s": filled - began, "send_s": sent - filled, "load_s": load_s}

    def _await_peer(self) -> None:
        if not self.pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiver process gave no answer for {TIMEOUT_S:g} s")
        self.pipe.recv()

    def close(self) -> None:
        self.pipe.send("stop")
        self.process.join(10)
        self.sender.close()


async def measure(size: str, folder: Path, engine_name: str | None, rounds: int) -> dict[str, Any]:
    """Medians of alternating rounds; the first warms both up and is left out."""
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True))
    engine = None
    if engine_name:
        engine = await start_engine(engine_name, model, folder / size)
    bench = Bench(model, engine)
    results = []
    try:
        await bench.join()
        for round_ in range(rounds + 1):
            raw_s = bench.raw()
            result = {"raw_s": raw_s} | await bench.publish(round_ + 1)
            result["ratio"] = result["publication_s"] / (raw_s + result["load_s"])
            result["send_ratio"] = result["send_s"] / raw_s
            if round_:
                results.append(result)
                print(json.dumps({key: round(value, 4) for key, value in result.items()}), flush=True)
    finally:
        bench.close()
        if engine:
            await engine.close()
    medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "bytes": bench.memory.numel(), "median": medians, "rounds": results}


async def start_engine(name: str, model: LlamaForCausalLM, folder: Path) -> Any:
    """The engine as a generator builds it, on these weights."""
    from tests.tiny_models import character_tokenizer

    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)  # no text is sampled, but an engine wants one
    config = build_config(
        {
            "model": {"path": str(folder)},
            "environment": {"type": "arithmetic"},
            "data": {"max_prompt_tokens": 64},
            "sampling": {"max_completion_tokens": 64},
            "generator": {"slots": 8, "threads": 1, "engine": {"type": name}},
        }
    )
    engine = build_engine(config, seed=0, threads=1)
    await engine.start()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--engine", choices=["vllm", "hf"], help="the receiver is this engine; default: a bare receiver"
    )
    parser.add_argument("--rounds", type=int, default=7)
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            size: asyncio.run(measure(size, Path(folder), arguments.engine, arguments.rounds))
            for size in arguments.sizes
        }
    result_file(arguments, "benchmarks.weights", {"engine": arguments.engine, "sizes": figures})


if __name__ == "__main__":
    main()
