"""The coordinator as a process beside rank 0 of the learner: `python -m async_rl.coordinator.process FD`.

FD is its end of the link. It obeys the learner alone: it ignores the signals that a terminal or a scheduler sends to
all processes of a run, since the learner still needs it for an orderly end, and it ends at once when the learner is
gone. The main thread loads the problems and then runs the coordinator; a second thread reads the link.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from async_rl.buffer import Ledger, LedgerSettings
from async_rl.checkpoints.work import restore
from async_rl.config import Config
from async_rl.coordinator import calls as c
from async_rl.coordinator.core import Coordinator
from async_rl.coordinator.link import Link
from async_rl.coordinator.resumed import Resumed
from async_rl.envs.base import ProblemSource, build_environment
from async_rl.envs.tokenize import load_tokenizer, stop_ids
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.frames import value_to_frames
from async_rl.keys import keys_of
from async_rl.leasing import Leasing
from async_rl.logs import LINE
from async_rl.protocol import Manifest
from async_rl.weights.errors import WeightsError

log = logging.getLogger("async_rl.coordinator.process")  # __name__ is __main__ here.


class RemoteTransfer:
    """The blocking half of publication: asks the learner's publisher for it; futures raise WeightsError."""

    def __init__(self, link: Link, store: tuple[str, int], backend: str) -> None:
        self.store = store
        self.backend = backend
        self._link = link
        self._numbers = itertools.count()
        self._jobs: dict[int, Future[Any]] = {}

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        """See `Transfer.join`."""
        return self._begin(c.JoinJob(epoch=epoch, size=size, deadline_s=deadline_s))

    def send(self, manifest: Manifest, deadline_s: float) -> Future[float]:
        """See `Transfer.send`."""
        return self._begin(c.SendJob(manifest=manifest, deadline_s=deadline_s))

    def abandon(self, epoch: int, reason: str) -> None:
        """See `Transfer.abandon`."""
        self._link.send(c.Abandon(epoch=epoch, reason=reason))

    def snapshot(self, manifest: Manifest) -> Future[Path]:
        """See `Transfer.snapshot`."""
        return self._begin(c.SnapshotJob(manifest=manifest))

    def _begin(self, work: c.JoinJob | c.SendJob | c.SnapshotJob) -> Future[Any]:
        number, job = next(self._numbers), Future[Any]()
        self._jobs[number] = job
        self._link.send(c.Job(number=number, work=work))
        return job

    def ended(self, message: c.JobEnded) -> None:
        """The learner has done a job."""
        job = self._jobs.pop(message.number)
        if message.error is not None:
            job.set_exception(WeightsError(message.error))
        else:
            job.set_result(message.seconds if message.path is None else Path(message.path))


class Parts:
    """Problems, ledger and evaluations of a run. Raises InputError for problems or a state that cannot be used."""

    def __init__(self, config: Config, resumed: Resumed | None) -> None:
        tokenizer = load_tokenizer(config.model.path)
        self.problems: ProblemSource = build_environment(config).problems(tokenizer)
        self.ledger = Ledger(LedgerSettings.of(config), self.problems.draw)
        self.evaluations = Evaluations(EvaluationSettings.of(config))
        self.leasing = Leasing(config, self.ledger, self.evaluations, stop_ids(tokenizer, config.sampling.stop))
        self.given_up: list[str] = []
        if resumed is not None:
            accept = config.checkpoint.accept_changed
            self.given_up = restore(resumed.work.data, self.ledger, self.problems, accept)


