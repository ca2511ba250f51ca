"""What the processes of a run have on the machine, and what is left of it afterwards."""

from __future__ import annotations

import uuid
from pathlib import Path

import psutil

from async_rl import leftovers
from tests.e2e.conftest import Run

MARK = "ASYNC_RL_TEST_RUN"


class Traces:
    """Marks everything that a run starts from now on, and gives it a temporary folder of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.mark = uuid.uuid4().hex
        self.temporary = run.folder / "temporary"
        self.temporary.mkdir()
        run.environ |= {MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.pids: set[int] = set()
        self.ports: set[int] = set()
        self.shared: set[Path] = set()

    def processes(self) -> list[psutil.Process]:
        """Processes of the run that live, whoever started them."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def look(self) -> None:
        """Remember what is there now."""
        for process in self.processes():
            self.pids.add(process.pid)
            self.shared |= {leftovers.SHARED_MEMORY / name for name in leftovers._mapped_segments(process.pid)}
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            self.ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}

    def assert_nothing_left(self) -> None:
        """No process, listening port, shared memory or temporary file of the run; a moment is given to the kernel."""
        self.run.until(lambda: self.processes() == [])
        sockets = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [c.laddr.port for c in sockets if c.laddr.port in self.ports and c.pid in (None, *self.pids)] == []
        shared = [str(path) for path in self.shared if path.exists()]
        assert shared == [], f"left: {shared}"
        # torch keeps headers that it has compiled for the next process of the same user.
        ours = [entry for entry in self.temporary.iterdir() if not entry.name.startswith("torchinductor_")]
        files = [path for entry in ours for path in (entry, *entry.rglob("*"))]
        owned = [path for base in leftovers._bases() for path in base.glob(f"{leftovers.PREFIX}*") if self._ours(path)]
        assert files + owned == [], f"left: {[str(path) for path in files + owned]}"
        assert [str(path) for path in (self.run.folder / "run").rglob("*") if "partial" in path.name] == []

    def _ours(self, folder: Path) -> bool:
        return int(folder.name.removeprefix(leftovers.PREFIX).partition("-")[0]) in self.pids


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None
