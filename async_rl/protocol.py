"""Every message between learner and generators, written once, and their one codec.

A message is one msgpack header and raw array frames (`frames.py`): `encode` turns a struct into frames,
`decode` turns frames back and refuses whatever the types do not allow. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
import numpy as np

from async_rl.errors import InputError
from async_rl.frames import Frame, value_from_frames, value_to_frames
from async_rl.frames import ProtocolError as ProtocolError
from async_rl.frames import decode_value as decode_value
from async_rl.frames import encode_value as encode_value
from async_rl.trajectories import Trajectory as Trajectory
from async_rl.trajectories import TrajectoryBlock, check_array, check_block, require
from async_rl.trajectories import TrajectoryStatus as TrajectoryStatus
from async_rl.trajectories import VersionSpan as VersionSpan
from async_rl.trajectories import check_trajectory as check_trajectory

PROTOCOL_VERSION = 3
MAX_FRAMES = 4096
MAX_HEADER_BYTES = 16 << 20
MAX_NAME_CHARS = 100
_LEASE_BYTES = 512
"""Of a message with one lease, at most, besides its problem; stop ids have their own bytes."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of every message; the tag is the class name."""


class TooLarge(InputError):
    """A message that no peer would take."""


# --- data -------------------------------------------------------------------------------------


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One item that an environment poses."""

    id: str
    """Unique within the dataset and stable across restarts."""
    prompt: str
    """Rendered prompt text (chat template applied)."""
    prompt_ids: np.ndarray
    """int32 [P], the tokens that the engine is given; never re-tokenised."""
    answer: Any = None
    """What the environment needs to score a completion (plain data)."""
    metadata: dict[str, Any] = {}
    """Further columns of the row (plain data), passed to reward functions."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one member is sampled."""

    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the completion, besides the model's own end tokens."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A generator's right to work on one member of a ticket."""

    kind: Literal["train", "eval"]
    ticket: int
    """Place in the order of the run; for eval the index of (round, problem)."""
    member: int
    attempt: int
    problem: Problem
    sampling: SamplingParams


class LeaseKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names one attempt at one member; results are idempotent in it."""

    kind: Literal["train", "eval"]
    ticket: int
    member: int
    attempt: int


class TensorInfo(msgspec.Struct, frozen=True):
    """One parameter of a publication."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a publication holds, sent before any byte of it."""

    run_id: str
    version: int
    tensors: tuple[TensorInfo, ...]
    """In the order in which they are sent; names as in the Hugging Face checkpoint; dtype such as 'float32'."""
    num_bytes: int
    digest: str
    """Hash of names, shapes and dtypes (`manifest_digest`)."""
    checksum: str
    """Hash of all bytes (`weights.base.Checksum`), reported back by every receiver."""
    bucket_bytes: int = 64 << 20
    """Size of the buckets on the wire; with `tensors` it fixes where each tensor lies (`weights.base.BucketLayout`)."""


class EpochInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A broadcast group: the members between two changes of membership."""

    epoch: int
    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    """The rendezvous TCPStore of the learner."""
    rank: int
    """First rank of the receiving member (a tensor-parallel engine takes `receivers` of them)."""
    size: int
    deadline_s: float


# --- generator -> coordinator ------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, and again after every reconnect."""

    protocol: int
    name: str
    """Unique name of the generator, kept across its restarts."""
    incarnation: str
    """New for every process."""
    run_id: str | None
    """Run that the generator worked for before; None at first."""
    policy_version: int | None
    """Version loaded in the engine; None: nothing of this run."""
    slots: int
    """Members that the engine works on at once."""
    receivers: int
    """Ranks that this member takes in a broadcast group; 0: it loads no weights (simulated)."""
    engine: str
    host: str
    pid: int
    prefetch: int = 0
    """Leases that it takes beyond its slots, so that no slot waits for the network."""
    holding: tuple[LeaseKey, ...] = ()
    """Leases of `run_id` that the generator still works on or has finished and not seen acknowledged."""


class GeneratorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the process started; the coordinator takes differences."""

    uptime_s: float = 0.0
    idle_slot_s: float = 0.0
    """Slot-seconds without work."""
    slot_s: float = 0.0
    """Slot-seconds in all."""
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    discarded: int = 0
    """Finished members thrown away because their run or version no longer exists."""
    paused_s: float = 0.0
    """Seconds the engine stood still for weight updates."""
    round_trips: int = 0
    """Finished members whose acknowledgement was timed, one at a time."""
    round_trip_s: float = 0.0
    """Seconds from sending them to their acknowledgement."""


class Heartbeat(Message, frozen=True):
    """Sent every heartbeat_s. The coordinator counts free slots itself: slots minus outstanding leases."""

    accepting: bool
    """False while no new lease is wanted (leaving, or loading for the first time)."""
    holding: tuple[LeaseKey, ...]
    """Every lease received and not yet acknowledged; one sent long ago and missing here was lost and is issued anew."""
    policy_version: int | None
    stats: GeneratorStats


class Finished(Message, frozen=True):
    """Finished members, each on its own account. Sent again after a reconnect until acknowledged."""

    run_id: str
    keys: tuple[LeaseKey, ...]
    trajectories: TrajectoryBlock
    """In the order of `keys`."""

    @classmethod
    def of(cls, run_id: str, results: Mapping[LeaseKey, Trajectory]) -> Finished:
        """The message of at least one result."""
        return cls(run_id=run_id, keys=tuple(results), trajectories=TrajectoryBlock.of(list(results.values())))

    def results(self) -> list[tuple[LeaseKey, Trajectory]]:
        """What it holds, arrays as views of the message's."""
        return list(zip(self.keys, self.trajectories.split(), strict=True))


