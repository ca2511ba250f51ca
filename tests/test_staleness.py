"""Staleness: the definition by hand, and the run-ahead table of docs/staleness.md."""

from __future__ import annotations

import pytest

from async_rl.protocol import VersionSpan
from async_rl.staleness import required_version, run_ahead, staleness_per_token, token_staleness, trajectory_staleness

SPANS = (VersionSpan(7, 0, 3), VersionSpan(8, 3, 4), VersionSpan(9, 4, 6))


def test_case_queue_ages() -> None:
    """Versions 7 to 9, trained in step 12: the oldest token counts, and so does the time in the queue."""
    assert trajectory_staleness(12, SPANS) == 4


def test_every_token_has_its_own() -> None:
    assert staleness_per_token(12, SPANS).tolist() == [4, 4, 4, 3, 2, 2]
    assert staleness_per_token(12, ()).tolist() == []
    assert token_staleness(1, 0) == 0, "the first step trains what version 0 sampled"


def test_nothing_has_no_staleness() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        trajectory_staleness(3, ())


@pytest.mark.parametrize(
    ("max_staleness", "overdue", "window", "expected"),
    [(2, "mask", 1, 2), (2, "keep", 99, 2), (2, "wait", 1, 2), (2, "wait", 2, 1), (2, "wait", 5, 1), (2, "wait", 6, 0)],
)
def test_run_ahead(max_staleness: int, overdue: str, window: int, expected: int) -> None:
    assert run_ahead(max_staleness, overdue, window, batch_groups=4) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("position", "expected"), [(0, -1), (3, -1), (4, 0), (7, 0), (8, 1)])
def test_required_version(position: int, expected: int) -> None:
    assert required_version(position, batch_groups=4, ahead=1) == expected
