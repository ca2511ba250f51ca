"""What rank 0 puts into state.bin: the work under way, and what the learner remembers besides tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.checkpoints import names
from async_rl.checkpoints.names import CheckpointError
from async_rl.checkpoints.work import WorkState, read_work
from async_rl.protocol import ProtocolError, decode_value


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of state.bin."""

    step: int
    work: np.ndarray
    """uint8, what `work.capture` took when this step was trained and not yet published."""
    updater: dict[str, Any] = {}
    """What the optimizer's surroundings remember (`Updater.state`)."""
    accuracies: list[tuple[int, float]] = []
    """(version, held-out accuracy) so far."""
    evaluated: int = -1
    """Newest version with a finished evaluation."""
    evaluation_begun: int = 0
    """Newest version whose evaluation was begun."""

    def work_state(self) -> WorkState:
        """The ledger and the problems."""
        return read_work(self.work.data)


def read_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint; raises CheckpointError when this version cannot read it."""
    file = checkpoint / names.STATE
    try:
        return decode_value(file.read_bytes(), RunState)
    except ProtocolError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); resume with the version of async_rl that wrote it "
            f"({names.MARKER} names it)"
        ) from error
