"""Checkpoints of a model of a few numbers, and disks that fail where a test says."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from async_rl.buffer import Ledger, LedgerSettings
from async_rl.checkpoints import Disk, Lineage, names
from async_rl.checkpoints.save import Contents, Retention, Saved, Writer
from async_rl.checkpoints.state import RunState
from async_rl.checkpoints.tensors import read_tensors
from async_rl.checkpoints.work import capture
from async_rl.errors import InputError
from async_rl.protocol import encode_value
from tests.ledger_world import key_of, make_problem, make_trajectory

LINE = Lineage(run_id="run-a", root="run-a")


class Problems:
    """A source of problems that only counts."""

    def __init__(self, identity: str = "id-1") -> None:
        self.identity, self.drawn = identity, 0

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn - 1

    def state(self) -> dict[str, Any]:
        return {"identity": self.identity, "position": {"drawn": self.drawn}}

    def restore(self, state: dict[str, Any]) -> None:
        if state["identity"] != self.identity:
            raise InputError(f"identity {state['identity']} is not {self.identity}")
        self.drawn = state["position"]["drawn"]


def make_ledger(problems: Problems, **settings: Any) -> Ledger:
    """Two groups of two a batch, problems by their number."""
    values: dict[str, Any] = {"batch_groups": 2, "group_size": 2, "max_staleness": 1, **settings}
    return Ledger(LedgerSettings(**values), lambda: make_problem(problems.draw()))


def busy(problems: Problems, **settings: Any) -> Ledger:
    """A ledger with one complete group, one that lacks a member, and one that nobody has begun."""
    ledger = make_ledger(problems, **settings)
    leases = ledger.lease("g0", 0, 4, 0.0) + ledger.lease("g1", 0, 2, 0.0)
    for lease in leases[:3]:
        key = key_of(lease)
        ledger.finish("g0", key.ticket, key.member, key.attempt, make_trajectory(0, reward=float(key.member)), 1.0)
    ledger.release("g1", 2.0)
    return ledger


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """What the "model" holds after a step."""
    return {"model.w": torch.arange(6.0).reshape(2, 3) + step, "optimizer.step.w": torch.tensor(float(step))}


def contents(step: int) -> Contents:
    """Everything of one checkpoint."""
    problems = Problems()
    state = RunState(step=step, work=np.frombuffer(capture(busy(problems), problems.state()), np.uint8))
    shared = {names.STATE: encode_value(state), names.CONFIG: b'{"config": {}}'}
    return Contents(step=step, tensors=tensors_of(step), rank_state=b"rank", shared=shared)


def save(
    run_dir: Path, step: int, lineage: Lineage = LINE, disk: Disk | None = None, keep_last: int = 9, keep_every: int = 0
) -> Saved:
    """Write a whole checkpoint."""
    return Writer(run_dir, lineage, Retention(keep_last, keep_every), disk=disk).write(contents(step))


def loads(path: Path, step: int) -> bool:
    """Whether a checkpoint's tensors are those of `step`."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(step).items()}
    read_tensors(found, path / names.TENSORS, None)
    return all(torch.equal(found[name], tensor) for name, tensor in tensors_of(step).items())


class Countdown(Disk):
    """Counts the changes to the disk, parts of a file included; at change `at` it calls `fault` in its middle."""

    def __init__(self, at: int, fault: Callable[[], None]) -> None:
        self.at, self.fault, self.count = at, fault, 0

    def tick(self) -> bool:
        self.count += 1
        return self.count == self.at

    def mkdir(self, path: Path) -> None:
        if self.tick():
            self.fault()
        super().mkdir(path)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        if self.tick():
            self.fault()
        with super().create(path) as file:
            yield _Stream(file, self)  # type: ignore[misc]

    def rename(self, source: Path, target: Path) -> None:
        if self.tick():
            self.fault()
        super().rename(source, target)
        if self.tick():
            self.fault()

    def sync(self, folder: Path) -> None:
        if self.tick():
            self.fault()
        super().sync(folder)

    def remove_file(self, path: Path) -> None:
        if self.tick():
            self.fault()
        super().remove_file(path)

    def remove_tree(self, path: Path) -> None:
        if self.tick():
            for file in sorted(path.rglob("*"))[:1]:
                if file.is_file():
                    file.unlink()
            self.fault()
        super().remove_tree(path)


class _Stream:
    """A file whose writes are counted; the one that fails has written half of its bytes."""

    def __init__(self, file: BinaryIO, disk: Countdown) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        if self._disk.tick():
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.flush()
            self._disk.fault()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def disk_full() -> None:
    """What write does on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def die() -> None:
    """SIGKILL: nothing runs after it, no handler and no buffer."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(action: Callable[[], Any]) -> int:
    """Run in a forked process; its signal (negative) or exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
