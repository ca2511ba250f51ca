"""One sentence for people: what the learner is waiting for, who holds it, since when."""

from __future__ import annotations

import math
from collections.abc import Mapping

from async_rl.buffer.leases import LeaseBook, OpenMember
from async_rl.buffer.state import Ticket


def describe_ticket(number: int, ticket: Ticket, leases: LeaseBook, now: float) -> str:
    """The open members of a ticket, the one that has been open longest in full."""
    members = [(m, s) for m in range(len(ticket.results)) if (s := leases.get((number, m))) is not None]
    index, state = min(members, key=lambda item: _since(item[1]))
    what = f"ticket {number} (problem {ticket.problem.id!r}, {ticket.open} of {len(ticket.results)} members open)"
    if state.live:
        attempt, holder = next(iter(state.live.items()))
        return f"{what}: member {index} is held by {holder.owner!r} {_ago(holder.since, now)}, attempt {attempt}"
    return (
        f"{what}: member {index} has waited {_ago(state.waiting_since, now)} "
        f"for a free slot at version {ticket.required} or newer"
    )


def describe_admission(required: int, batch_groups: int, num_live: int, versions: Mapping[str, int]) -> str:
    """Why no further ticket is issued; `versions` holds the version of every generator that asked."""
    if not versions:
        return "no generator has asked for work"
    newest = max(versions, key=versions.__getitem__)
    if required > versions[newest]:
        return (
            f"admission is closed: the next ticket needs version {required}, and the newest generator that asked, "
            f"{newest!r}, has version {versions[newest]}"
        )
    return f"admission is open ({num_live} tickets live, {batch_groups} make a batch): no generator has a free slot"


def _since(state: OpenMember) -> float:
    return min((holder.since for holder in state.live.values()), default=state.waiting_since)


def _ago(since: float, now: float) -> str:
    return f"for {now - since:.1f} s" if math.isfinite(since) else "since before the learner restarted"
