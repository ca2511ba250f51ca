"""How many CPU threads each process takes, so that a learner and generators on one machine do not fight for cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from async_rl.config.schema import Config

VARIABLE = "OMP_NUM_THREADS"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def learner_threads(config: Config, cores: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Threads of one learner rank: learner.threads, else OMP_NUM_THREADS, else an even share of the cores."""
    return config.learner.threads or _given(environ) or _share(config, cores)


def generator_threads(config: Config, cores: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Threads of one engine: generator.threads, else OMP_NUM_THREADS, else an even share of the cores."""
    return config.generator.threads or _given(environ) or _share(config, cores)


def sleep_at_barriers(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep while they wait for each other, unless OMP_WAIT_POLICY is set; before torch is loaded.

    By default they spin, and spin away the core that the process beside them would compute on: on two cores a learner
    of two threads beside one busy process took 28 s for a step, asleep 17 s; alone 9.1 s became 9.5 s.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")


def _given(environ: Mapping[str, str]) -> int | None:
    text = environ.get(VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _share(config: Config, cores: int | None) -> int:
    """Cores divided evenly among the ranks and generators that `async-rl train` starts on one machine."""
    return max(1, (cores or usable_cores()) // (config.learner.ranks + max(1, config.generator.count)))
