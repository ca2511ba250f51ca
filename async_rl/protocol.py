"""Every message between learner and generators, written once, and their one codec.

A message is one msgpack header and raw array frames (`frames.py`): `encode` turns a struct into frames,
`decode` turns frames back and refuses whatever the types do not allow. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from async_rl.frames import Frame, ProtocolError, dtype_name, value_from_frames, value_to_frames
from async_rl.frames import decode_value as decode_value
from async_rl.frames import encode_value as encode_value

PROTOCOL_VERSION = 2
MAX_FRAMES = 4096
MAX_HEADER_BYTES = 16 << 20
MAX_NAME_CHARS = 100


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of every message; the tag is the class name."""


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


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Completion tokens start..end-1 were sampled by `version`."""

    version: int
    start: int
    end: int


TrajectoryStatus = Literal["complete", "truncated", "failed"]
"""complete: ended by itself; truncated: hit max_completion_tokens; failed: no usable sample or reward."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One finished attempt. `L` is the number of completion tokens; a failed one may have L = 0."""

    status: TrajectoryStatus
    completion_ids: np.ndarray
    """int32 [L], including the end token if it was sampled."""
    completion_mask: np.ndarray
    """uint8 [L], 1 where the policy sampled the token (0: tool output and the like)."""
    behavior_logprobs: np.ndarray
    """float32 [L], as sampled, temperature included; nats."""
    versions: tuple[VersionSpan, ...]
    """Cover 0..L-1 in order without gaps."""
    reward: float | None
    """None exactly when status is failed."""
    error: str | None = None
    """Why it failed, one line."""
    text: str | None = None
    """The completion decoded, for people."""
    sample_s: float = 0.0
    """Seconds from start of sampling to the last token."""
    reward_s: float = 0.0
    """Seconds that scoring took."""


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


class LeaseKey(msgspec.Struct, frozen=True, order=True):
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
    """One finished member. Sent again after a reconnect until acknowledged."""

    run_id: str
    key: LeaseKey
    trajectory: Trajectory


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


class Leases(Message, frozen=True):
    """Work."""

    leases: tuple[Lease, ...]


class Acknowledged(Message, frozen=True):
    """A Finished was taken care of; the generator forgets it."""

    key: LeaseKey
    outcome: Literal["stored", "duplicate", "unknown"]


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
    """Frames of a message: the header, then one per array. Raises ValueError if no peer would take it."""
    frames = value_to_frames(message)
    kind, size = type(message).__name__, len(frames[0])
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"{kind} has {len(frames)} frames, the limit is {MAX_FRAMES}; send fewer items in one message")
    if size > MAX_HEADER_BYTES:
        raise ValueError(
            f"{kind} has a header of {size} bytes, the limit is {MAX_HEADER_BYTES}; "
            "send fewer items in one message, or drop long columns from the dataset"
        )
    return frames


def decode(frames: Sequence[Frame], kind: Any) -> Any:
    """The message in `frames`; `kind` is `FromGenerator` or `FromCoordinator`. Raises only ProtocolError."""
    message = value_from_frames(frames, kind, max_header_bytes=MAX_HEADER_BYTES, max_frames=MAX_FRAMES)
    check = _CHECKS.get(type(message))
    if check is not None:
        check(message)
    return message


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ProtocolError(text)


def _check_array(name: str, array: np.ndarray, dtype: str, length: int) -> None:
    if dtype_name(array) != dtype:
        raise ProtocolError(f"{name} is {array.dtype}, expected {dtype}")
    if array.shape != (length,):
        raise ProtocolError(f"{name} has shape {list(array.shape)}, expected [{length}]")


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise ProtocolError unless the parts of a trajectory agree with each other."""
    length = trajectory.completion_ids.size
    _check_array("completion_ids", trajectory.completion_ids, "int32", length)
    _check_array("completion_mask", trajectory.completion_mask, "uint8", length)
    _check_array("behavior_logprobs", trajectory.behavior_logprobs, "float32", length)
    _require(length > 0 or trajectory.status == "failed", f"a {trajectory.status} trajectory has no tokens")
    _require(not (trajectory.completion_ids < 0).any(), "completion_ids holds negative token ids")
    _require(not (trajectory.completion_mask > 1).any(), "completion_mask holds values other than 0 and 1")
    _require(
        bool(np.isfinite(trajectory.behavior_logprobs).all()), "behavior_logprobs holds values that are not finite"
    )
    _check_versions(trajectory.versions, length)
    if trajectory.status == "failed":
        _require(trajectory.reward is None, f"a failed trajectory has reward {trajectory.reward}, expected none")
    else:
        finite = trajectory.reward is not None and math.isfinite(trajectory.reward)
        _require(finite, f"a {trajectory.status} trajectory has reward {trajectory.reward}, expected a finite number")
    for name in ("sample_s", "reward_s"):
        _require(0 <= getattr(trajectory, name) < math.inf, f"{name} is {getattr(trajectory, name)}, expected >= 0")


def _check_versions(spans: Sequence[VersionSpan], length: int) -> None:
    """Spans must cover 0..length-1 in order, without gaps, and none may be empty."""
    position = 0
    for span in spans:
        _require(span.version >= 0, f"version {span.version} is negative")
        _require(span.start == position, f"version span starts at {span.start}, the one before ends at {position}")
        _require(span.end > span.start, f"version span {span.start}..{span.end} is empty")
        position = span.end
    _require(position == length, f"version spans end at {position}, the completion has {length} tokens")


def _check_key(key: LeaseKey) -> None:
    _require(
        min(key.ticket, key.member, key.attempt) >= 0, f"lease {key.ticket}/{key.member}/{key.attempt} is negative"
    )


def _check_version(version: int | None) -> None:
    _require(version is None or version >= 0, f"policy_version is {version}, expected >= 0")


def _check_hello(hello: Hello) -> None:
    for name in ("name", "incarnation"):
        value = getattr(hello, name)
        fits = (
            0 < len(value) <= MAX_NAME_CHARS and value.isascii() and value.isprintable() and not set(value) & set("/ ")
        )
        _require(fits, f"{name} must be 1 to {MAX_NAME_CHARS} printable ASCII characters without '/' and spaces")
    _require(hello.slots >= 0, f"slots is {hello.slots}, expected >= 0")
    _require(0 <= hello.receivers <= 1024, f"receivers is {hello.receivers}, expected 0 to 1024")
    _check_version(hello.policy_version)
    for key in hello.holding:
        _check_key(key)


def _check_heartbeat(heartbeat: Heartbeat) -> None:
    _check_version(heartbeat.policy_version)
    for key in heartbeat.holding:
        _check_key(key)
    for name in GeneratorStats.__struct_fields__:
        value = getattr(heartbeat.stats, name)
        _require(0 <= value < math.inf, f"stats.{name} is {value}, expected a finite number >= 0")


def _check_finished(finished: Finished) -> None:
    _check_key(finished.key)
    check_trajectory(finished.trajectory)


def _check_returned(returned: Returned) -> None:
    for key in returned.keys:
        _check_key(key)


def _check_leases(leases: Leases) -> None:
    for lease in leases.leases:
        prompt = lease.problem.prompt_ids
        _check_array("prompt_ids", prompt, "int32", prompt.size)
        _require(prompt.size > 0, f"problem {lease.problem.id!r} has no prompt tokens")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Hello: _check_hello,
    Heartbeat: _check_heartbeat,
    Finished: _check_finished,
    Returned: _check_returned,
    Leases: _check_leases,
}
