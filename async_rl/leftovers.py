"""Folders of temporary files that tell whether their owner lives, and the removal of those whose owner does not.

SIGKILL of a whole process group leaves sockets and shared memory, and nobody to remove them. So every owner locks its
folder; the kernel frees the lock with the owner, however it ends. Whoever comes next sweeps what is not locked: the
next owner, and the guard of `async-rl train`, which runs this file (`python -I leftovers.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from async_rl.errors import InputError

PREFIX = "async-rl-owned-"
SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "segments"
"""File in a folder: names in /dev/shm that are to go with it, one a line."""
LONGEST_SOCKET = 107
"""Bytes of the path of a socket (sun_path of AF_UNIX, less the closing zero)."""
_NAME_BYTES = len(PREFIX) + len("4194304-") + 8
"""Bytes of the name of a folder."""


class OwnedFolder:
    """A new temporary folder, locked by this process until `remove` or its end."""

    def __init__(self, room: int = 0) -> None:
        """`room`: bytes of the longest name of a socket in it. Raises InputError where no folder is short enough."""
        base = base_for(room)
        fresh = tempfile.mkdtemp(prefix=".async-rl-", dir=base)
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed when it is locked: no sweep may find it in between.
        self.path = base / f"{PREFIX}{os.getpid()}-{fresh[-8:]}"
        os.rename(fresh, self.path)

    def note_segments(self, pids: Iterable[int]) -> None:
        """Note the shared memory that these processes have mapped now, to be removed with the folder.

        It has random names of Python's choice, and the process that would remove it may die with its group.
        """
        names = {name for pid in pids for name in _mapped_segments(pid)}
        (self.path / _SEGMENTS).write_text("".join(f"{name}\n" for name in sorted(names)))

    def remove(self) -> None:
        """Remove it, once."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def base_for(room: int) -> Path:
    """The first of the usual folders in which the path of a socket with a name of `room` bytes is short enough."""
    for base in _bases():
        if len(os.fsencode(base)) + 1 + _NAME_BYTES + 1 + room <= LONGEST_SOCKET and os.access(base, os.W_OK | os.X_OK):
            return base
    raise InputError(
        f"no folder for sockets: {', '.join(map(str, _bases()))} are too long (the path of a socket has at most "
        f"{LONGEST_SOCKET} bytes) or cannot be written to; set TMPDIR to a short path"
    )


def sweep() -> int:
    """Remove the folders of owners that are gone; returns how many."""
    return sum(_sweep_folder(folder) for base in _bases() for folder in base.glob(f"{PREFIX}*"))


def _bases() -> list[Path]:
    bases = (Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY)
    return [base for base in dict.fromkeys(bases) if base.is_dir()]


def _sweep_folder(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # another user's, or gone meanwhile
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
            return True
        finally:
            os.close(lock)
    return False


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for name in (folder / _SEGMENTS).read_text().split():
            (SHARED_MEMORY / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _mapped_segments(pid: int) -> Iterator[str]:
    """Names of what Python keeps in shared memory and a process has mapped.

    By inode: a semaphore is mapped under the name that it had while it was made.
    """
    with contextlib.suppress(OSError):
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        mapped = {int(fields[4]) for fields in lines if fields[-1].startswith(f"{SHARED_MEMORY}/")}
        for entry in os.scandir(SHARED_MEMORY):
            if entry.inode() in mapped and entry.name.startswith(("psm_", "sem.mp-")):
                yield entry.name


if __name__ == "__main__":
    sweep()