class Returned(Message, frozen=True):
    """Leases given back unfinished (the generator leaves)."""

    run_id: str
    keys: tuple[LeaseKey, ...]


class EpochJoined(Message, frozen=True):
    """The member stands in the group of `epoch` (or could not: error)."""

    epoch: int
    error: str | None = None


class Received(Message, frozen=True):
    """All bytes of a publication arrived (or did not: error); nothing is loaded yet."""

    version: int
    epoch: int
    checksum: str | None
    receive_s: float
    error: str | None = None


class Loaded(Message, frozen=True):
    """The engine samples with `version` from now on (or could not load it: error)."""

    version: int
    checksum: str | None
    load_s: float
    paused_s: float
    source: Literal["broadcast", "snapshot", "none"]
    error: str | None = None


class Goodbye(Message, frozen=True):
    """A clean leave; leases held are returned."""

    reason: str


# --- coordinator -> generator ------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to Hello."""

    run_id: str
    policy_version: int
    """Last published version; the generator gets no lease before it has loaded it."""
    heartbeat_s: float
    heartbeat_timeout_s: float
    max_message_bytes: int
    ancestors: dict[str, int] = {}
    """Earlier runs that this one continues -> last version of each that belongs to it; later ones are lost."""


class Refused(Message, frozen=True):
    """The connection is not accepted; the reason is for people."""

    reason: str
    retry: bool
    """Whether trying again can help."""
    restart: bool = False
    """Whether a new process of that generator would be accepted."""


