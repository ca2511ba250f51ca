"""The staleness study: what its arms are, which version samples a batch, and its figures."""

from pathlib import Path

import pytest

from async_rl.config.effect import several_updates, weighs
from benchmarks.staleness_study import ARMS, STALENESS, History, Job, curve_figures, draw, summarize


@pytest.mark.parametrize("staleness", STALENESS)
def test_history_samples_with_the_version_of_that_age(staleness: int) -> None:
    history = History(staleness)
    for step in range(1, 41):
        history.add(step - 1, {})
        version, _ = history.oldest()
        assert version == max(0, step - 1 - staleness)


def test_arms_differ_in_weight_and_clip_alone() -> None:
    configs = {name: Job(name, 4, seed=1, steps=40).config() for name in ARMS}
    assert {name: weighs(config.algorithm) for name, config in configs.items()} == {
        "uncorrected": False,
        "ppo": False,
        "truncated": True,
        "decoupled": True,
    }
    assert {name: type(config.algorithm.loss).__name__ for name, config in configs.items()} == {
        "uncorrected": "DecoupledPpoLoss",
        "ppo": "PpoLoss",
        "truncated": "ReinforceLoss",
        "decoupled": "DecoupledPpoLoss",
    }
    for config in configs.values():
        assert several_updates(config.learner), "with one update a step no clip acts"
        assert config.learner == configs["decoupled"].learner
        assert (config.staleness.max_staleness, config.run.seed, config.run.steps) == (4, 1, 40)


def test_figures_of_a_curve() -> None:
    figures = curve_figures([(0, 0.4), (2, 0.8), (4, 0.9), (5, 0.7)])
    # Trapezoids: 2 * 0.6 + 2 * 0.85 + 1 * 0.8, over 5 steps.
    assert figures["mean"] == pytest.approx(3.7 / 5)
    assert (figures["final"], figures["lowest"], figures["steps_to_goal"]) == (0.7, 0.4, 4)
    assert curve_figures([(0, 0.4), (2, 0.899)])["steps_to_goal"] is None


def result(arm: str, staleness: int, seed: int, final: float) -> dict:
    figures = {"final": final, "mean": final / 2, "effective_sample_size": 1.0, "steps_to_goal": seed or None}
    return {"arm": arm, "staleness": staleness, "seed": seed, **figures}


def test_summary_over_seeds_in_the_order_of_the_study(tmp_path: Path) -> None:
    runs = [
        result("decoupled", 4, 0, 0.9),
        result("decoupled", 0, 0, 0.95),
        result("uncorrected", 4, 0, 0.2),
        result("decoupled", 4, 1, 0.6),
    ]
    rows = summarize(runs)
    assert [(row["arm"], row["staleness"], row["seeds"]) for row in rows] == [
        ("uncorrected", 4, 1),
        ("decoupled", 0, 1),
        ("decoupled", 4, 2),
    ]
    assert rows[2]["final"] == [0.75, 0.6, 0.9] and rows[2]["mean"] == [0.375, 0.3, 0.45]
    assert rows[2]["steps_to_goal"] == [None, 1]
    draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
