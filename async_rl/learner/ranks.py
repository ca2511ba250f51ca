"""The learner's ranks: one process each, joined by a process group; one process alone forms a group of one."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config import Config
from async_rl.config.threads import learner_threads
from async_rl.errors import InputError

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""After the first rank has failed the others get this long to tell the fleet; then they are killed."""
MARGIN_S = 60.0
"""A collective waits this much longer than run.stall_timeout_s: rank 0's message about a stall comes first."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankContext:
    """This process's place among the learner's ranks."""

    rank: int
    world: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks; collectives on it fail after run.stall_timeout_s plus a margin."""
        group = dist.group.WORLD
        assert group is not None, "init_ranks has not been called, or the group is closed"
        return group

    def close(self) -> None:
        """Leave the group; callable more than once."""
        if dist.is_initialized():
            dist.destroy_process_group()


def init_ranks(config: Config) -> RankContext:
    """Join the learner's ranks as torchrun's environment says (RANK, WORLD_SIZE, MASTER_ADDR, ...), else alone.

    Raises InputError when the device is not there, and torch's DistStoreError when a rank does not come in time.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = _device(config.learner.device, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(learner_threads(config))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=config.run.stall_timeout_s + MARGIN_S)
        if world > 1:
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return RankContext(rank, world, device)


def _device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank; InputError when there is none."""
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise InputError(
            f"learner.device = {wanted!r}: rank {local_rank} of this machine needs a GPU of its own, and torch sees "
            f"{count}; lower learner.ranks, or set learner.device = 'cpu'"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Give every rank rank 0's bytes (length, then content); the other ranks pass None."""
    if dist.get_world_size() == 1:
        assert data is not None, "rank 0 must pass the bytes"
        return data
    length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(length, src=0)
    content = torch.empty(int(length), dtype=torch.uint8)
    if data:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, src=0)
    return content.numpy().tobytes()


def agree(ok: bool) -> bool:
    """Whether every rank says yes."""
    flag = torch.tensor([int(ok)], dtype=torch.int64)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add a tensor over all ranks, in place; returns it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Elementwise maximum of a tensor over all ranks, in place; returns it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def spawn_ranks(argv: Sequence[str], ranks: int) -> int:
    """Run a command once per rank on this machine and wait; returns 0, or the first failing rank's exit code.

    SIGINT and SIGTERM are passed on to the ranks. When one fails the others are told to stop and, after GRACE_S,
    killed; they die with this process too.
    """
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    children = [_start(argv, {**environment, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]

    def forward(number: int, _: object) -> None:
        _signal(children, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children)
    finally:
        _signal(children, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank in a session of its own, so that a terminal's Ctrl-C reaches it only once, through us."""
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(argv, env=environment, start_new_session=True, preexec_fn=die_with_parent)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Poll until all have ended; the training itself bounds its waits, so this one has no deadline of its own."""
    first: tuple[int, int] | None = None
    deadline = float("inf")
    while None in (codes := [child.poll() for child in children]):
        time.sleep(0.05)
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed and first is None:
            first = failed[0]
            deadline = time.monotonic() + GRACE_S
            log.error("learner rank %d ended with exit code %d; stopping the other ranks", *first)
            _signal(children, signal.SIGTERM)
        if time.monotonic() > deadline:
            _signal(children, signal.SIGKILL)
    code = first[1] if first is not None else next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def _signal(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
