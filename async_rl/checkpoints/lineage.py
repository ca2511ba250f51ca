"""Which run a checkpoint, a trajectory or a line of metrics belongs to, across restarts of the learner.

Every learner process is a run of its own, with its own id. One that resumes has the run before as an ancestor, up to
the step that it resumed from: what the ancestor did after that step belongs to a future that no longer exists. Version
numbers alone could not tell the lost version 12 from the one that is made again.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec

from async_rl.checkpoints.disk import Disk
from async_rl.errors import InputError

FILE = "lineage.json"


class Lineage(msgspec.Struct, frozen=True):
    """A run and those that it continues."""

    run_id: str
    root: str
    """Id of the first run of the line; trackers know the line by it."""
    ancestors: dict[str, int] = {}
    """Id of each earlier run -> last step of it that belongs to this line."""

    @classmethod
    def first(cls) -> Lineage:
        """A new line."""
        run_id = _new_id()
        return cls(run_id=run_id, root=run_id)

    def resumed(self, step: int) -> Lineage:
        """The next run of the line, which continues this one after `step`."""
        shared = {name: min(last, step) for name, last in self.ancestors.items()}
        return Lineage(run_id=_new_id(), root=self.root, ancestors={**shared, self.run_id: step})

    def forked(self, step: int) -> Lineage:
        """The first run of a line of its own that starts from `step` of this one; it has none of its generators."""
        return Lineage.first()

    def includes(self, run_id: str, step: int) -> bool:
        """Whether what run `run_id` did in `step` belongs to this line."""
        return run_id == self.run_id or step <= self.ancestors.get(run_id, -1)


def read_lineage(run_dir: Path) -> Lineage | None:
    """The newest line of a run directory; None when there is none yet. Raises InputError when the file is damaged."""
    path = run_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lineage)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{path} is damaged ({error}); remove it, and the newest complete checkpoint is resumed whatever its line"
        ) from error


def write_lineage(run_dir: Path, lineage: Lineage, disk: Disk) -> None:
    """Make `lineage` the newest one; before that run publishes or saves anything."""
    disk.mkdir(run_dir)
    disk.replace(run_dir / FILE, msgspec.json.format(msgspec.json.encode(lineage)) + b"\n")


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
