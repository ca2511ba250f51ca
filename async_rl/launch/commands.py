"""The commands of a run: those that a user types, with the names and the address that a launcher gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from async_rl.addresses import join_address
from async_rl.config import Config


class Command(NamedTuple):
    """One process of a run."""

    name: str
    words: tuple[str, ...]
    """What follows the interpreter."""
    log: Path
    """Where its output goes, unless it owns the terminal."""


def commands_of(config: Config, arguments: Sequence[str]) -> tuple[Command, list[Command]]:
    """The learner's and the generators' commands; `arguments` are the config file and overrides that each is given."""
    command = ("-m", "async_rl.cli")
    logs = Path(config.run.dir) / "logs"
    address = join_address(config.transport.host, config.transport.port)
    generators = []
    for index in range(config.generator.count):
        name = f"generator-{index}"
        words = (*command, "generator", *arguments, "--learner", address, "--name", name)
        generators.append(Command(name, words, logs / f"{name}.log"))
    return Command("learner", (*command, "learner", *arguments), logs / "learner.log"), generators
