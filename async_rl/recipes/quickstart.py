"""The main job: build a tiny policy, then train it asynchronously with a real vLLM engine on this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.config import ConfigError, load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Presets lie beside the package in a checkout."""


def run(overrides: Sequence[str] = ()) -> int:
    """Run configs/quickstart.toml from model building to the summary; returns the exit code of the run."""
    from async_rl.recipes.tiny_model import build

    return run_recipe("quickstart.toml", lambda folder: build(folder, print), overrides)


def run_recipe(preset: str, make_model: Callable[[Path], Path], overrides: Sequence[str]) -> int:
    """Make the model of a preset if it is not there, run learner and generators, show what came out."""
    from async_rl.launch.train import run_train
    from async_rl.recipes.summary import show

    path = CONFIGS / preset
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: recipes run from a checkout of the repository")
    config = load_config(path, overrides)
    started = time.monotonic()
    make_model(Path(config.model.path))
    run_dir = Path(config.run.dir)
    if (run_dir / "metrics.jsonl").exists():
        shutil.move(run_dir, _free_name(run_dir))
    code = run_train(path, overrides)
    if code == 0:
        show(run_dir, time.monotonic() - started, config.staleness.max_staleness)
        written = {"curves": "report.png", "completions": "completions.md", "model": "model"}
        print("   ".join(f"{what}: {run_dir / name}" for what, name in written.items() if (run_dir / name).exists()))
    return code


def _free_name(run_dir: Path) -> Path:
    """A name beside an earlier run's directory, which is kept."""
    number = 1
    while (name := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return name
