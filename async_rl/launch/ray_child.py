"""One process of a run on a Ray cluster, seen by the supervisor as any other."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

from async_rl.config import ConfigError
from async_rl.config.schema import RayResources
from async_rl.errors import InputError
from async_rl.launch import guard
from async_rl.launch.keeper import Order
from async_rl.launch.placement import amounts_of
from async_rl.launch.runner import Line, News, Runner
from async_rl.launch.supervisor import SETTINGS_ERROR, Child

try:
    import ray
    import ray.exceptions
    import ray.util
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"launcher.type = 'ray' needs the package ray ({error}); pip install 'async-rl[ray]'") from error

LOST = 1
"""Exit code of a process that was lost with its actor or its node."""
NEWS_S = 5.0
"""How long an actor waits for news before it answers that there is none."""
_POLL_S = 0.05
_CONCURRENCY = 4
"""Calls that an actor answers at once: news waits there while a signal comes."""


@dataclass(frozen=True)
class Place:
    """A bundle of the run's placement group."""

    group: Any
    index: int
    resources: RayResources
    runtime_env: dict[str, Any]

    def actor(self) -> Any:
        """A new actor in the bundle; Ray starts it when a node holds the bundle and the bundle is free."""
        amounts = dict(amounts_of(self.resources))
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)
        return (
            ray.remote(Runner)
            .options(
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                scheduling_strategy=strategy,
                runtime_env=self.runtime_env,
                max_concurrency=_CONCURRENCY,
                max_restarts=0,
            )
            .remote()
        )

    def free_port(self, host: str, timeout_s: float) -> int:
        """A free port of the node that holds the bundle; raises TimeoutError."""
        actor = self.actor()
        try:
            return int(ray.get(actor.free_port.remote(host), timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"the learner's node started no actor within {timeout_s:g} s (launcher.start_timeout_s)"
            ) from error
        finally:
            ray.kill(actor)

    def node(self) -> str:
        """Address of the node that holds the bundle now, for people."""
        home = ray.util.placement_group_table(self.group)["bundles_to_node_id"].get(self.index)
        return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == home), "a node")


@dataclass
class RayChild(Child):
    """A command that an actor runs on some node of the cluster; its output comes here."""

    place: Place = field(kw_only=True)
    start_timeout_s: float = field(kw_only=True)
    orphan_s: float = field(kw_only=True)
    shows: bool = field(default=False, kw_only=True)
    """Whether its output is shown on the supervisor's terminal too."""
    _actor: Any = field(default=None, init=False)
    _call: Any = field(default=None, init=False)
    """The question that the actor is to answer next: the start, then news."""
    _since: float = field(default=0.0, init=False)
    _pid: int | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)
    _code: int | None = field(default=None, init=False)
    _node: str = field(default="a node", init=False)
    _output: IO[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._output = self.log.open("ab", buffering=0)
        self.started, self.lost = True, None
        self._pid, self._taken, self._code, self._since = None, 0, None, time.monotonic()
        cwd = None if "working_dir" in self.place.runtime_env else os.getcwd()
        order = Order(environ=self.environ, cwd=cwd, orphan_s=self.orphan_s)
        self._actor = self.place.actor()
        self._call = self._actor.start.remote(tuple(self.argv), order)

    def poll(self) -> int | None:
        while self._code is None and ray.wait([self._call], timeout=0)[0]:
            try:
                self._take(ray.get(self._call))
            except ray.exceptions.ActorUnavailableError:
                self._ask()  # The connection was interrupted; Ray says later whether the actor is lost.
                break
            except ray.exceptions.RayTaskError as error:
                refused = isinstance(error.cause, InputError)
                self._end(SETTINGS_ERROR if refused else LOST, f"could not be started: {error.cause}")
            except ray.exceptions.RuntimeEnvSetupError as error:
                self._end(SETTINGS_ERROR, f"has no environment: {_first_line(error)}")
            except ray.exceptions.RayError as error:
                self._end(LOST, f"was lost with its actor on {self._node} ({_reason(error)})")
        if self._code is None and self._pid is None and time.monotonic() - self._since > self.start_timeout_s:
            self._end(
                LOST,
                f"was not started within launcher.start_timeout_s = {self.start_timeout_s:g} s: no node is free for it",
            )
        return self._code

    def terminate(self) -> None:
        if self._pid is None:
            self._end(128 + signal.SIGTERM, "had not started")
        else:
            self._actor.send.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        self._actor.send.remote(int(signal.SIGKILL))
        deadline = time.monotonic() + guard.KILL_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._code is None:
            self._end(128 + signal.SIGKILL, "did not answer and was killed with its actor")

    def clean_up(self) -> None:
        self.started = False
        self._drop_actor()
        if self._output is not None:
            self._output.close()
            self._output = None

    def _take(self, answer: int | News) -> None:
        if isinstance(answer, int):
            self._pid, self._node = answer, self.place.node()
        else:
            self._write(answer.lines)
            self._taken, self._code = answer.taken, answer.code
        if self._code is None:
            self._ask()

    def _ask(self) -> None:
        if self._pid is None:
            return
        self._call = self._actor.news.remote(self._taken, NEWS_S)

    def _write(self, lines: list[Line]) -> None:
        assert self._output is not None
        for line in lines:
            self._output.write(line.text + b"\n")
            if self.shows:
                stream = sys.stderr if line.is_error else sys.stdout
                print(line.text.decode(errors="replace"), file=stream, flush=True)

    def _end(self, code: int, how: str) -> None:
        """It is over without an exit code of its own; what an actor still runs ends with the actor."""
        self._code, self.lost = code, how
        self._drop_actor()

    def _drop_actor(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _reason(error: Exception) -> str:
    """The line in which Ray says why an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "node" in line or "exit" in line), _first_line(error))
