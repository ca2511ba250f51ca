"""Which checkpoints go once a newer one is complete, and which unfinished ones are cleared away."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from async_rl.checkpoints.disk import Disk
from async_rl.checkpoints.find import candidates, complete
from async_rl.checkpoints.lineage import Lineage
from async_rl.checkpoints.names import MARKER, OWNER, Marker, read_marker


def expendable(steps: Iterable[int], keep_last: int, keep_every: int) -> list[int]:
    """Steps that go, oldest first: all but the last `keep_last` and the multiples of `keep_every` (0: none)."""
    ordered = sorted(steps)
    old = ordered[: max(0, len(ordered) - keep_last)]
    return [step for step in old if not (keep_every and step % keep_every == 0)]


def thin_out(run_dir: Path, lineage: Lineage, keep_last: int, keep_every: int, disk: Disk) -> list[Path]:
    """Remove what may go among the complete checkpoints of this line; returns what was removed.

    The marker goes first, so that a kill in between leaves nothing that looks complete.
    """
    found = {checkpoint.step: checkpoint.path for checkpoint in complete(run_dir, lineage)}
    gone = [found[step] for step in expendable(found, keep_last, keep_every)]
    for path in gone:
        disk.remove_file(path / MARKER)
        _remove(path, disk)
    return gone


def clear_unfinished(run_dir: Path, disk: Disk) -> list[Path]:
    """Remove checkpoints that a killed learner left unfinished; only folders that carry our sign, or are empty."""
    gone = []
    for path in candidates(run_dir):
        if isinstance(read_marker(path), Marker) or (path / MARKER).exists():
            continue
        if (path / OWNER).is_file() or not any(path.iterdir()):
            _remove(path, disk)
            gone.append(path)
    return gone


def _remove(path: Path, disk: Disk) -> None:
    """Remove an unfinished checkpoint, our sign last: what a kill in between leaves is still known as ours."""
    for child in path.iterdir():
        if child.is_dir():
            disk.remove_tree(child)
        elif child.name != OWNER:
            disk.remove_file(child)
    disk.remove_tree(path)
