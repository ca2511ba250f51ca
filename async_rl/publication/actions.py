"""What a publication asks of its surroundings, as data, and the report it ends with."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.membership import EpochPlan


@dataclass(frozen=True)
class PublicationSettings:
    """Limits of a publication."""

    deadline_s: float
    """Seconds for each of join, transfer and load; sent to members and sender."""
    grace_s: float = 5.0
    """Seconds more that are waited for an answer, since a member's own deadline starts and reports later."""
    max_retries: int = 2
    """Failed tries of a member that is alive before it is evicted."""
    write_deadlines: float = 4.0
    """Deadlines within which the file of a snapshot is written: a disk may be slower than a network."""

    @property
    def patience_s(self) -> float:
        """Seconds until silence counts as failure."""
        return self.deadline_s + self.grace_s

    @property
    def write_patience_s(self) -> float:
        """Seconds until a file that is not written counts as failure."""
        return self.write_deadlines * self.deadline_s + self.grace_s

    def longest_round_s(self, num_members: int) -> float:
        """Seconds within which a round ends whatever happens; `Publication` says why."""
        return ((num_members + self.max_retries + 1) * 2 + 1) * self.patience_s


@dataclass(frozen=True)
class JoinGroup:
    """Tell the members of `plan` to join its epoch (JoinEpoch), and have the learner's sender join as rank 0."""

    plan: EpochPlan
    deadline_s: float


@dataclass(frozen=True)
class SendWeights:
    """Tell `names` that `version` comes in `epoch` (Publish), then have the sender send."""

    epoch: int
    version: int
    names: tuple[str, ...]
    deadline_s: float


@dataclass(frozen=True)
class SendRelabel:
    """To members that load no weights (RelabelVersion)."""

    version: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class WriteSnapshot:
    """Have the learner write the last published version to a file, for a member; `snapshot_written` is the answer."""

    name: str
    version: int


@dataclass(frozen=True)
class SendSnapshot:
    """Have a member load the file that was just written (LoadSnapshot)."""

    name: str
    version: int
    deadline_s: float


@dataclass(frozen=True)
class Abandon:
    """Have the learner's sender give up its work for an epoch: a member that it waits for is gone."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Evict:
    """Remove a member; it may come back with a new hello."""

    name: str
    reason: str
    alarm: bool = False
    """Wrong bytes were loaded or received: a fault that must be seen, not only counted."""


@dataclass(frozen=True)
class Report:
    """How a round went; loaded, evicted and gone together are everyone it began with."""

    version: int
    loaded: tuple[str, ...]
    evicted: dict[str, str]
    """Name -> reason."""
    gone: dict[str, str]
    """Left or died meanwhile; name -> reason."""
    tries: int
    """Transfers begun or attempted; 1 when all went well, 0 without receivers."""
    join_s: float
    transfer_s: float
    load_s: float
    """From the end of the last transfer to the last load."""
    total_s: float
    sender_error: str | None
    """The sender's last error, even if a later try went well."""


@dataclass(frozen=True)
class Done:
    """The round is over."""

    report: Report


Action = JoinGroup | SendWeights | SendRelabel | WriteSnapshot | SendSnapshot | Abandon | Evict | Done
