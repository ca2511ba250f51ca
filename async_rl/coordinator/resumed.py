"""What a coordinator goes on from: the work of a checkpoint, and the runs before this one whose results still count."""

from __future__ import annotations

import msgspec
import numpy as np

from async_rl.protocol import Trajectory


class Resumed(msgspec.Struct, frozen=True):
    """The run before, as far as this one continues it."""

    work: np.ndarray
    """uint8, what `Facade.snapshot_state` gave."""
    version: int = 0
    """The version that is published first."""
    ancestors: dict[str, int] = {}
    """Earlier runs -> last version of each that belongs to this one."""


class Lines:
    """Whose results count."""

    def __init__(self, run_id: str, resumed: Resumed | None) -> None:
        self.run_id = run_id
        self.ancestors = {} if resumed is None else resumed.ancestors
        self.first_version = 0 if resumed is None else resumed.version

    def continues(self, run_id: str | None) -> bool:
        """Whether leases of a run may still be worked on."""
        return run_id == self.run_id or run_id in self.ancestors

    def includes(self, run_id: str, trajectory: Trajectory) -> bool:
        """Whether a result is of this run, or of an earlier one up to the version that this one continues from."""
        if run_id == self.run_id:
            return True
        newest = max((span.version for span in trajectory.versions), default=0)
        return newest <= self.ancestors.get(run_id, -1)
