"""Seconds of a publication against a raw gloo broadcast and against files of the same bytes, in one run.

    python -m benchmarks.weights --output benchmarks/results/weights.json
    python -m benchmarks.weights --engine vllm --sizes 135M --output benchmarks/results/weights-vllm.json

A publication fills the send buffers (copy and checksum), sends, and ends when every receiver has verified everything.
Raw is one broadcast of one tensor. Files: the sender writes one in safetensors form, every receiver reads it into
memory of its own; nothing waits for the disk. Each receiver is a process. With --engine the receiver is one engine, a
publication ends when it samples with the new weights, and the other ways are given its own load time, for which it
stands still. Rounds alternate, so that a busy machine hits all ways alike.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import LlamaConfig, LlamaForCausalLM

from async_rl.config import build_config
from async_rl.engines import build_engine
from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import DTYPES, SendBuffers
from async_rl.weights.broadcast import Receiver, Sender
from benchmarks.common import (
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    result_file,
)
from benchmarks.weights_figure import draw

HOST = "127.0.0.1"
TIMEOUT_S = 300.0
SIZES = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 2048,
           "num_attention_heads": 4, "num_key_value_heads": 2},
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "vocab_size": 8192,
            "num_attention_heads": 8, "num_key_value_heads": 4},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
             "num_attention_heads": 9, "num_key_value_heads": 3},
    "500M": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "vocab_size": 49152,
             "num_attention_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip
"""Llama shapes; 135M is SmolLM2-135M."""
Round = dict[str, float]


def make_model(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights with tied embeddings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True))
    finally:
        torch.set_default_dtype(before)


def raw_group(store: TCPStore, rank: int, size: int) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore("raw", store), rank, size, timedelta(seconds=TIMEOUT_S))


@dataclass(frozen=True)
class Place:
    """What a receiver's process is told at its start."""

    rank: int
    size: int
    raw_port: int
    num_bytes: int
    info: EpochInfo | None
    """None: an engine receives publications, and this process only the rest."""


def serve(pipe: Any, place: Place) -> None:
    """A receiver's process: a raw broadcast, a publication or a file, as told."""
    torch.set_num_threads(1)
    store = TCPStore(HOST, place.raw_port, is_master=False, wait_for_workers=False)
    group = raw_group(store, place.rank, place.size)
    memory = torch.zeros(place.num_bytes, dtype=torch.uint8)
    receiver = Receiver()
    if place.info:
        receiver.join(place.info)
    while (told := pipe.recv()) != "stop":
        if isinstance(told, Manifest):
            receiver.recycle(receiver.receive(told, TIMEOUT_S))  # an engine does that once it has loaded
        elif told == "raw":
            group.broadcast(memory, 0).wait()
        else:
            read(told, memory)
        pipe.send("done")


def read(file: str, memory: torch.Tensor) -> None:
    """Copy all tensors of a file into memory; safetensors maps them, so that nothing is read before."""
    start = 0
    for tensor in load_file(file).values():
        data = tensor.view(torch.uint8).flatten()
        memory[start : start + len(data)] = data
        start += len(data)


