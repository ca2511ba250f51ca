"""What lies in a checkpoint's buffer, for people and for scripts: each member of each ticket under way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from async_rl.buffer.state import LedgerState, Ticket
from async_rl.checkpoints.state import RunState
from async_rl.protocol import Problem, Trajectory

Place = Literal["buffered", "partial", "leased", "waiting"]
"""In a complete group; finished while others of its group are not; with a generator; with nobody yet."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One member."""

    ticket: int
    member: int
    problem: str
    prompt: str
    baseline: bool = False
    """Whether it is the group's greedy completion, which never trains."""
    place: Place
    status: str | None = None
    """complete or truncated; None while it is not finished."""
    reward: float | None = None
    tokens: int | None = None
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version that sampled it."""
    staleness: int | None = None
    """Of its oldest token, if the next step trains it."""
    text: str | None = None
    owner: str | None = None
    """Generator that had it when the checkpoint was taken."""


def rows_of(state: RunState) -> Iterator[Row]:
    """All members under way, oldest ticket first; failed ones are left out."""
    ledger = state.work_state().ledger_state()
    groups = {group.ticket: group for group in ledger.buffered}
    for ticket in sorted([*groups, *ledger.tickets]):
        if ticket in groups:
            group = groups[ticket]
            for member, trajectory in enumerate(group.members):
                yield _finished(ticket, member, group.problem, "buffered", trajectory, ledger)
            if group.baseline is not None:
                member = ledger.settings.group_size
                yield _finished(ticket, member, group.problem, "buffered", group.baseline, ledger)
        else:
            yield from _open_ticket(ticket, ledger.tickets[ticket], ledger)


def _open_ticket(number: int, ticket: Ticket, ledger: LedgerState) -> Iterator[Row]:
    owners = {
        place.member: ", ".join(holder.owner for holder in place.state.live.values())
        for place in ledger.members
        if place.ticket == number
    }
    for member, trajectory in enumerate(ticket.results):
        if trajectory is not None:
            yield _finished(number, member, ticket.problem, "partial", trajectory, ledger)
        elif member in owners:
            yield Row(
                ticket=number,
                member=member,
                problem=ticket.problem.id,
                prompt=ticket.problem.prompt,
                baseline=ledger.settings.is_baseline(member),
                place="leased" if owners[member] else "waiting",
                owner=owners[member] or None,
            )


def _finished(
    ticket: int, member: int, problem: Problem, place: Place, trajectory: Trajectory, ledger: LedgerState
) -> Row:
    versions = [span.version for span in trajectory.versions]
    return Row(
        ticket=ticket,
        member=member,
        problem=problem.id,
        prompt=problem.prompt,
        baseline=ledger.settings.is_baseline(member),
        place=place,
        status=trajectory.status,
        reward=trajectory.reward,
        tokens=len(trajectory.completion_ids),
        versions=(min(versions), max(versions)) if versions else None,
        staleness=ledger.steps - min(versions) if versions else None,
        text=trajectory.text,
    )


def summary(state: RunState) -> str:
    """Where every ticket of the run is, in one line."""
    ledger = state.work_state().ledger_state()
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(ledger.dropped.items())) or "none"
    return (
        f"step {state.step}: {ledger.issued} problems drawn, {ledger.trained} trained, {len(ledger.buffered)} groups "
        f"buffered, {len(ledger.tickets)} tickets with members open, dropped: {dropped}"
    )


def describe(row: Row) -> str:
    """One member in a few lines, for people."""
    member = "baseline" if row.baseline else f"member {row.member}"
    head = f"ticket {row.ticket} {member}  {row.problem}  {row.place}"
    if row.place == "leased":
        return f"{head} to {row.owner}\n    prompt: {row.prompt!r}"
    if row.status is None:
        return f"{head}\n    prompt: {row.prompt!r}"
    old, new = row.versions or (None, None)
    versions = f"version {old}" if old == new else f"versions {old}-{new}"
    facts = f"reward {row.reward}, {row.status}, {row.tokens} tokens, {versions}, staleness {row.staleness}"
    return f"{head}\n    {facts}\n    prompt: {row.prompt!r}\n    completion: {row.text!r}"
