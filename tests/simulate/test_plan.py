"""`async-rl plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.cli import run
from async_rl.config import load_config
from async_rl.simulate import costs_of

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = """
[model]
path = "none"
[environment]
type = "arithmetic"
[evaluation]
every = 0
[sampling]
group_size = 2
[learner]
batch_groups = 4
[generator]
count = 2
slots = 8
[plan]
members = 500
"""
COSTS = [
    "plan.tokens_per_s=100", "plan.median_tokens=100", "plan.sigma=0.3", "plan.learner_tokens_per_s=1600",
    "plan.generator_price=2", "plan.learner_price=3",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "plan.toml").write_text(CONFIG)
    return str(tmp_path / "plan.toml")


@pytest.mark.slow
def test_it_prints_and_writes_what_it_found(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", config, "--out", str(tmp_path / "out"), *COSTS]) == 0
    printed = capsys.readouterr().out
    for text in ("as given", "best found", "share of the ideal limit", "price of a million trained tokens"):
        assert text in printed
    found = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert found["synchronous"]["settings"]["staleness.max_staleness"] == 0
    given, best = (found[name]["outcome"] for name in ("as_given", "best"))
    assert best["cost_per_million"] <= given["cost_per_million"]
    # 2 x 2 + 3 an hour for what is trained in it.
    assert given["cost_per_million"] == pytest.approx(7 / 3600 / given["trained_tokens_per_s"] * 1e6)
    assert {"learner.ranks", "staleness.max_staleness", "learner.batch_groups"} <= found["curves"].keys()
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_the_example_plans_say_all_that_a_plan_needs(devices: int) -> None:
    config = load_config(str(CONFIGS / f"plan_{devices}_devices.toml"), [])
    assert config.generator.count + config.learner.ranks == devices
    costs = costs_of(config)
    # Given splits are near the even one: the examples are about staleness, not about a gross mistake.
    learner = costs.learner_tokens_per_s * config.learner.ranks
    assert 0.6 < learner / costs.generator_limit(config) < 1.6


def test_costs_that_nobody_gave_are_named(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", config, "plan.tokens_per_s=100"]) == 2
    said = capsys.readouterr().err
    assert "plan.median_tokens, plan.sigma, plan.learner_tokens_per_s missing" in said
    assert "--from-run RUN" in said


def test_a_fleet_without_generators_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", config, *COSTS, "generator.count=0"]) == 2
    assert "at least 1 generator" in capsys.readouterr().err