class Bench:
    """The sending side of all ways, and the engine if there is one."""

    def __init__(self, model: LlamaForCausalLM, receivers: int, engine: Any, folder: Path) -> None:
        self.model, self.engine, self.file = model, engine, folder / "model.safetensors"
        self.buffers = SendBuffers(64 << 20)
        self.fill()
        manifest = self.buffers.manifest("benchmark", 0)
        self.memory = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        self.size = receivers + 1
        self.sender = Sender(HOST, "gloo")
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(1, self.size):
            pipe, there = context.Pipe()
            place = Place(rank, self.size, store.port, manifest.num_bytes, None if engine else self._info(rank))
            process = context.Process(target=serve, args=(there, place), daemon=True)
            process.start()
            there.close()  # else the end of the process would not be heard
            self.pipes.append(pipe)
            self.processes.append(process)
        self.group = raw_group(store, 0, self.size)

    def _info(self, rank: int) -> EpochInfo:
        port = self.sender.port
        return EpochInfo(epoch=1, backend="gloo", host=HOST, port=port, rank=rank, size=self.size, deadline_s=TIMEOUT_S)

    async def join(self) -> None:
        joining = asyncio.to_thread(self.sender.join, 1, self.size, TIMEOUT_S)
        await asyncio.gather(joining, *([self.engine.join_epoch(self._info(1))] if self.engine else []))

    def fill(self) -> None:
        self.buffers.fill((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def raw(self) -> float:
        """Seconds of one raw broadcast."""
        began = time.perf_counter()
        self._tell("raw")
        self.group.broadcast(self.memory, 0).wait()
        self._await_peers()
        return time.perf_counter() - began

    def files(self) -> float:
        """Seconds until one file is written and everybody has read it."""
        began = time.perf_counter()
        save_file({name: parameter.detach() for name, parameter in self.model.named_parameters()}, self.file)
        self._tell(str(self.file))
        self._await_peers()
        seconds = time.perf_counter() - began
        self.file.unlink()
        return seconds

    async def publish(self, version: int) -> Round:
        """Seconds of one publication and its parts."""
        with torch.no_grad():
            self.model.model.norm.weight.add_(0.001)
        began = time.perf_counter()
        self.fill()
        manifest = self.buffers.manifest("benchmark", version)
        filled = time.perf_counter()
        sending = asyncio.to_thread(self.sender.send, self.buffers, manifest, TIMEOUT_S)
        if self.engine is None:
            self._tell(manifest)
            await sending
            self._await_peers()
            sent, load_s = time.perf_counter(), 0.0
        else:
            await asyncio.gather(sending, self.engine.receive(1, manifest, TIMEOUT_S))
            sent = time.perf_counter()
            load_s = (await self.engine.load(manifest)).load_s
        ended = time.perf_counter()
        return {"publication_s": ended - began, "fill_s": filled - began, "send_s": sent - filled, "load_s": load_s}

    async def round(self, version: int) -> Round:
        """Every way once, each begun first in its turn; publications as shares of the others."""
        taken: Round = {}
        ways = ["raw", "publish", "files"]
        for way in ways[version % 3 :] + ways[: version % 3]:
            if way == "publish":
                taken |= await self.publish(version)
            else:
                taken[f"{way}_s"] = getattr(self, way)()
        taken["over_raw"] = taken["publication_s"] / (taken["raw_s"] + taken["load_s"])
        taken["over_files"] = taken["publication_s"] / (taken["files_s"] + taken["load_s"])
        taken["send_over_raw"] = taken["send_s"] / taken["raw_s"]
        return taken

    def _tell(self, what: str | Manifest) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def _await_peers(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"receiver {number} gave no answer for {TIMEOUT_S:g} s")
            try:
                pipe.recv()
            except EOFError:
                self.processes[number].join(10)
                code = self.processes[number].exitcode
                raise RuntimeError(
                    f"receiver {number} ended with exit code {code} (-9: killed, perhaps for want of memory)"
                ) from None

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send("stop")
            process.join(10)
        self.sender.close()


async def measure(model: LlamaForCausalLM, receivers: int, engine: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Figures of alternating rounds; the first warms all ways up and is left out."""
    bench = Bench(model, receivers, engine, folder)
    found = []
    try:
        await bench.join()
        for version in range(1, rounds + 2):
            taken = await bench.round(version)
            if version > 1:
                found.append(taken)
    finally:
        bench.close()
    figures = {key: Repeated.of(taken[key] for taken in found) for key in found[0]}
    return {"receivers": receivers, "bytes": bench.memory.numel(), **figures}


async def measure_size(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model, with each number of receivers or with an engine."""
    model: Any = make_model(size, DTYPES[arguments.dtype])
    fleets = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await start_engine(arguments.engine, model, folder / size) if arguments.engine else None
        try:
            for receivers in [1] if engine else arguments.receivers:
                fleets.append(await measure(model, receivers, engine, folder, arguments.rounds))
                print(f"{size}: {row(fleets[-1])}", flush=True)
        finally:
            if engine:
                await engine.close()
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "fleets": fleets}


def row(fleet: Mapping[str, Any]) -> str:
    """A line for whoever waits."""
    parts = ", ".join(f"{way} {fleet[f'{way}_s'].median:.3g} s" for way in ("raw", "files", "publication", "load"))
    return f"{fleet['receivers']} receivers: {parts}; {fleet['over_raw'].median:.2f} times raw"


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


def headlines(sizes: Mapping[str, Any]) -> list[Headline]:
    """Every size with every number of receivers against the other ways; the standstill of an engine."""
    found = []
    for size, one in sizes.items():
        for fleet in one["fleets"]:
            who = f"{size}, {fleet['receivers']} receiver{'s' * (fleet['receivers'] > 1)}"
            found.append(Headline(f"{who}: publication, times a raw broadcast", fleet["over_raw"]))
            found.append(Headline(f"{who}: publication, times files", fleet["over_files"]))
            if fleet["load_s"].median:
                found.append(Headline(f"{who}: load, for which the engine stands still", fleet["load_s"], "s"))
    return found


def positive(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "135M", "500M"])
    parser.add_argument("--receivers", nargs="+", type=positive, default=[1, 2, 4], help="processes that receive")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16, for an engine float32")
    parser.add_argument("--engine", choices=["vllm", "hf"], help="the receiver is this engine; default: bare receivers")
    parser.add_argument("--rounds", type=int, default=5)
    add_draw_argument(parser)
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    arguments.dtype = arguments.dtype or ("float32" if arguments.engine else "bfloat16")
    torch.set_num_threads(1)
    sizes = {size: asyncio.run(measure_size(size, arguments)) for size in arguments.sizes}
    figures = {"engine": arguments.engine, "dtype": arguments.dtype, "sizes": sizes}
    result_file(arguments, "benchmarks.weights", figures, headlines(sizes))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
