"""The window rule, group after group, as docs/staleness.md states it."""

from __future__ import annotations


def literal_batch(
    open_tickets: set[int], complete: set[int], batch_groups: int, window: int | None
) -> list[int] | None:
    """The next batch: B times the oldest complete ticket below head + W, head being the oldest not yet taken."""
    left, batch = set(complete), []
    for _ in range(batch_groups):
        head = min(open_tickets | left, default=0)
        eligible = [ticket for ticket in left if window is None or ticket < head + window]
        if not eligible:
            return None
        batch.append(min(eligible))
        left.remove(min(eligible))
    return batch
