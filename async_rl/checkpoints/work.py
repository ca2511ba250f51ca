"""Work under way, as part of a checkpoint: the ledger with its tickets and groups, and the source of problems.

Both live beside each other in the coordinator; they must be taken at one moment, between two of its messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal
from typing import Protocol as TypingProtocol

import msgspec
import numpy as np

from async_rl.buffer import Ledger
from async_rl.buffer.state import LedgerState, check_same_settings, same_settings, without_live_tickets
from async_rl.frames import Frame
from async_rl.protocol import decode_value, encode_value

Change = Literal["problems", "tickets"]
"""What a user may accept to differ from the checkpoint: other problems; other settings that tickets are bound to."""


class Source(TypingProtocol):
    """The part of a ProblemSource that takes its state back."""

    identity: str

    def restore(self, state: dict[str, Any]) -> None: ...


class WorkState(msgspec.Struct, frozen=True):
    """What `capture` takes."""

    ledger: np.ndarray
    """uint8, the bytes of `Ledger.state()`."""
    problems: dict[str, Any]
    """`ProblemSource.state()`."""

    def ledger_state(self) -> LedgerState:
        """The ledger's part, decoded."""
        return decode_value(self.ledger.data, LedgerState)


def capture(ledger: Ledger, problems: dict[str, Any]) -> bytes:
    """The ledger, and the `ProblemSource.state()` of the same moment."""
    return encode_value(WorkState(np.frombuffer(ledger.state(), np.uint8), problems))


def restore(data: Frame, ledger: Ledger, problems: Source, accept: Collection[Change] = ()) -> list[str]:
    """Continue from `capture`, in a new ledger and source; returns in words what was given up for accepted changes.

    Raises InputError, with both values, for other problems or other binding settings that `accept` does not name.
    """
    work = read_work(data)
    state = work.ledger_state()
    reason = None
    if "tickets" in accept and not same_settings(state.settings, ledger.settings):
        reason = "settings_changed"
    else:
        check_same_settings(state.settings, ledger.settings)
    if "problems" in accept and work.problems["identity"] != problems.identity:
        reason = "problems_changed"
    else:
        problems.restore(work.problems)
    if reason is None:
        ledger.restore(work.ledger.tobytes())
        return []
    kept = without_live_tickets(state, ledger.settings, reason)
    ledger.restore(encode_value(kept))
    lost = kept.dropped[reason] - state.dropped.get(reason, 0)
    return [f"{lost} tickets under way are dropped ({reason}), as checkpoint.accept_changed allows"]


def read_work(data: Frame) -> WorkState:
    """What `capture` took."""
    return decode_value(data, WorkState)
