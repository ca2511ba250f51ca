"""One save under way: a thread that writes beside training, and a wait for it that ends."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from async_rl.checkpoints.names import CheckpointError, folder_of

if TYPE_CHECKING:
    from async_rl.checkpoints.save import Saved


class Writing:
    """Runs `write` in a thread of its own.

    The end of the process waits for it too, but no longer than the deadline: a disk that hangs keeps nobody from
    starting the same command again.
    """

    def __init__(self, step: int, run_dir: Path, deadline_s: float, write: Callable[[], Saved]) -> None:
        self.step, self._run_dir, self._deadline_s = step, run_dir, deadline_s
        self._until = time.monotonic() + deadline_s
        self._future: Future[Saved] = Future()
        self._future.add_done_callback(lambda _: atexit.unregister(self._at_exit))
        atexit.register(self._at_exit)
        Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return once it ended; CheckpointError when it takes longer than the deadline."""
        if not self._ended_in_time():
            raise CheckpointError(
                f"the checkpoint of step {self.step} is not written after {self._deadline_s:g} s "
                f"(checkpoint.deadline_s): the disk of {folder_of(self._run_dir)} hangs, or is too slow for it. "
                "The complete checkpoint before it is intact: mend the disk and start the same command again, or "
                "raise checkpoint.deadline_s"
            )

    def result(self) -> Saved:
        """What was saved, of one that is done; raises what ended it."""
        assert self.done(), "wait for it first"
        return self._future.result()

    def _run(self, write: Callable[[], Saved]) -> None:
        try:
            self._future.set_result(write())
        except BaseException as error:  # The boundary of the thread: raised again where the result is taken.
            self._future.set_exception(error)

    def _ended_in_time(self) -> bool:
        return bool(wait([self._future], max(0.0, self._until - time.monotonic())).done)

    def _at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._ended_in_time()
