"""What of a coordinator a checkpoint keeps: the ledger, and where the problems stand.

Evaluations need nothing: a round in flight is not kept, and rounds are numbered by their version.
"""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.buffer import Ledger
from async_rl.envs.base import ProblemSource
from async_rl.protocol import decode_value, encode_value


class CoordinatorState(msgspec.Struct, frozen=True):
    """Data of `encode_state`."""

    ledger: bytes
    """`Ledger.state`."""
    problems: dict[str, Any]
    """`ProblemSource.state`."""


def encode_state(ledger: Ledger, problems: dict[str, Any]) -> bytes:
    """The state as bytes."""
    return encode_value(CoordinatorState(ledger.state(), problems))


def restore_state(data: bytes, ledger: Ledger, problems: ProblemSource) -> None:
    """Continue in fresh parts; raises ValueError when settings or problems are others, ProtocolError for damage."""
    state: CoordinatorState = decode_value(data, CoordinatorState)
    problems.restore(state.problems)
    ledger.restore(state.ledger)
