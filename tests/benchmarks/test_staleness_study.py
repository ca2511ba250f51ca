"""The staleness study: what its arms are, which version samples a batch, and its figures."""

import json
from pathlib import Path

import pytest

from async_rl.config.effect import several_updates, weighs
from benchmarks import staleness_text
from benchmarks.common import ROOT
from benchmarks.staleness_study import ARMS, STALENESS, History, Job, curve_figures, draw, summarize

PAGE, RESULT = ROOT / "docs/staleness_study.md", ROOT / "benchmarks/results/staleness_study.json"


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


def figures() -> dict:
    """As a result file: two arms, two ages, two seeds; staleness 4 costs one of them 0.3."""
    finals = {("decoupled", 0): 0.95, ("decoupled", 4): 0.94, ("uncorrected", 0): 0.95, ("uncorrected", 4): 0.65}
    runs = [result(*key, seed, final + 0.01 * seed) for key, final in finals.items() for seed in (0, 1)]
    for run in runs:
        run |= {"steps": 40, "effective_sample_size": 1.0 if run["staleness"] == 0 else 0.4}
    return json.loads(json.dumps({"summary": summarize(runs), "runs": runs, "goal": 0.9}))


def test_table_and_sentences_go_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{staleness_text.BEGIN}what was there\n{staleness_text.END}after\n")
    for _ in range(2):
        staleness_text.write(figures(), document)
    written = document.read_text()
    assert written.startswith("before\n") and written.endswith("after\n") and "what was there" not in written
    assert written.count("| staleness |") == 1
    assert "| 4 | 0.655 (0.650 to 0.660) | 0.945 (0.940 to 0.950) | 0.328 (0.325 to 0.330) |" in written
    said = " ".join(written.split())
    assert "after 40 steps went from 0.955 to 0.655 (-0.300)" in said
    assert "0.9 was reached by 1 of 2 seeds (step 1) at staleness 0" in said
    assert "1.00 at 0, 0.40 at 4; below a half from 4 on." in said
    assert max(map(len, written.split(staleness_text.PICTURE)[0].split("\n\n- ")[1].splitlines())) <= 120


def test_headlines_are_the_youngest_and_the_oldest_data_of_each_arm() -> None:
    rows = {one.what: one.value for one in staleness_text.headlines(figures())}
    assert len(rows) == 8
    assert str(rows["taken for on-policy, staleness 4: held-out accuracy after the last step"]) == (
        "0.655 (0.65 to 0.66, n = 2)"
    )


def test_the_document_shows_the_recorded_result(tmp_path: Path) -> None:
    assert all(PAGE.read_text(encoding="utf-8").count(mark) == 1 for mark in (staleness_text.BEGIN, staleness_text.END))
    if not RESULT.exists():
        pytest.skip("no study is recorded yet")
    copy = tmp_path / PAGE.name
    copy.write_bytes(PAGE.read_bytes())
    staleness_text.write(json.loads(RESULT.read_text()), copy)
    command = f"python -m benchmarks.staleness_study --draw {RESULT.relative_to(ROOT)} --into {PAGE.relative_to(ROOT)}"
    assert copy.read_bytes() == PAGE.read_bytes(), f"run `{command}`"
