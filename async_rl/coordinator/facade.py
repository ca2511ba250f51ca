"""What the learner asks of its coordinator, the same whether that runs in a thread or in a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from async_rl.buffer import TrajectoryGroup
from async_rl.coordinator import calls
from async_rl.coordinator.calls import CoordinatorEnded
from async_rl.evaluation import EvaluationResult
from async_rl.metrics import Metrics
from async_rl.protocol import Manifest

ANSWER_S = 30.0
"""Longest wait for an answer that needs no waiting on the other side."""
STOP_S = 20.0
"""Longest wait for the coordinator to deliver its last messages and end; `async-rl train` kills after 30 s."""
_LOOK_S = 0.5
"""How often a wait looks whether the coordinator still is."""


class BatchRequest:
    """The learner's wait for one batch."""

    def __init__(self, future: Future[tuple[TrajectoryGroup, ...] | None]) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> bool:
        """Whether the batch (or the end of the data, or an error) is there after at most `timeout_s`."""
        return _done(self._future, timeout_s)

    def result(self) -> tuple[TrajectoryGroup, ...] | None:
        """The groups; None when the data is at its end. Raises what stopped the coordinator."""
        return self._future.result()


class Facade(ABC):
    """Methods for the learner, safe from any thread; all raise CoordinatorEnded once the coordinator has stopped."""

    @abstractmethod
    def post(self, call: calls.Call) -> Future[Any]:
        """Have a call done and return its answer to come. Raises CoordinatorEnded when there is nobody to do it."""

    @abstractmethod
    def stop(self, reason: str, timeout_s: float = STOP_S, dismiss: bool = True) -> None:
        """End; callable more than once, and after a failure.

        Generators are told that the run is over, or (not `dismiss`) wait for a learner that resumes it.
        """

    @abstractmethod
    def _end(self) -> tuple[BaseException | None, str | None]:
        """(what it failed of, why it was told to stop)."""

    def request_batch(self) -> BatchRequest:
        """Ask for the next batch; one request at a time."""
        return BatchRequest(self.post(calls.RequestBatch()))

    def withdraw(self) -> None:
        """The learner no longer waits for the batch that it requested."""
        self.post(calls.WithdrawBatch())

    def trained(self) -> None:
        """The batch in flight has made the next policy version."""
        self.post(calls.Trained())

    def publish(self, manifest: Manifest, evaluate: bool) -> None:
        """Begin the publication of what is in the send buffers; `wait_for_publication` comes first."""
        self.post(calls.StartPublication(manifest=manifest, evaluate=evaluate))

    def wait_for_publication(self) -> None:
        """Return once no publication and no snapshot needs the send buffers.

        Raises what stopped the coordinator, or TimeoutError that says what is waited for.
        """
        over = self.post(calls.AwaitPublication())
        # The coordinator knows how long this may take, and ends it; that it still answers is for us to see.
        while not _done(over, _LOOK_S):
            self.status()
        over.result()

    def evaluate(self, version: int) -> None:
        """Evaluate a published version."""
        self.post(calls.StartEvaluation(version=version))

    def evaluating(self) -> bool:
        """Whether an evaluation is under way or will begin after its publication."""
        return bool(self.ask(calls.IsEvaluating()))

    def take_evaluations(self) -> list[EvaluationResult]:
        """Results since the last call."""
        results: list[EvaluationResult] = self.ask(calls.TakeEvaluations())
        return results

    def collect(self, elapsed_s: float) -> Metrics:
        """The coordinator's and the fleet's metrics of the last `elapsed_s` seconds."""
        return Metrics.from_wire(self.ask(calls.Collect(elapsed_s=elapsed_s)))

    def status(self) -> dict[str, Any]:
        """What /status shows; plain data."""
        status: dict[str, Any] = self.ask(calls.GetStatus())
        return status

    def snapshot_state(self) -> bytes:
        """Ledger and problem source for a checkpoint; a batch in flight counts as not taken."""
        return bytes(self.ask(calls.TakeState()))

    def ask(self, call: calls.Call, timeout_s: float = ANSWER_S) -> Any:
        """The answer of a call; raises what it raised, or TimeoutError after `timeout_s`."""
        answer = self.post(call)
        # Counted in looks, not by a clock: time in which the whole machine stood still is nobody's silence.
        for _ in range(max(1, round(timeout_s / _LOOK_S))):
            if _done(answer, _LOOK_S):
                return answer.result()
            self._raise_end()
        raise TimeoutError(f"the coordinator did not answer {type(call).__name__} for {timeout_s:g} s")

    def _raise_end(self) -> None:
        if (ended := self._ended()) is not None:
            raise ended

    def _ended(self) -> CoordinatorEnded | None:
        """What every call raises once the coordinator has ended, also one that was under way then."""
        error, reason = self._end()
        if error is None and reason is None:
            return None
        ended = CoordinatorEnded(f"the coordinator has stopped: {error or reason}")
        ended.__cause__ = error
        return ended


def _done(future: Future[Any], timeout_s: float) -> bool:
    """Whether it has a result or an error after at most `timeout_s`."""
    try:
        future.exception(timeout_s)
    except TimeoutError:
        return future.done()
    return True
