"""Checkpoints: one atomic directory a step, found again, kept in number, and taken apart for export and inspection.

The modules here decide on names, order and what is chosen; none but `tensors` and `export` loads torch.
"""

from async_rl.checkpoints.disk import Disk
from async_rl.checkpoints.find import Choice, choose_checkpoint
from async_rl.checkpoints.lineage import Lineage
from async_rl.checkpoints.names import CheckpointError, Marker

__all__ = ["CheckpointError", "Choice", "Disk", "Lineage", "Marker", "choose_checkpoint"]
