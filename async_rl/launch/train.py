"""`async-rl train`: the whole run by the launcher that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_rl.config import load_config
from async_rl.config.schema import RayLauncher


def run_train(config_path: Path | str, overrides: Sequence[str] = ()) -> int:
    """Run learner and generators of a config; returns the exit code. Raises ConfigError."""
    if isinstance(load_config(config_path, overrides).launcher, RayLauncher):
        from async_rl.launch.ray import run_ray

        return run_ray(config_path, overrides)
    from async_rl.launch.local import run_local

    return run_local(config_path, overrides)
