"""`async-rl train`: the whole run by the launcher that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_rl.checkpoints.finished import is_finished, say_finished
from async_rl.config import load_config
from async_rl.config.schema import RayLauncher


def run_train(config_path: Path | str, overrides: Sequence[str] = ()) -> int:
    """Run learner and generators of a config; returns the exit code. Raises ConfigError.

    Of a run that came to its end nothing is started: its generators would wait for a learner.
    """
    config = load_config(config_path, overrides)
    if is_finished(config):
        say_finished(config)
        return 0
    if isinstance(config.launcher, RayLauncher):
        from async_rl.launch.ray import run_ray

        return run_ray(config_path, overrides)
    from async_rl.launch.local import run_local

    return run_local(config_path, overrides)
