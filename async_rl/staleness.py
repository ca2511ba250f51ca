"""Staleness: its one definition, the run-ahead that keeps its bound, and why a setting cannot make progress.

Step s consumes one batch and turns policy version s-1 into version s. A token trained in step s and sampled by
version v has staleness (s-1) - v; a trajectory has that of its oldest token. Rule and proof: docs/staleness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from async_rl.protocol import VersionSpan

Overdue = Literal["mask", "wait", "keep"]


def token_staleness(step: int, version: int) -> int:
    """(step - 1) - version: 0 is on-policy; negative means that the token comes from a version not made yet."""
    return step - 1 - version


def staleness_per_token(step: int, spans: Sequence[VersionSpan]) -> np.ndarray:
    """Staleness of each completion token, int32 [L], from the version spans that cover it."""
    lengths = [span.end - span.start for span in spans]
    versions = np.array([span.version for span in spans], dtype=np.int32)
    return (step - 1 - np.repeat(versions, lengths)).astype(np.int32)


def trajectory_staleness(step: int, spans: Sequence[VersionSpan]) -> int:
    """Staleness of the oldest token; raises ValueError for a trajectory without tokens, which has none."""
    if not spans:
        raise ValueError("a trajectory without tokens has no staleness")
    return token_staleness(step, min(span.version for span in spans))


def window_batches(reorder_window: int, batch_groups: int) -> int:
    """ceil((W - 1) / B): batches by which others may overtake a ticket under overdue='wait'."""
    return -(-(reorder_window - 1) // batch_groups)


def run_ahead(max_staleness: int, overdue: Overdue, reorder_window: int, batch_groups: int) -> int:
    """Batches that may be issued beyond the version loaded in the generator that asks; negative: none ever could be."""
    if overdue != "wait":
        return max_staleness
    return max_staleness - window_batches(reorder_window, batch_groups)


def required_version(position: int, batch_groups: int, ahead: int) -> int:
    """Oldest version that may sample for the ticket at `position`: floor(position / B) <= version + run_ahead."""
    return position // batch_groups - ahead
