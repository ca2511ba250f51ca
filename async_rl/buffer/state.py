"""The ledger as data, for checkpoints."""

from __future__ import annotations

import msgspec

from async_rl.buffer.leases import OpenMember
from async_rl.buffer.records import LedgerSettings, TrajectoryGroup
from async_rl.errors import InputError
from async_rl.protocol import Problem, Trajectory


class Ticket(msgspec.Struct):
    """A ticket with open members."""

    problem: Problem
    required: int
    """Oldest policy version that may sample for it."""
    results: list[Trajectory | None]
    """By member, a baseline member last; None: still open, or failed."""
    open: int
    """Members not settled yet."""
    failed: int = 0
    """Members settled without a usable trajectory."""


class OpenPlace(msgspec.Struct, frozen=True, array_like=True):
    """One open member and where it belongs."""

    ticket: int
    member: int
    state: OpenMember


class LedgerState(msgspec.Struct, frozen=True):
    """Everything that a ledger must remember. A batch in flight is stored as buffered: its step is not done."""

    settings: LedgerSettings
    issued: int
    trained: int
    steps: int
    exhausted: bool
    refills: int
    dropped: dict[str, int]
    events: dict[str, int]
    tickets: dict[int, Ticket]
    members: list[OpenPlace]
    buffered: list[TrajectoryGroup]


_BINDING = ("batch_groups", "group_size", "baseline", "max_staleness", "publish_every", "overdue", "reorder_window")
"""Settings under which the tickets of a state were issued: with others they would lack members, or break the bound."""


def same_settings(saved: LedgerSettings, now: LedgerSettings) -> bool:
    """Whether the tickets of a state can go on under these settings."""
    return all(getattr(saved, name) == getattr(now, name) for name in _BINDING)


def check_same_settings(saved: LedgerSettings, now: LedgerSettings) -> None:
    """Raise InputError if a state cannot be continued under other settings."""
    for name in _BINDING:
        before, after = getattr(saved, name), getattr(now, name)
        if before != after:
            raise InputError(
                f"{name} = {after!r}, but the checkpoint's tickets were issued under {name} = {before!r}, which their "
                "members and their staleness bound depend on; resume with the old value, or let the tickets under way "
                "be dropped with checkpoint.accept_changed=tickets"
            )


def without_live_tickets(state: LedgerState, settings: LedgerSettings, reason: str) -> LedgerState:
    """The same account under other settings: every ticket under way is dropped and counted under `reason`."""
    live = len(state.tickets) + len(state.buffered)
    dropped = {**state.dropped, reason: state.dropped.get(reason, 0) + live}
    return msgspec.structs.replace(state, settings=settings, dropped=dropped, tickets={}, members=[], buffered=[])
