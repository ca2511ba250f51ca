"""What a killed owner leaves is removed by whoever comes next, and what a living one has is not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from async_rl import leftovers
from async_rl.errors import InputError
from async_rl.leftovers import LONGEST_SOCKET, PREFIX, SHARED_MEMORY, OwnedFolder, base_for, sweep
from tests.conftest import Spawn

OWNER = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from async_rl import leftovers
leftovers._bases = lambda: [Path(sys.argv[1])]
folder = leftovers.OwnedFolder()
memory = SharedMemory(create=True, size=64)
semaphore = multiprocessing.get_context("spawn").Semaphore()
folder.note_segments([os.getpid()])
print(folder.path, memory.name, semaphore._semlock.name.strip("/"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which owners and sweeps look."""
    monkeypatch.setattr(leftovers, "_bases", lambda: [tmp_path])
    return tmp_path


def test_only_a_dead_owners_folder_and_shared_memory_are_swept(base: Path, spawn: Spawn) -> None:
    owner = spawn([sys.executable, "-c", OWNER, str(base)])
    assert owner.stdout is not None
    line = owner.stdout.readline().split()
    assert len(line) == 3, owner.communicate()[1]
    folder, segments = Path(line[0]), [SHARED_MEMORY / line[1], SHARED_MEMORY / f"sem.{line[2]}"]
    assert folder.parent == base and folder.name.startswith(f"{PREFIX}{owner.pid}-")
    assert sweep() == 0, "its owner lives"
    assert folder.is_dir() and all(segment.exists() for segment in segments)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait(120)
    assert sweep() == 1
    assert list(base.iterdir()) == [] and not any(segment.exists() for segment in segments)


def test_an_owner_removes_its_folder_once(base: Path) -> None:
    first, second = OwnedFolder(), OwnedFolder()
    (first.path / "socket").write_text("")
    assert sweep() == 0, "locked by this very process"
    first.remove()
    first.remove()
    assert list(base.iterdir()) == [second.path]
    second.remove()
    assert list(base.iterdir()) == []


def test_names_in_a_list_of_segments_cannot_lead_elsewhere(base: Path) -> None:
    (base / "precious").write_text("")
    folder = base / f"{PREFIX}1-abcdefgh"
    folder.mkdir()
    (folder / "segments").write_text(f"../..{base}/precious\n")
    assert sweep() == 1 and (base / "precious").exists()


def test_sockets_lie_in_a_folder_that_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "long" / ("x" * 60)
    deep.mkdir(parents=True)
    short = Path("/dev/shm")
    monkeypatch.setattr(leftovers, "_bases", lambda: [deep, short])
    assert base_for(room=36) == short
    folder = OwnedFolder(room=36)
    assert len(os.fsencode(folder.path / ("u" * 36))) <= LONGEST_SOCKET
    folder.remove()
    monkeypatch.setattr(leftovers, "_bases", lambda: [deep])
    with pytest.raises(InputError, match=r"x are too long .* at most 107 bytes.* set TMPDIR to a short path"):
        base_for(room=36)