class Alive(Message, frozen=True):
    """Answer to every Heartbeat, so that a generator notices a dead or restarted learner."""

    run_id: str
    policy_version: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What tells the leases of one ticket apart; fields as in `Lease` and `SamplingParams`."""

    member: int
    attempt: int
    seed: int


class TicketLeases(msgspec.Struct, frozen=True):
    """Leases of one ticket that are sampled alike: a problem travels once for all of them."""

    kind: Literal["train", "eval"]
    ticket: int
    problem: Problem
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    places: tuple[Place, ...]

    def leases(self) -> list[Lease]:
        """One by one."""
        return [
            Lease(
                kind=self.kind,
                ticket=self.ticket,
                member=place.member,
                attempt=place.attempt,
                problem=self.problem,
                sampling=SamplingParams(
                    max_tokens=self.max_tokens, temperature=self.temperature, seed=place.seed, stop_ids=self.stop_ids
                ),
            )
            for place in self.places
        ]


def _shared(lease: Lease) -> tuple[Any, ...]:
    """What leases have in common that travel as one `TicketLeases`."""
    sampling = lease.sampling
    return lease.kind, lease.ticket, sampling.max_tokens, sampling.temperature, sampling.stop_ids


class Leases(Message, frozen=True):
    """Work."""

    tickets: tuple[TicketLeases, ...]

    @classmethod
    def of(cls, leases: Iterable[Lease]) -> Leases:
        """The message of leases; neighbours of one ticket that are sampled alike share what they have in common."""
        tickets = []
        for _, same in groupby(leases, key=_shared):
            mine = list(same)
            kind, ticket, problem, sampling = mine[0].kind, mine[0].ticket, mine[0].problem, mine[0].sampling
            places = tuple(Place(lease.member, lease.attempt, lease.sampling.seed) for lease in mine)
            tickets.append(
                TicketLeases(
                    kind, ticket, problem, sampling.max_tokens, sampling.temperature, sampling.stop_ids, places
                )
            )
        return cls(tickets=tuple(tickets))

    @property
    def leases(self) -> list[Lease]:
        """One by one."""
        return [lease for ticket in self.tickets for lease in ticket.leases()]


class Acknowledged(Message, frozen=True):
    """A Finished was taken care of; the generator forgets what it held."""

    keys: tuple[LeaseKey, ...]
    outcomes: tuple[Literal["stored", "duplicate", "unknown"], ...]
    """In the order of `keys`."""


class Cancelled(Message, frozen=True):
    """Leases whose result is no longer wanted."""

    keys: tuple[LeaseKey, ...]


class JoinEpoch(Message, frozen=True):
    """Build the broadcast group of this epoch."""

    info: EpochInfo


class Publish(Message, frozen=True):
    """A publication follows in the group of `epoch`: receive, then load without waiting for another word."""

    epoch: int
    manifest: Manifest
    deadline_s: float


class LoadSnapshot(Message, frozen=True):
    """Load the last published version from a safetensors file: from `path` if visible, else from `url`."""

    manifest: Manifest
    path: str
    url: str | None
    deadline_s: float


class RelabelVersion(Message, frozen=True):
    """To members that load no weights: count as `version` from now on."""

    version: int


class Stop(Message, frozen=True):
    """The run is over, or does not want this generator."""

    reason: str


FromGenerator = Hello | Heartbeat | Finished | Returned | EpochJoined | Received | Loaded | Goodbye
FromCoordinator = (
    Welcome
    | Refused
    | Alive
    | Leases
    | Acknowledged
    | Cancelled
    | JoinEpoch
    | Publish
    | LoadSnapshot
    | RelabelVersion
    | Stop
)


# --- codec --------------------------------------------------------------------------------------


def encode(message: Message) -> list[Frame]:
    """Frames of a message: the header, then one per array. Raises TooLarge if no peer would take it."""
    frames = value_to_frames(message)
    kind, size = type(message).__name__, len(frames[0])
    if len(frames) > MAX_FRAMES:
        raise TooLarge(f"{kind} has {len(frames)} frames, the limit is {MAX_FRAMES}; send fewer items in one message")
    if size > MAX_HEADER_BYTES:
        raise TooLarge(
            f"{kind} has a header of {size} bytes, the limit is {MAX_HEADER_BYTES}; "
            "send fewer items in one message, or drop long columns from the dataset"
        )
    return frames


def check_travels(problem: Problem, max_message_bytes: int) -> str | None:
    """Why no message can hold a lease of this problem, with its size and the limit; None: one can."""
    header, *arrays = value_to_frames(problem)
    size = len(header) + sum(memoryview(array).nbytes for array in arrays)
    for found, limit, what in ((len(header), MAX_HEADER_BYTES, "the header of a message"),
                               (size, max_message_bytes, "transport.max_message_bytes")):  # fmt: skip
        if found > (room := limit - _LEASE_BYTES):
            return f"{found} bytes with all columns, a message has room for {room} ({what})"
    return None


def decode(frames: Sequence[Frame], kind: Any) -> Any:
    """The message in `frames`; `kind` is `FromGenerator` or `FromCoordinator`. Raises only ProtocolError."""
    message = value_from_frames(frames, kind, max_header_bytes=MAX_HEADER_BYTES, max_frames=MAX_FRAMES)
    check = _CHECKS.get(type(message))
    if check is not None:
        check(message)
    return message


def _check_key(key: LeaseKey) -> None:
    require(min(key.ticket, key.member, key.attempt) >= 0, f"lease {key.ticket}/{key.member}/{key.attempt} is negative")


def _check_version(version: int | None) -> None:
    require(version is None or version >= 0, f"policy_version is {version}, expected >= 0")


def _check_hello(hello: Hello) -> None:
    for name in ("name", "incarnation"):
        value = getattr(hello, name)
        fits = (
            0 < len(value) <= MAX_NAME_CHARS and value.isascii() and value.isprintable() and not set(value) & set("/ ")
        )
        require(fits, f"{name} must be 1 to {MAX_NAME_CHARS} printable ASCII characters without '/' and spaces")
    require(hello.slots >= 0, f"slots is {hello.slots}, expected >= 0")
    require(0 <= hello.receivers <= 1024, f"receivers is {hello.receivers}, expected 0 to 1024")
    _check_version(hello.policy_version)
    for key in hello.holding:
        _check_key(key)


def _check_heartbeat(heartbeat: Heartbeat) -> None:
    _check_version(heartbeat.policy_version)
    for key in heartbeat.holding:
        _check_key(key)
    for name in GeneratorStats.__struct_fields__:
        value = getattr(heartbeat.stats, name)
        require(0 <= value < math.inf, f"stats.{name} is {value}, expected a finite number >= 0")


def _check_finished(finished: Finished) -> None:
    for key in finished.keys:
        _check_key(key)
    check_block(finished.trajectories)
    num = len(finished.trajectories.heads)
    require(len(finished.keys) == num, f"{len(finished.keys)} keys come with {num} trajectories")


def _check_returned(returned: Returned) -> None:
    for key in returned.keys:
        _check_key(key)


def _check_leases(leases: Leases) -> None:
    for ticket in leases.tickets:
        prompt = ticket.problem.prompt_ids
        check_array("prompt_ids", prompt, "int32", prompt.size)
        require(prompt.size > 0, f"problem {ticket.problem.id!r} has no prompt tokens")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Hello: _check_hello,
    Heartbeat: _check_heartbeat,
    Finished: _check_finished,
    Returned: _check_returned,
    Leases: _check_leases,
}
