"""Places at which a learner kills itself, as SIGKILL from outside would: in a save, between two of its parts, ..."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rl.checkpoints import Disk, names
from async_rl.learner.loop import Loop
from async_rl.weights.group import Group

PLACES = ("tensors", "renamed", "marker", "publication", "moment")


def die() -> None:
    """Nothing runs after it, no handler and no buffer."""
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Dies at the given call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def doom(place: str, seed: int) -> None:
    """Have this process die at a place; in its second save it has made the first."""
    match place:
        case "tensors":
            _in_the_tensors(Countdown(2))
        case "renamed":
            _after("rename", Countdown(2), lambda _, target: names.step_of(target.name) is not None)
        case "marker":
            _after("replace", Countdown(2), lambda path, _: path.name == names.MARKER)
        case "publication":
            _in_a_publication(Countdown(3))
        case "moment":
            _at_a_moment(random.Random(seed))
        case _:
            raise AssertionError(place)


def _in_the_tensors(now: Countdown) -> None:
    """Half of the file is on disk."""
    create = Disk.create

    @contextmanager
    def doomed(disk: Disk, path: Path) -> Iterator[Any]:
        with create(disk, path) as file:
            yield file
            if path.suffix == ".distcp" and now():
                if not file.closed:
                    file.flush()
                os.truncate(path, path.stat().st_size // 2)
                die()

    Disk.create = doomed  # type: ignore[method-assign]


def _after(method: str, now: Countdown, counts: Callable[[Any, Any], bool]) -> None:
    """Right after a change to the disk that counts."""
    change = getattr(Disk, method)

    def doomed(disk: Disk, first: Any, second: Any) -> None:
        change(disk, first, second)
        if counts(first, second) and now():
            die()

    setattr(Disk, method, doomed)


def _in_a_publication(now: Countdown) -> None:
    """Generators have the first bucket and wait for the next."""
    broadcast = Group.broadcast

    def doomed(group: Group, *arguments: Any) -> Iterator[Any]:
        doomed_one = now()
        for bucket in broadcast(group, *arguments):
            yield bucket
            if doomed_one:
                die()

    Group.broadcast = doomed  # type: ignore[method-assign]


def _at_a_moment(rng: random.Random) -> None:
    """Within a tenth of a second after one of the next steps has begun."""
    step_of, now = Loop._step, Countdown(rng.randint(3, 5))

    def doomed(loop: Loop, step: int, groups: Any) -> None:
        if now():
            threading.Timer(rng.uniform(0.0, 0.1), die).start()
        step_of(loop, step, groups)

    Loop._step = doomed  # type: ignore[method-assign]
