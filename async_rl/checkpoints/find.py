"""Which checkpoint a run resumes from: the newest complete one of its own line, and what is passed over and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from async_rl.checkpoints.lineage import Lineage, read_lineage
from async_rl.checkpoints.names import CheckpointError, Marker, damage, folder_of, name_of, read_marker, step_of
from async_rl.errors import InputError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    marker: Marker

    @property
    def step(self) -> int:
        return self.marker.step


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, None to start at step 0; and why others were passed over, newest first."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()


def candidates(run_dir: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest step first."""
    folder = folder_of(run_dir)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path.name) is not None]
    return sorted(found, key=lambda path: (step_of(path.name), path.name), reverse=True)


def complete(run_dir: Path, lineage: Lineage | None) -> list[Checkpoint]:
    """The complete checkpoints of a line (of any, without one), newest first; their files are not read."""
    found = []
    for path in candidates(run_dir):
        marker = read_marker(path)
        if isinstance(marker, Marker) and _on_line(marker, lineage):
            found.append(Checkpoint(path, marker))
    return found


def choose_checkpoint(run_dir: Path) -> Choice:
    """The newest complete, undamaged checkpoint of the newest line of a run directory.

    Raises CheckpointError when there are complete ones and none of them can be read: starting over must be said.
    """
    lineage = read_lineage(run_dir)
    skipped: list[str] = []
    damaged = 0
    for path in candidates(run_dir):
        marker = read_marker(path)
        if isinstance(marker, str):
            skipped.append(f"{path}: {marker}")
        elif not _on_line(marker, lineage):
            skipped.append(f"{path}: it belongs to run {marker.lineage.run_id}, which this line does not continue")
        elif wrong := damage(path, marker):
            damaged += 1
            skipped.append(f"{path}: {wrong}")
        else:
            return Choice(Checkpoint(path, marker), tuple(skipped))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder_of(run_dir)} can be resumed: {'; '.join(skipped)}; mend or remove them, "
            "or start over with run.resume=never"
        )
    return Choice(None, tuple(skipped))


def checkpoint_at(run_dir: Path, step: int) -> Checkpoint:
    """The checkpoint of one step, whatever its line; InputError with the steps that there are, if it is not whole."""
    path = folder_of(run_dir) / name_of(step)
    marker = read_marker(path) if path.is_dir() else "there is no such folder"
    wrong = marker if isinstance(marker, str) else damage(path, marker)
    if wrong is None:
        assert isinstance(marker, Marker), "a string is a reason"
        return Checkpoint(path, marker)
    steps = sorted(found.step for found in complete(run_dir, None))
    raise InputError(
        f"{path} cannot be used: {wrong}; complete checkpoints of {run_dir}: {', '.join(map(str, steps)) or 'none'}"
    )


def find_named(text: str) -> Checkpoint:
    """The checkpoint that RUN or RUN@STEP names; without a step the one that would be resumed. Raises InputError."""
    name, at, step = text.rpartition("@")
    run_dir = Path(name if at else text)
    if at and not step.isdecimal():
        raise InputError(f"{text!r}: expected RUN or RUN@STEP, such as {name}@10")
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} does not exist; expected the run.dir of a run")
    if at:
        return checkpoint_at(run_dir, int(step))
    choice = choose_checkpoint(run_dir)
    if choice.checkpoint is None:
        why = f": {'; '.join(choice.skipped)}" if choice.skipped else ""
        raise InputError(f"{run_dir} has no complete checkpoint{why}")
    return choice.checkpoint


def _on_line(marker: Marker, lineage: Lineage | None) -> bool:
    return lineage is None or lineage.includes(marker.lineage.run_id, marker.step)