class Service:
    """Answers the learner's asks: `Setup`, then `Open`, then what the coordinator answers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._first: queue.SimpleQueue[c.Ask] = queue.SimpleQueue()
        """Asks before the coordinator runs; the learner waits for the answer of each."""
        self._transfer: RemoteTransfer | None = None
        self._coordinator: Coordinator | None = None

    def run(self) -> int:
        """Do what the learner says until it says stop; returns the exit code."""
        threading.Thread(target=self._listen, name="link", daemon=True).start()
        ask = self._first.get()
        if not isinstance(ask.call, c.Setup) or not self._try(ask, self._set_up):
            return 1
        setup, ask = ask.call, self._first.get()
        if not isinstance(ask.call, c.Open):
            return 0  # Stop: the learner could not begin.
        if not self._try(ask, lambda call: self._open(setup, call)):
            return 1
        assert self._coordinator is not None
        self._coordinator.run()
        if self._coordinator.error is None:
            return 0
        self._send(c.Ended(error=c.RemoteError.of(self._coordinator.error)))
        return 1

    def _try(self, ask: c.Ask, action: Callable[[Any], Any]) -> bool:
        """Answer an ask with what `action` gives or raises; whether it gave something."""
        try:
            value = action(ask.call)
        except Exception as error:  # the boundary of this process: the learner raises it
            log.info("%s failed", type(ask.call).__name__, exc_info=True)
            self._answer(ask, error=error)
            return False
        self._answer(ask, value)
        return True

    def _set_up(self, call: c.Setup) -> c.Ready:
        _start_logging(call.log_level, self)
        log.info("coordinator of run %s, process %d", call.run_id, os.getpid())
        keys_of(call.config, "learner")  # Unusable keys are refused now, not after the learner has loaded its model.
        self._parts = Parts(call.config, call.resumed)
        return c.Ready(self._parts.problems.dropped, self._parts.given_up)

    def _open(self, setup: c.Setup, call: c.Open) -> dict[str, str]:
        parts, config = self._parts, setup.config
        self._transfer = RemoteTransfer(self.link, call.store, call.backend)
        coordinator = Coordinator(
            config=config,
            run_id=setup.run_id,
            ledger=parts.ledger,
            evaluations=parts.evaluations,
            eval_problems=parts.problems.eval_problems() if config.evaluation.every > 0 else [],
            leasing=parts.leasing,
            transfer=self._transfer,
            problem_state=parts.problems.state,
            resumed=setup.resumed,
            notify=lambda text: self._send(c.Note(text=text)),
        )
        addresses = coordinator.open()
        self._coordinator = coordinator
        return addresses

    # --- the link -------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Read the link to its end, which is the end of the learner and so of this process."""
        try:
            while (message := self.link.receive()) is not None:
                self._take(message)
            log.info("the learner is gone")
        # Without this thread nothing would end the process: it is the boundary.
        except BaseException:
            log.exception("the link to the learner failed")
        _exit(1)

    def _take(self, message: c.FromLearner) -> None:
        if isinstance(message, c.JobEnded):
            assert self._transfer is not None, "a job ended before one began"
            self._transfer.ended(message)
        elif self._coordinator is None:
            self._first.put(message)
        else:
            self._forward(message, self._coordinator)

    def _forward(self, ask: c.Ask, coordinator: Coordinator) -> None:
        try:
            answer = coordinator.post(ask.call)
        except c.CoordinatorEnded as error:
            self._answer(ask, error=error)
            return

        def done(future: Future[Any]) -> None:
            error = future.exception()
            self._answer(ask, None if error else ask.call.pack(future.result()), error)

        answer.add_done_callback(done)

    def _answer(self, ask: c.Ask, value: Any = None, error: BaseException | None = None) -> None:
        if error is not None:
            self._send(c.Answer(number=ask.number, error=c.RemoteError.of(error)))
        else:
            frames = tuple(np.frombuffer(frame, dtype=np.uint8) for frame in value_to_frames(value))
            self._send(c.Answer(number=ask.number, frames=frames))

    def _send(self, message: c.FromProcess) -> None:
        # A learner that is gone needs nothing more; the thread that reads ends this process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(message)

    def forward_log(self, record: logging.LogRecord) -> None:
        """Send a line to the learner's log."""
        self._send(c.LogLine(logger=record.name, level=record.levelno, text=record.getMessage()))


class _Forward(logging.Handler):
    """Gives warnings and worse to the learner, which owns the screen."""

    def __init__(self, service: Service) -> None:
        super().__init__(logging.WARNING)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        self._service.forward_log(record)


def _start_logging(level: int, service: Service) -> None:
    """Everything to standard error, which is the process's log file, warnings to the learner too."""
    to_file = logging.StreamHandler()
    to_file.setFormatter(logging.Formatter(LINE))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, _Forward(service)])
    logging.getLogger("async_rl").setLevel(level)


def main() -> NoReturn:
    """Serve the learner at the other end of the link that the only argument names."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    _exit(Service(Link(end, c.FromLearner)).run())


def _exit(code: int) -> NoReturn:
    """End without the interpreter's own end, module by module, which takes a busy machine seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
