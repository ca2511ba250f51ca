"""Predicted against measured throughput: its settings, and the points of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.config import build_config
from async_rl.engines.simulated import SimulatedEngine
from async_rl.leasing import member_seed
from benchmarks.plan_check import BASE, CALIBRATING, RUNS, check_sweep, headlines, same_lengths, throughput
from benchmarks.sweep_point import Pace, Point
from benchmarks.sweep_point import make_config as make_sweep_config
from tests.simulate.settings import lognormal, make_config, make_costs
from tests.simulate.test_calibrate import write_run


def swept(**changes: Any) -> dict[str, Any]:
    """A row of a sweep's summary at equal rates of 6,400 tokens/s."""
    return {
        "overdue": "mask", "max_staleness": 2, "sigma": 0.5, "batch_per_slots": 4, "publish_every": 1, "generators": 2,
        "generator_rate": 6400.0, "learner_rate": 6400.0, "trained_tokens_per_s": 6400.0,
        "publication_s": {"gather": 0.001, "pause": 0.01, "publication": 0.015},
    } | changes  # fmt: skip


def test_one_row_of_a_sweep_predicts_its_runs() -> None:
    """Equal rates: nearly all of the limit with staleness; a generator less halves it."""
    rows = [swept(), swept(generators=1, generator_rate=3200.0, trained_tokens_per_s=3300.0)]
    first, second = check_sweep({"summary": rows, "runs": [row | {"seed": 0, "steps": 30} for row in rows]})
    assert first["predicted"] == pytest.approx(6300, rel=0.03)
    assert first["error"] == pytest.approx(first["predicted"] / 6400 - 1, abs=1e-4)
    assert second["predicted"] == pytest.approx(3200, rel=0.03)
    counted, largest, _ = headlines([first, second])
    assert (counted.value, counted.unit) == (2, "of 2")
    assert largest.value == max(abs(first["error"]), abs(second["error"]))


def test_members_have_the_lengths_of_the_engine_and_a_seed_has_its_own() -> None:
    config = make_sweep_config(Point("mask", 2, 0.5, 4), Pace(), Path("unused"), Path("unused"), seed=3)
    lengths = same_lengths(config)(7, 8)
    engine = SimulatedEngine(config.generator.engine)
    seeds = [member_seed(3, "train", 7, member) for member in range(8)]
    assert lengths == tuple(engine.draw_length(np.random.default_rng(seed)) for seed in seeds)
    assert len(set(lengths)) > 4 and lengths != same_lengths(config)(8, 8)


def test_all_runs_have_settings_that_load() -> None:
    assert next(iter(RUNS)) == CALIBRATING
    for overrides in RUNS.values():
        build_config(BASE | {"model": {"path": "m"}}, [*overrides, "run.steps=16"])


def test_throughput_is_that_of_the_batches(tmp_path: Path) -> None:
    run = write_run(tmp_path, make_config(), make_costs(lengths=lognormal(0.3)))
    tokens = sum(record.tokens for record in run.records[1:])
    assert throughput(tmp_path) == pytest.approx(tokens / (run.marks[-1].time - run.marks[1].time), rel=1e-6)
