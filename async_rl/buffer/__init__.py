"""The ledger and the replay buffer: a pure state machine (clock passed in, no sockets, no torch)."""

from async_rl.buffer.ledger import Answer, Ledger
from async_rl.buffer.records import LedgerCounts, LedgerSettings, MemberLease, PackedBatch, Reconciled, TrajectoryGroup
from async_rl.buffer.replay import ReplayBuffer

__all__ = [
    "Answer",
    "Ledger",
    "LedgerCounts",
    "LedgerSettings",
    "MemberLease",
    "PackedBatch",
    "Reconciled",
    "ReplayBuffer",
    "TrajectoryGroup",
]
