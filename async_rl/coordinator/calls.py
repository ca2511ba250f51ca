"""What the learner and its coordinator process say to each other, written once.

The learner asks (`Ask`), every ask is answered once (`Answer`); in between the coordinator gives the learner blocking
work (`Job`), whose end comes back (`JobEnded`), and lines for people. Calls are the same within one process.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

import msgspec
import numpy as np

from async_rl.buffer import PackedBatch, TrajectoryGroup
from async_rl.config import Config
from async_rl.coordinator.resumed import Resumed
from async_rl.errors import InputError
from async_rl.evaluation import EvaluationResult
from async_rl.protocol import Manifest, Message
from async_rl.transport import TransportError

# --- calls ---------------------------------------------------------------------------------------


class Call(Message, frozen=True):
    """Base of every call; `answer` is the type of what comes back, `pack` and `unpack` its form between processes."""

    answer: ClassVar[Any] = None

    @staticmethod
    def pack(answer: Any) -> Any:
        """The answer as it travels; of the type `answer`."""
        return answer

    @staticmethod
    def unpack(answer: Any) -> Any:
        """The reverse of `pack`."""
        return answer


class Ready(msgspec.Struct, frozen=True):
    """A process has its problems and its ledger."""

    dropped: dict[str, int]
    """Rows that are not used, by reason."""
    given_up: list[str]
    """In words, what of the state it resumes from was given up for changes that the user accepts."""


class Setup(Call, frozen=True):
    """First call to a process: load the problems and set up the ledger. Answer: Ready."""

    answer: ClassVar[Any] = Ready
    config: Config
    run_id: str
    log_level: int
    """Lowest level (of `logging`) that the process writes to its log."""
    resumed: Resumed | None = None
    """None: a new run."""


class Open(Call, frozen=True):
    """Second call to a process: open the ports and begin. Answer: {"learner": "host:port", "http": "host:port"}."""

    answer: ClassVar[Any] = dict[str, str]
    store: tuple[str, int]
    """Host and port of the rendezvous store of publications."""
    backend: str
    """gloo or nccl."""


class RequestBatch(Call, frozen=True):
    """The next batch, one request at a time. Answer, when there is one: its groups; None at the end of the data."""

    answer: ClassVar[Any] = PackedBatch | None

    @staticmethod
    def pack(answer: tuple[TrajectoryGroup, ...] | None) -> PackedBatch | None:
        """See `Call.pack`."""
        return None if answer is None else PackedBatch.of(answer)

    @staticmethod
    def unpack(answer: PackedBatch | None) -> tuple[TrajectoryGroup, ...] | None:
        """See `Call.unpack`."""
        return None if answer is None else answer.groups()


class WithdrawBatch(Call, frozen=True):
    """The learner no longer waits for its batch; the request is answered with None."""


class Trained(Call, frozen=True):
    """The batch in flight has made the next policy version."""


class StartPublication(Call, frozen=True):
    """Publish what is in the send buffers."""

    manifest: Manifest
    evaluate: bool
    """Evaluate the version once it is published."""


class AwaitPublication(Call, frozen=True):
    """Answered once no publication and no snapshot needs the send buffers, or with TimeoutError."""


class StartEvaluation(Call, frozen=True):
    """Evaluate a published version."""

    version: int


class IsEvaluating(Call, frozen=True):
    """Whether an evaluation is under way or will begin after its publication."""

    answer: ClassVar[Any] = bool


class TakeEvaluations(Call, frozen=True):
    """Results since the last such call."""

    answer: ClassVar[Any] = list[EvaluationResult]


class Collect(Call, frozen=True):
    """Metrics of the last `elapsed_s` seconds (`Metrics.to_wire`)."""

    answer: ClassVar[Any] = bytes
    elapsed_s: float


class GetStatus(Call, frozen=True):
    """What /status shows."""

    answer: ClassVar[Any] = dict[str, Any]


class TakeState(Call, frozen=True):
    """What `Resumed.work` continues from."""

    answer: ClassVar[Any] = bytes


class Stop(Call, frozen=True):
    """End."""

    reason: str
    dismiss: bool = True
    """Tell the fleet that the run is over; else it waits for a learner that resumes."""


AnyCall = (
    Setup
    | Open
    | RequestBatch
    | WithdrawBatch
    | Trained
    | StartPublication
    | AwaitPublication
    | StartEvaluation
    | IsEvaluating
    | TakeEvaluations
    | Collect
    | GetStatus
    | TakeState
    | Stop
)


# --- errors --------------------------------------------------------------------------------------


class StallError(RuntimeError):
    """Nothing moved for run.stall_timeout_s; the message names the wait."""


class CoordinatorEnded(RuntimeError):
    """The coordinator has stopped, and cannot do what it is asked."""


_KNOWN = {kind.__name__: kind for kind in (CoordinatorEnded, StallError, TransportError, TimeoutError, OSError)}


class RemoteError(msgspec.Struct, frozen=True):
    """An exception that travels."""

    kind: str
    text: str
    refusal: bool
    """Whether the user's input was refused."""
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """The error as data."""
        lines = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), isinstance(error, InputError), lines)

    def to_error(self) -> Exception:
        """An exception of the same meaning; the traceback of the other process is a note of it."""
        error: Exception
        if self.refusal:
            error = InputError(self.text)
        elif self.kind in _KNOWN:
            error = _KNOWN[self.kind](self.text)
        else:
            error = CoordinatorEnded(f"{self.kind}: {self.text}")
        error.add_note(f"in the coordinator:\n{self.traceback}")
        return error


# --- between the processes -----------------------------------------------------------------------


class Ask(Message, frozen=True):
    """A call and the number of its answer."""

    number: int
    call: AnyCall


class Answer(Message, frozen=True):
    """What a call gave, or how it failed."""

    number: int
    frames: tuple[np.ndarray, ...] | None = None
    """uint8 each, of `value_to_frames`: only the side that asked knows the type of the value."""
    error: RemoteError | None = None


class JoinJob(Message, frozen=True):
    """Build the broadcast group of an epoch."""

    epoch: int
    size: int
    deadline_s: float


class SendJob(Message, frozen=True):
    """Broadcast the send buffers in the group that stands."""

    manifest: Manifest
    deadline_s: float


class SnapshotJob(Message, frozen=True):
    """Write the send buffers to a file."""

    manifest: Manifest


class Job(Message, frozen=True):
    """Blocking work of a publication, done by the learner's publisher."""

    number: int
    work: JoinJob | SendJob | SnapshotJob


class Abandon(Message, frozen=True):
    """The jobs of an epoch are to fail soon: a member that they wait for is gone."""

    epoch: int
    reason: str


class JobEnded(Message, frozen=True):
    """The end of a job: seconds that it took or the path that it wrote, or why it failed."""

    number: int
    seconds: float | None = None
    path: str | None = None
    error: str | None = None


class Note(Message, frozen=True):
    """A line for the learner's console."""

    text: str


class LogLine(Message, frozen=True):
    """A warning or worse, for the learner's own log and screen."""

    logger: str
    level: int
    text: str


class Ended(Message, frozen=True):
    """The coordinator failed; its process ends."""

    error: RemoteError


FromLearner = Ask | JobEnded
FromProcess = Answer | Job | Abandon | Note | LogLine | Ended
