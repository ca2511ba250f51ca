"""Learner and generators on a Ray cluster: `async-rl train CONFIG launcher.type=ray` (docs/ray.md).

One placement group holds a bundle for the learner (all its ranks, with the coordinator beside rank 0) and one for each
generator. Every process has an actor in its bundle that does nothing but run the ordinary command and hand on its
output (`runner.py`); the rules of the run are those of every launcher (`supervisor.py`). When a node is lost Ray moves
its bundles to other nodes, and the generators that were there are started again in them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.addresses import split_address
from async_rl.config import Config, ConfigError, load_config
from async_rl.config.schema import RayLauncher, TransportConfig
from async_rl.config.threads import VARIABLE
from async_rl.launch.commands import Command, commands_of
from async_rl.launch.placement import asks_of, can_ever_fit, describe_asks, describe_nodes, host_for, threads
from async_rl.launch.ray_child import Place, RayChild, ray
from async_rl.launch.supervisor import Deadlines, Supervisor, caught_signals, say

CONNECT_S = 30.0
"""Longest wait for a cluster at a given address to take a connection."""
QUIET_S = 5.0
"""A wait for room that is longer than this is told."""
_POLL_S = 0.2


def run_ray(config_path: Path | str, overrides: Sequence[str] = ()) -> int:
    """Run learner and generators of a config on a Ray cluster; returns the exit code.

    Raises ConfigError, ConnectionError when there is no cluster, TimeoutError when it has no room for the run.
    """
    config = load_config(config_path, overrides)
    launcher = config.launcher
    assert isinstance(launcher, RayLauncher)
    runtime_env = read_runtime_env(launcher.runtime_env)
    with connected(launcher.address), caught_signals() as signals:
        _check_hosts(config_path, overrides, config)
        with placed(config, launcher, signals) as group:
            if group is None:
                return 128 + signals[0]
            cluster = Cluster(config, launcher, group, runtime_env)
            overrides = [*overrides, *cluster.address_overrides()]
            config = load_config(config_path, overrides)
            learner, generators = cluster.children(config, [str(config_path), *overrides])
            return Supervisor(learner, generators, config.generator.max_restarts).supervise(signals)


def read_runtime_env(path: str | None) -> dict[str, Any]:
    """Ray's runtime_env out of a JSON file; raises ConfigError."""
    if path is None:
        return {}
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"launcher.runtime_env = {path!r}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"launcher.runtime_env = {path!r}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"launcher.runtime_env = {path!r}: holds a {type(value).__name__}, not an object")
    return value


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to a cluster for as long as this block; one that was started for it is stopped after it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address is not None and ":" in address and "://" not in address:
            # Ray itself tries for minutes.
            socket.create_connection(split_address(address), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster at launcher.address = {address!r}: {error}; `ray status` says whether one runs here"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _check_hosts(path: Path | str, overrides: Sequence[str], config: Config) -> None:
    """ConfigError where the learner will need keys that are not set, whichever node it gets."""
    hosts = {node["NodeManagerAddress"] for node in _alive()}
    for host in hosts:
        wanted = host_for(config.transport.host, TransportConfig().host, host, hosts)
        load_config(path, [*overrides, f"transport.host={wanted}"])


# --- room ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def placed(config: Config, launcher: RayLauncher, signals: Sequence[int]) -> Iterator[Any]:
    """A placement group for the run, removed at the end; None when a signal came first.

    Raises ConfigError where no node could ever hold what was asked for, TimeoutError where the cluster was too busy.
    """
    asks = asks_of(config, launcher)
    group = ray.util.placement_group([dict(ask.amounts) for ask in asks], strategy=launcher.strategy)
    try:
        started, told = time.monotonic(), False
        while not signals and not group.wait(_POLL_S):
            waited_s = time.monotonic() - started
            if waited_s > launcher.placement_timeout_s:
                raise _no_room(asks, launcher)
            if waited_s > QUIET_S and not told:
                say(f"waiting up to {launcher.placement_timeout_s:g} s for {describe_asks(asks, launcher.strategy)}")
                told = True
        yield None if signals else group
    finally:
        ray.util.remove_placement_group(group)


def _no_room(asks: Sequence[Any], launcher: RayLauncher) -> Exception:
    nodes = [node["Resources"] for node in _alive()]
    names = [name for ask in asks for name in ask.amounts]
    fits = can_ever_fit(asks, nodes, launcher.strategy)
    there = describe_nodes(nodes, ray.available_resources() if fits else None, names)
    text = (
        f"the run asks for {describe_asks(asks, launcher.strategy)}, and within launcher.placement_timeout_s = "
        f"{launcher.placement_timeout_s:g} the cluster had no room for that: {there}; "
    )
    if fits:
        return TimeoutError(text + "wait for others to end, raise launcher.placement_timeout_s, or add nodes")
    return ConfigError(
        text + "lower launcher.learner_resources, launcher.generator_resources or generator.count, choose another "
        "launcher.strategy, or add nodes"
    )


# --- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A run's place on the cluster."""

    config: Config
    launcher: RayLauncher
    group: Any
    runtime_env: dict[str, Any]

    def address_overrides(self) -> list[str]:
        """transport.host and port, now that the learner's node is known."""
        transport = self.config.transport
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive()}
        home = nodes[ray.util.placement_group_table(self.group)["bundles_to_node_id"][0]]
        host = host_for(transport.host, TransportConfig().host, home, nodes.values())
        port = transport.port or self._place(0).free_port(host, self.launcher.start_timeout_s)
        return [f"transport.host={host}", f"transport.port={port}"]

    def children(self, config: Config, arguments: Sequence[str]) -> tuple[RayChild, list[RayChild]]:
        """The processes of a run; `arguments` are the config file and overrides that each is given."""
        learner, generators = commands_of(config, arguments)
        of_learner = threads(config.learner.threads, self.launcher.learner_resources, config.learner.ranks)
        of_generator = threads(config.generator.threads, self.launcher.generator_resources, 1)
        return (
            self._child(learner, 0, of_learner, shows=True),
            [self._child(command, index + 1, of_generator) for index, command in enumerate(generators)],
        )

    def _place(self, index: int) -> Place:
        resources = self.launcher.generator_resources if index else self.launcher.learner_resources
        return Place(self.group, index, resources, self.runtime_env)

    def _child(self, command: Command, index: int, num_threads: int, shows: bool = False) -> RayChild:
        return RayChild(
            command.name,
            command.words,
            {"PYTHONUNBUFFERED": "1", VARIABLE: str(num_threads)},
            command.log,
            place=self._place(index),
            start_timeout_s=self.launcher.start_timeout_s,
            orphan_s=Deadlines().orphan_s,
            shows=shows,
        )
